// Activations<T> computes activation functions of one element of type T in Compute<T>, to the accuracy of float or
// double. On the GPU, float16 takes the approximate exponential and reciprocal instructions: their error of about 2^-21
// is far below the 2^-11 of rounding to float16.
#pragma once

#include <cmath>
#include <type_traits>

#include "exponential.h"
#ifdef __CUDACC__
#include "gpu/approx.h"
#endif

namespace msops {

template <typename T>
struct Activations {
  using C = Compute<T>;

  // e^-|x| is in [0, 1], so that nothing overflows, and small results keep all their digits.
  static MSOPS_BOTH C sigmoid(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return rcp_approx_ftz(1 + exp(-x));
#endif
    const C z = exp(-std::abs(x));
    return quotient(x < 0 ? z : C(1), C(1) + z);
  }

  static MSOPS_BOTH C silu(C x) { return x * sigmoid(x); }

  // Returns dy times the slope of silu.
  static MSOPS_BOTH C silu_gradient(C x, C dy) {
    const C s = sigmoid(x);
    return dy * s * (1 + x * (1 - s));
  }

  static MSOPS_BOTH C tanh(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) {
      // Where 1 - 2 / (e^2x + 1) would lose digits, the series' first terms are enough.
      const float square = x * x, small = x + x * square * (-1.f / 3 + square * (2.f / 15));
      return std::abs(x) < 0.125f ? small : 1 - 2 * rcp_approx_ftz(1 + exp(2 * x));
    }
    return std::tanh(x);
#else
    return Exponential<C>::tanh(x);
#endif
  }

  // Returns e^x for x <= 0.
  static MSOPS_BOTH C exp(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return ex2_approx_ftz(x * kLog2E<float>);
    return std::exp(x);
#else
    return Exponential<C>::exp(x);
#endif
  }

  // Returns e^x - 1 for x <= 0.
  static MSOPS_BOTH C expm1(C x) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value)
      return x > -0.03125f ? x + x * x * (1.f / 2 + x * (1.f / 6)) : exp(x) - 1;
    return std::expm1(x);
#else
    return Exponential<C>::expm1(x);
#endif
  }

  // Returns a / b for |a| <= 1 and b in [1, 2^20]. On the GPU, one correction of an approximate reciprocal gives
  // float's own quotient; rounding to float16 hides the error of the reciprocal alone.
  static MSOPS_BOTH C quotient(C a, C b) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return a * rcp_approx_ftz(b);
    if constexpr (std::is_same<T, float>::value) {
      const float r = rcp_approx_ftz(b), near = a * r;
      return fmaf(fmaf(-b, near, a), r, near);
    }
#endif
    return a / b;
  }
};

}  // namespace msops
