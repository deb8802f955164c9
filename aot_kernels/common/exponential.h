// Exponential computes e^x and e^x - 1 for x <= 0, e^x for any x, and tanh, on the CPU. It has neither branches nor
// calls, so that loops over it vectorize.
//
// Let n be the whole number nearest to x / ln 2, and r = x - n ln 2. Then e^x = 2^n e^r, and r is so small that the
// first terms of the series of e^r are enough: the terms after them are below half a unit in the last place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "dtype.h"

namespace msops {

// e^x = 2^(x kLog2E)
template <typename C>
constexpr C kLog2E = C(1.44269504088896340736);

template <typename C>
struct Binary;

template <>
struct Binary<float> {
  using Bits = uint32_t;
  static constexpr int kDigits = 23, kBias = 127, kTerms = 7;
  static constexpr float kLowest = -104;                                         // e^x is 0 below it
  static constexpr float kLn2High = 0x1.63p-1f, kLn2Low = -2.1219444005469e-4f;  // n * kLn2High is exact
};

template <>
struct Binary<double> {
  using Bits = uint64_t;
  static constexpr int kDigits = 52, kBias = 1023, kTerms = 13;
  static constexpr double kLowest = -746;
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 1.90821492927058770002e-10;
};

template <typename C>
class Exponential : Binary<C> {
  using Format = Binary<C>;
  using Bits = typename Format::Bits;

 public:
  static MSOPS_BOTH C exp(C x) {
    const Exponential e(x, Format::kLowest);
    // The power is applied in two steps, since 2^n may be too small for a factor; only the second step rounds.
    return (1 + e.rest()) * e.power(64) * C(0x1p-64);
  }

  // Returns e^x for any x, also where it is infinite.
  static MSOPS_BOTH C exp_of_any(C x) {
    constexpr C kHighest = Format::kBias * C(0.7);  // e^x is infinite above it
    const Exponential e(x > kHighest ? kHighest : x, Format::kLowest);
    return (1 + e.rest()) * e.power(x > 0 ? -64 : 64) * (x > 0 ? C(0x1p64) : C(0x1p-64));
  }

  static MSOPS_BOTH C expm1(C x) {
    const Exponential e(x, kNone);
    return e.power(0) * e.rest() + (e.power(0) - 1);
  }

  // Returns tanh of any x. With z = e^-2|x|, tanh |x| = (1 - z) / (1 + z) = 1 - 2z / (1 + z); the second form keeps
  // more digits where the result is near to 1.
  static MSOPS_BOTH C tanh(C x) {
    const C size = std::abs(x);
    const Exponential e(-2 * size, kNone);
    const C power = e.power(0), z = power * e.rest() + power, less = power * e.rest() + (power - 1);
    const C quotient = (size < C(0.55) ? -less : 2 * z) / (1 + z);
    return std::copysign(size < C(0.55) ? quotient : 1 - quotient, x);
  }

 private:
  static constexpr C kNone = -50;  // e^x is negligible beside 1 below it

  // Adding kRound rounds to a whole number, which is then in the lowest bits.
  static constexpr C kRound = C(Bits(3) << (Format::kDigits - 1));

  MSOPS_BOTH Exponential(C x, C lowest) {
    if (x < lowest) x = lowest;  // NaN stays
    const C shifted = x * kLog2E<C> + kRound, n = shifted - kRound;
    r_ = x - n * Format::kLn2High - n * Format::kLn2Low;
    std::memcpy(&n_, &shifted, sizeof n_);
  }

  // 2^(n + more)
  MSOPS_BOTH C power(int more) const {
    const Bits bits = (n_ + static_cast<Bits>(Format::kBias + more)) << Format::kDigits;
    C result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }

  // e^r - 1
  MSOPS_BOTH C rest() const { return r_ + r_ * r_ * series<2>(r_); }

  // 1/k! + r/(k+1)! + r^2/(k+2)! + ...
  template <int k>
  static MSOPS_BOTH C series([[maybe_unused]] C r) {
    constexpr C kFirst = inverse_factorial(k);
    if constexpr (k == Format::kTerms) {
      return kFirst;
    } else {
      return kFirst + r * series<k + 1>(r);
    }
  }
  static constexpr C inverse_factorial(int k) {
    double product = 1;
    for (; k > 1; --k) product *= k;
    return C(1 / product);
  }

  C r_;
  Bits n_;
};

}  // namespace msops
