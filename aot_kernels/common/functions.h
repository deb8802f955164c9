// Formulas need these functions beside the ones of <math.h>, on both devices: min, max, clamp, abs, pow.
//
// Their arguments may be of any two types of numbers; a whole number beside a float is a float. MSOPS_FORMULA finds
// them by their bare names. Other code writes msops::max, since CUDA has a max of its own, which drops NaN.
#pragma once

#include <math.h>  // also declares exp and its like for float without std::

#include <limits>
#include <type_traits>

#include "dtype.h"

namespace msops {

// min and max return the smaller and the larger of two numbers, or NaN if one of them is NaN.
template <typename A, typename B>
MSOPS_BOTH std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  const C x = C(a), y = C(b);
  return y < x || y != y ? y : x;
}
template <typename A, typename B>
MSOPS_BOTH std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  const C x = C(a), y = C(b);
  return x < y || y != y ? y : x;
}

// With these, a bare max(x, y) outside formulas is ambiguous where CUDA declares its own, and not silently CUDA's.
MSOPS_BOTH float min(float a, float b) { return min<float, float>(a, b); }
MSOPS_BOTH float max(float a, float b) { return max<float, float>(a, b); }
MSOPS_BOTH double min(double a, double b) { return min<double, double>(a, b); }
MSOPS_BOTH double max(double a, double b) { return max<double, double>(a, b); }

// Returns the number in [low, high] that is nearest to x, or NaN if x is NaN.
template <typename C, typename Low, typename High>
MSOPS_BOTH C clamp(C x, Low low, High high) {
  return x < C(low) ? C(low) : C(high) < x ? C(high) : x;
}

template <typename C>
MSOPS_BOTH C abs(C x) {
  if constexpr (std::is_floating_point<C>::value) {
    return ::fabs(x);
  } else {
    return x < 0 ? -x : x;
  }
}

// A float and a whole number give a float; pow of <math.h> would give a double.
template <typename A, typename B>
MSOPS_BOTH std::common_type_t<A, B> pow(A base, B exponent) {
  using C = std::common_type_t<A, B>;
  static_assert(std::is_floating_point<C>::value, "pow takes at least one floating number");
  return ::pow(C(base), C(exponent));
}

}  // namespace msops
