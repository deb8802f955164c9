// The forward pass walks over the steps of each channel, and keeps each kEvery-th state. The backward pass walks back,
// and computes the states in between again.
#pragma once

#include "../common/numbers.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../common/sum.h"
#include "recurrence.h"

namespace msops::wkv4 {

template <typename T>
struct Forward {
  using C = Compute<T>;
  Sizes s;
  const T *w, *u;    // (channel)
  const T *k, *v;    // (sample, step, channel)
  Numbers<T> state;  // (sample, 3, channel), or none
  T* y;              // (sample, step, channel)
  C* last;           // (sample, 3, channel)
  C* kept;           // (sample, kept, 3, channel)
  C* parts;          // (part, sample, 3, channel): on the GPU, the sums of each part's own steps

  MSOPS_BOTH State<T> start(int64_t sample, int64_t channel) const {
    if (!state.data) return {};
    const int64_t at = s.at_state(sample, channel);
    return {state[at], state[at + s.channels], state[at + 2 * s.channels]};
  }
  MSOPS_BOTH void keep(int64_t sample, int64_t n, int64_t channel, const State<T>& of) const {
    put(kept + s.at_kept(sample, n, channel), of);
  }
  MSOPS_BOTH void finish(int64_t sample, int64_t channel, const State<T>& of) const {
    put(last + s.at_state(sample, channel), of);
  }
  MSOPS_BOTH void put(C* to, const State<T>& of) const {
    to[0] = of.p;
    to[s.channels] = of.q;
    to[2 * s.channels] = of.o;
  }
};

template <typename T>
struct Backward {
  using C = Compute<T>;
  Sizes s;
  const T *w, *u;         // (channel)
  const T *k, *v, *dy;    // (sample, step, channel)
  const C* kept;          // (sample, kept, 3, channel)
  const C *last, *dlast;  // (sample, 3, channel)
  T *dk, *dv;             // (sample, step, channel)
  Numbers<T> dstate;      // (sample, 3, channel), or none
  C *dw, *du;             // (sample, part, channel)
  C* parts;               // (part, sample, 3, channel): on the GPU, the Carry that each part's own steps give

  MSOPS_BOTH State<T> kept_state(int64_t sample, int64_t n, int64_t channel) const {
    const C* const from = kept + s.at_kept(sample, n, channel);
    return {from[0], from[s.channels], from[2 * s.channels]};
  }
  MSOPS_BOTH Carry<T> start(int64_t sample, int64_t channel) const {
    const int64_t p = s.at_state(sample, channel), q = p + s.channels, o = q + s.channels;
    return {dlast[p], dlast[q], dlast[o] - (last[p] * dlast[p] + last[q] * dlast[q])};
  }
  MSOPS_BOTH void finish(int64_t sample, int64_t channel, const Carry<T>& carry) const {
    if (!dstate.data) return;
    const int64_t at = s.at_state(sample, channel);
    dstate.set(at, carry.p);
    dstate.set(at + s.channels, carry.q);
    dstate.set(at + 2 * s.channels, carry.of_exponent(kept_state(sample, 0, channel)));
  }
};

// A Strip is some neighbouring channels of a sample, with their weights in arrays, so that loops over channels
// vectorize. These loops are marked by `ivdep`: GCC gives up on `omp simd` where a loop has objects of its own.
template <int kLength, typename T>
struct Strip {
  int64_t sample, first, count;
  Compute<T> w[kLength], u[kLength];

  static int64_t strips(const Sizes& s) { return (s.channels + kLength - 1) / kLength; }

  template <typename Pass>
  MSOPS_CPU Strip(const Pass& all, int64_t i)
      : sample(i / strips(all.s)),
        first(i % strips(all.s) * kLength),
        count(std::min<int64_t>(kLength, all.s.channels - first)) {
    for (int64_t c = 0; c < count; ++c) {
      const Weights<T> weights = Weights<T>::of(all.w[first + c], all.u[first + c]);
      w[c] = weights.w;
      u[c] = weights.u;
    }
  }
  MSOPS_CPU Weights<T> operator[](int64_t c) const { return {w[c], u[c]}; }
};

// Index i is a strip.
template <typename T>
struct ForwardOnCpu {
  static constexpr int kLength = 64;
  Forward<T> all;

  MSOPS_CPU void operator()(int64_t i) const {
    const Sizes& s = all.s;
    const Strip<kLength, T> strip(all, i);
    States<kLength, T> states;
    for (int64_t c = 0; c < strip.count; ++c) states.set(c, all.start(strip.sample, strip.first + c));
    for (int64_t t = 0; t < s.steps; ++t) {
      if (t % kEvery == 0) keep(strip, t, states);
      const int64_t at = s.at(strip.sample, t, strip.first);
      const T *const k = all.k + at, *const v = all.v + at;
      T* const y = all.y + at;
#pragma GCC ivdep
      for (int64_t c = 0; c < strip.count; ++c) {
        State<T> state = states[c];
        assign(y[c], state.mean(strip[c], k[c], v[c]));
        state.step(strip[c], k[c], v[c]);
        states.set(c, state);
      }
    }
    if (s.steps % kEvery == 0) keep(strip, s.steps, states);
    for (int64_t c = 0; c < strip.count; ++c) all.finish(strip.sample, strip.first + c, states[c]);
  }

 private:
  MSOPS_CPU void keep(const Strip<kLength, T>& strip, int64_t t, const States<kLength, T>& states) const {
    for (int64_t c = 0; c < strip.count; ++c) all.keep(strip.sample, t / kEvery, strip.first + c, states[c]);
  }
};

template <typename T>
struct BackwardOnCpu {
  using C = Compute<T>;
  static constexpr int kLength = 32;
  Backward<T> all;

  MSOPS_CPU void operator()(int64_t i) const {
    const Sizes& s = all.s;
    const Strip<kLength, T> strip(all, i);
    States<kLength, T> states[kEvery], carries;
    Sum<C> dw[kLength], du[kLength];
    for (int64_t c = 0; c < strip.count; ++c) {
      const Carry<T> carry = all.start(strip.sample, strip.first + c);
      carries.set(c, {carry.p, carry.q, carry.o});
    }
    for (int64_t n = s.runs() - 1; n >= 0; --n) {
      const int64_t first = n * kEvery, steps = std::min<int64_t>(kEvery, s.steps - first);
      for (int64_t c = 0; c < strip.count; ++c) states[0].set(c, all.kept_state(strip.sample, n, strip.first + c));
      for (int64_t t = 0; t + 1 < steps; ++t)
        advance(strip, s.at(strip.sample, first + t, strip.first), states[t], states[t + 1]);
      C of_w[kLength] = {}, of_u[kLength] = {};
      for (int64_t t = steps - 1; t >= 0; --t)
        go_back(strip, s.at(strip.sample, first + t, strip.first), states[t], carries, of_w, of_u);
      for (int64_t c = 0; c < strip.count; ++c) {
        dw[c] += of_w[c];
        du[c] += of_u[c];
      }
    }
    for (int64_t c = 0; c < strip.count; ++c) {
      all.finish(strip.sample, strip.first + c, {carries.p[c], carries.q[c], carries.o[c]});
      all.dw[strip.sample * s.channels + strip.first + c] = of_raw(dw[c].total(), strip.w[c]);
      all.du[strip.sample * s.channels + strip.first + c] = du[c].total();
    }
  }

 private:
  MSOPS_CPU void advance(const Strip<kLength, T>& strip, int64_t at, const States<kLength, T>& from,
                         States<kLength, T>& to) const {
    const T *const k = all.k + at, *const v = all.v + at;
#pragma GCC ivdep
    for (int64_t c = 0; c < strip.count; ++c) {
      State<T> state = from[c];
      state.step(strip[c], k[c], v[c]);
      to.set(c, state);
    }
  }
  MSOPS_CPU void go_back(const Strip<kLength, T>& strip, int64_t at, const States<kLength, T>& before,
                         States<kLength, T>& carries, C (&dw)[kLength], C (&du)[kLength]) const {
    const T *const k = all.k + at, *const v = all.v + at, *const dy = all.dy + at;
    T *const dk = all.dk + at, *const dv = all.dv + at;
#pragma GCC ivdep
    for (int64_t c = 0; c < strip.count; ++c) {
      Carry<T> carry{carries.p[c], carries.q[c], carries.o[c]};
      C of_k, of_v, of_w = dw[c], of_u = du[c];
      carry.step(strip[c], before[c], k[c], v[c], dy[c], of_k, of_v, of_w, of_u);
      assign(dk[c], of_k);
      assign(dv[c], of_v);
      carries.set(c, {carry.p, carry.q, carry.o});
      dw[c] = of_w;
      du[c] = of_u;
    }
  }
};

}  // namespace msops::wkv4
