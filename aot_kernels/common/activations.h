// Activations of one element of type T, in Compute<T>: to float's or double's accuracy, or on the GPU for float16 by
// its approximate exponential and quotient, whose error of some 2^-21 is far below the 2^-11 of rounding to float16.
#pragma once

#include <cmath>
#include <type_traits>

#include "exponential.h"

namespace msops {

template <typename T>
struct Activations {
  using C = Compute<T>;

  // e^-|x| is in [0, 1], so that nothing overflows, and small results keep all their digits.
  static MSOPS_BOTH C sigmoid(C x) {
    const C z = exp(-std::abs(x));
    return quotient(x < 0 ? z : C(1), C(1) + z);
  }

  static MSOPS_BOTH C tanh(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) {
      // Where 1 - e^-2|x| would lose digits, the series' first terms are enough.
      const float z = exp(-2 * std::abs(x)), square = x * x;
      const float small = x * (1 + square * (-1.f / 3 + square * (2.f / 15)));
      return std::abs(x) < 0.25f ? small : copysignf(quotient(1 - z, 1 + z), x);
    }
    return std::tanh(x);
#else
    return Exponential<C>::tanh(x);
#endif
  }

  // e^x - 1 for x <= 0
  static MSOPS_BOTH C expm1(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value)
      return x > -0.0625f ? x * (1 + x * (1.f / 2 + x * (1.f / 6))) : exp(x) - 1;
    return std::expm1(x);
#else
    return Exponential<C>::expm1(x);
#endif
  }

 private:
  // e^x for x <= 0
  static MSOPS_BOTH C exp(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return __expf(x);
    return std::exp(x);
#else
    return Exponential<C>::exp(x);
#endif
  }
  static MSOPS_BOTH C quotient(C a, C b) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return __fdividef(a, b);
#endif
    return a / b;
  }
};

}  // namespace msops
