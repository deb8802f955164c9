// RWKV-4's weighted mean of values. At step t, earlier values have the weights e^(k_i + (t - 1 - i) w), where w =
// -e^raw is below 0, and the step's own value has the weight e^(u + k_t). A State holds the sums of weighted values and
// of weights, p e^o and q e^o, where o is the largest exponent of a weight among them, so that nothing overflows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common/activations.h"

namespace msops::wkv4 {

constexpr int kEvery = 32;  // steps from one state that the forward pass keeps to the next

struct Sizes {
  int64_t samples, steps, channels;

  MSOPS_BOTH int64_t kept() const { return steps / kEvery + 1; }             // states of a sample
  MSOPS_BOTH int64_t runs() const { return (steps + kEvery - 1) / kEvery; }  // of up to kEvery steps
  MSOPS_BOTH int64_t at(int64_t sample, int64_t step, int64_t channel) const {
    return (sample * steps + step) * channels + channel;
  }
  // Returns where a state's numerator is in (sample, 3, channel), or in `kept`, (sample, kept, 3, channel).
  MSOPS_BOTH int64_t at_state(int64_t sample, int64_t channel) const { return 3 * sample * channels + channel; }
  MSOPS_BOTH int64_t at_kept(int64_t sample, int64_t n, int64_t channel) const {
    return 3 * (sample * kept() + n) * channels + channel;
  }
  // Returns in how many parts of whole runs of kEvery steps threads share a channel's steps on the GPU: in several
  // where there are too few channels to fill it. These read the steps once more, and each adds up those before it.
  int64_t parts() const {
    constexpr int64_t kEnough = 1 << 15, kLeast = 4 * kEvery;  // threads, steps of a part
    constexpr int64_t kWorth = 3, kMost = 256;                 // parts
    const int64_t columns = samples * channels;
    if (columns == 0) return 1;
    const int64_t parts = std::min({kEnough / columns, steps / kLeast, kMost});
    return parts < kWorth ? 1 : parts;
  }
};

// Shares are the factors of two sums, e^(a - m) and e^(b - m) with the larger exponent m, of which one is 1.
template <typename T>
struct Shares {
  using C = Compute<T>;
  C first, second;

  // Takes a - b.
  explicit MSOPS_BOTH Shares(C difference) {
    const C smaller = Activations<T>::exp(-std::fabs(difference));
    first = difference < 0 ? smaller : C(1);
    second = difference < 0 ? C(1) : smaller;
  }
};

// Weights are the decay and the bonus of a channel.
template <typename T>
struct Weights {
  using C = Compute<T>;
  C w, u;

  static MSOPS_BOTH Weights of(T raw, T bonus) {
#ifdef __CUDA_ARCH__
    return {-std::exp(C(raw)), C(bonus)};
#else
    return {-Exponential<C>::exp_of_any(C(raw)), C(bonus)};
#endif
  }
};

// State{} has no steps: any exponent k is larger than its own.
template <typename T>
struct State {
  using C = Compute<T>;
  C p = 0, q = 0, o = C(-1e38);

  MSOPS_BOTH C mean(const Weights<T>& weights, C k, C v) const {
    const Shares<T> shares(o - (weights.u + k));
    return (shares.first * p + shares.second * v) / (shares.first * q + shares.second);
  }
  // Lets the decay act for one step, and adds sums p and q of the exponent k.
  MSOPS_BOTH void add(C decay, C k, C more_p, C more_q) {
    const C decayed = o + decay;
    const Shares<T> shares(decayed - k);
    p = shares.first * p + shares.second * more_p;
    q = shares.first * q + shares.second * more_q;
    o = decayed < k ? k : decayed;
  }
  MSOPS_BOTH void step(const Weights<T>& weights, C k, C v) { add(weights.w, k, v, C(1)); }
};

// States holds the p, q and o of neighbouring channels in arrays, so that loops over channels vectorize.
template <int kLength, typename T>
struct States {
  Compute<T> p[kLength], q[kLength], o[kLength];

  MSOPS_CPU State<T> operator[](int64_t c) const { return {p[c], q[c], o[c]}; }
  MSOPS_CPU void set(int64_t c, const State<T>& state) {
    p[c] = state.p;
    q[c] = state.q;
    o[c] = state.o;
  }
};

// Carry holds the gradient of a state: p and q are dp and dq. The gradient of o is p dp + q dq, since results depend on
// p e^o and q e^o alone, plus the member `o`, which is not 0 where a loss takes o itself.
template <typename T>
struct Carry {
  using C = Compute<T>;
  C p = 0, q = 0, o = 0;

  // Goes back over a step of the gradient dy, from the state before it, and adds to the gradients.
  MSOPS_BOTH void step(const Weights<T>& weights, const State<T>& before, C k, C v, C dy, C& dk, C& dv, C& dw, C& du) {
    const Shares<T> now(before.o - (weights.u + k)), next(before.o + weights.w - k);
    const C weight = now.first * before.q + now.second, mean = (now.first * before.p + now.second * v) / weight;
    const C part = dy / weight, own = part * now.second * (v - mean), earlier = part * now.first;
    const bool is_decayed = !(before.o + weights.w < k);
    dv = part * now.second + next.second * p;
    dk = own + next.second * (v * p + q) + (is_decayed ? C(0) : o);
    dw += next.first * (before.p * p + before.q * q) + (is_decayed ? o : C(0));
    du += own;
    p = next.first * p + earlier;
    q = next.first * q - earlier * mean;
    o = is_decayed ? o : C(0);
  }
  // Returns the gradient of the state's exponent.
  MSOPS_BOTH C of_exponent(const State<T>& state) const { return state.p * p + state.q * q + o; }
};

// Returns the gradient of the raw decay, given that of w = -e^raw.
template <typename C>
MSOPS_BOTH C of_raw(C dw, C w) {
  return dw == 0 ? C(0) : dw * w;
}

}  // namespace msops::wkv4
