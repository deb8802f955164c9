// With more than kFew taps, on both devices, each pass is a correlation of a row with taps in a fixed order,
//
//   result_i = sum over k < taps of tap_k in_(i+k)
//
// or, for the gradient of the taps, sums over steps. A Correlation is one of them: `outputs` and `taps` are their
// numbers, in_i is signal()[i - history], and put(i, sum) stores what a sum becomes.
#pragma once

#include "problem.h"

namespace msops::causal_conv1d {

template <typename T>
struct Convolved {
  using C = Compute<T>;
  const Problem<T>& p;
  int64_t row;
  int64_t outputs, taps;

  MSOPS_BOTH Convolved(const Problem<T>& problem, int64_t of)
      : p(problem), row(of), outputs(problem.s.length), taps(problem.s.width) {}
  MSOPS_BOTH C tap(int64_t k) const { return p.weight[row % p.s.channels * p.s.width + k]; }
  MSOPS_BOTH Signal<T> signal() const { return p.signal(row); }
  MSOPS_BOTH C bias() const { return p.bias[row % p.s.channels]; }
  MSOPS_BOTH void put(int64_t i, C sum) const { assign(p.out[row * p.s.length + i], p.activated(sum + bias())); }
};

// Computes g. Without an activation, g is dout, and there are no taps to sum over.
template <typename T>
struct OutputGradient : Convolved<T> {
  using C = Compute<T>;

  MSOPS_BOTH OutputGradient(const Problem<T>& problem, int64_t of) : Convolved<T>(problem, of) {
    if (!problem.is_silu) this->taps = 0;
  }
  MSOPS_BOTH void put(int64_t i, C sum) const {
    const int64_t at = this->row * this->p.s.length + i;
    this->p.gradients[at] = this->p.gradient(C(this->p.dout[at]), sum + this->bias());
  }
};

// Computes dx and the gradient of the initial state: result i is the gradient of step i - history.
template <typename T>
struct InputGradient {
  using C = Compute<T>;
  const Problem<T>& p;
  int64_t row;
  int64_t outputs, taps;

  MSOPS_BOTH InputGradient(const Problem<T>& problem, int64_t of)
      : p(problem), row(of), outputs(problem.s.length + problem.s.history()), taps(problem.s.width) {}
  MSOPS_BOTH C tap(int64_t k) const { return p.weight[row % p.s.channels * p.s.width + p.s.history() - k]; }
  MSOPS_BOTH Signal<C> signal() const { return {p.gradients + row * p.s.length, nullptr, p.s.length, 0}; }
  MSOPS_BOTH void put(int64_t i, C sum) const { p.put_gradient(row, i - p.s.history(), sum); }
};

}  // namespace msops::causal_conv1d
