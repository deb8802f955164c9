// Reduces on the CPU, an output after the other.
#pragma once

#include "operations.h"

namespace msops::reduce {

template <typename Operation, typename T>
struct ReduceAcross {
  using C = Compute<T>;
  Across s;
  const T* x;
  Output<C, T> y;

  MSOPS_CPU void operator()(int64_t i) const {
    const T* from = x + i / s.inner * s.terms * s.inner + i % s.inner;
    Running<Operation, C> running;
    for (int64_t r = 0; r < s.terms; ++r) running.add(C(from[r * s.inner]));
    y.put(i, running.total());
  }
};

template <typename Operation, typename T>
struct ReduceAlong {
  using C = Compute<T>;
  Along s;
  const T* x;
  Output<C, T> y;

  MSOPS_CPU void operator()(int64_t k) const {
    Running<Operation, C> running;
    for (int64_t p = 0; p < s.outer; ++p) {
      const T* from = x + (p * s.outputs + k) * s.length;
      for (int64_t l = 0; l < s.length; ++l) running.add(C(from[l]));
    }
    y.put(k, running.total());
  }
};

}  // namespace msops::reduce
