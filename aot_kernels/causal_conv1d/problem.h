// The formulas of both devices. A row is a channel of a sample; x_t for t < 0 is the initial state, then zeros.
//
//   z_t = bias + sum over q of weight_(W-1-q) x_(t-q),  0 <= q < W,  out_t = a(z_t),  final state = the last W - 1 x_t
//   g_t = dout_t a'(z_t), and 0 outside the row
//   dx_t = sum over q of weight_(W-1-q) g_(t+q), and the final state's gradient where x_t is in it;  for t < 0, too
//   dweight_(W-1-q) = sum over t and samples of g_t x_(t-q),  dbias = sum of g_t
//
// where the activation a is silu, or does nothing. A tap is a distance q with its weight.
//
// Up to kFew taps, each step is read once: a part of a row computes g where it is needed, and sums of g x to a row of
// `partial`. For more taps, g is kept in memory, and each of the sums has its own pass (see wide.h).
#pragma once

#include "../common/activations.h"
#include "../common/numbers.h"

namespace msops::causal_conv1d {

constexpr int kFew = 8;

struct Sizes {
  int64_t samples, channels, length, width;

  MSOPS_BOTH int64_t rows() const { return samples * channels; }
  MSOPS_BOTH int64_t history() const { return width - 1; }  // steps that a state holds
};

// Signal is a row of x with the state before it, or of gradients: element t is that of step t.
template <typename T>
struct Signal {
  using C = Compute<T>;
  const T *body, *before;  // before: the `history` elements before the body, or null for zeros
  int64_t length, history;

  MSOPS_BOTH C operator[](int64_t t) const {
    if (t >= 0) return t < length ? C(body[t]) : C(0);
    return before && t >= -history ? C(before[t + history]) : C(0);
  }
};

template <typename T>
struct Problem {
  using C = Compute<T>;
  Sizes s;
  bool is_silu;
  Numbers<T> weight;                         // (channel, tap)
  OptionalNumbers<T> bias;                   // (channel)
  const T *x, *initial_state;                // initial_state may be null
  T *out = nullptr, *final_state = nullptr;  // of the forward pass; what follows is of the backward pass
  const T *dout = nullptr, *dfinal_state = nullptr;
  T *dx = nullptr, *dinitial_state = nullptr;  // dinitial_state may be null
  C *gradients = nullptr, *partial = nullptr;  // gradients: g of each step, for more than kFew taps
  int64_t parts = 1;                           // into how many parts each row is cut

  MSOPS_BOTH Signal<T> signal(int64_t row) const {
    return {x + row * s.length, initial_state ? initial_state + row * s.history() : nullptr, s.length, s.history()};
  }
  // Returns the sums of a part: those of all taps of all channels, then those of all biases.
  MSOPS_BOTH C* sums(int64_t part, int64_t sample) const {
    return partial + (part * s.samples + sample) * s.channels * (s.width + 1);
  }
  MSOPS_BOTH C activated(C z) const { return is_silu ? Activations<T>::silu(z) : z; }
  // Returns g.
  MSOPS_BOTH C gradient(C dout_t, C z) const { return is_silu ? Activations<T>::silu_gradient(z, dout_t) : dout_t; }
  // Stores the gradient of step t of a row, where the sum over taps is given.
  MSOPS_BOTH void put_gradient(int64_t row, int64_t t, C sum) const {
    const int64_t history = s.history(), in_final = t - (s.length - history);
    if (in_final >= 0) sum += C(dfinal_state[row * history + in_final]);
    if (t >= 0) assign(dx[row * s.length + t], sum);
    if (t < 0 && dinitial_state) assign(dinitial_state[row * history + t + history], sum);
  }
  // Copies element i of a row's final state.
  MSOPS_BOTH void put_state(int64_t row, int64_t i) const {
    const int64_t t = s.length - s.history() + i, at = row * s.history() + i;
    if (t >= 0) {
      final_state[at] = x[row * s.length + t];
    } else {
      final_state[at] = initial_state ? initial_state[row * s.history() + t + s.history()] : T(0.f);
    }
  }
};

}  // namespace msops::causal_conv1d
