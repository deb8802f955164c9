// The Gaussian error linear unit of one element, f(x) = x Phi(x), with its slope f' and the slope's slope, its bend
// f''. Phi is the normal distribution, or one of two sigmoids that approximate it. What a caller does not use is not
// computed.
#pragma once

#include "../../common/activations.h"
#include "../../common/formula.h"
#include "../../common/functions.h"

namespace msops::gelu {

// With Phi's density p(x) = e^(-x^2/2) / sqrt(2 pi):  f' = Phi + x p,  f'' = (2 - x^2) p
//
// For x <= 0, Phi(x) is e^(-x^2/2) times a function without cancellation: r times a polynomial of r = 1 / (1 + a |x|),
// with a relative error of 9e-6 for types of 16 bits, of 4e-9 in float and of 4e-17 in double. It interpolates that
// function in the r of all |x| <= kFar, beyond which e^(-x^2/2) is 0; w in [-1, 1] is r moved and scaled.
template <typename T>
struct Tail {  // of 16 bits
  static constexpr float kFar = 14.5f, kA = 0.3f, kScale = 2.45977011f, kShift = -1.45977011f;
  static constexpr float kTerms[] = {0.255939627f,  0.162530482f,     0.0676641681f,
                                     0.0150700703f, -0.000348126867f, -0.000851790902f};
};

template <>
struct Tail<float> {
  static constexpr float kFar = 14.5f, kA = 0.3f, kScale = 2.45977011f, kShift = -1.45977011f;
  static constexpr float kTerms[] = {0.255939896f,     0.162516083f,    0.0676507282f,    0.0151638029f,
                                     -0.000296260557f, -0.00100751678f, -4.32998273e-05f, 8.11842889e-05f,
                                     1.73769106e-06f,  -6.35708774e-06f};
};

template <>
struct Tail<double> {
  static constexpr double kFar = 39, kA = 0.2, kScale = 2.2564102564102564, kShift = -1.2564102564102564;
  static constexpr double kTerms[] = {
      0.17033792891176727,     0.14024520173287319,     0.096797979149959509,    0.055443694420753004,
      0.025734013027077927,    0.0091945865950680255,   0.002213075598202688,    0.00017254972438687395,
      -0.00010487029547659777, -3.864551519983314e-05,  8.9422856189387133e-07,  3.5619769094465362e-06,
      3.7127870378903685e-07,  -3.1686580834169631e-07, -5.8992526570554854e-08, 3.2079904673935944e-08,
      6.9255304773645925e-09,  -3.7603486216719109e-09, -6.6981656193940699e-10, 4.4322836454682417e-10,
      4.158383680050589e-11,   -3.5334471532150813e-11};
};

template <typename T>
struct Exact {
  using C = Compute<T>;
  C value, slope, bend;

  MSOPS_BOTH explicit Exact(C x) {
    using Of = Tail<T>;
    const C length = min(abs(x), Of::kFar), square = length * length;
    C e = Activations<T>::exp(-square / 2);
    // The square's rounding error is that of the power's exponent.
    if constexpr (sizeof(T) > 2) e -= e * (std::fma(length, length, -square) / 2);
    const C density = e * C(0.398942280401432678), along = length * density;
    const C r = Activations<T>::quotient(C(1), 1 + Of::kA * length);
    const C lower = e * r * polynomial<0>(r * Of::kScale + Of::kShift), phi = x < 0 ? lower : 1 - lower;
    value = x * phi;
    slope = x < 0 ? phi - along : phi + along;
    bend = (2 - square) * density;
  }

 private:
  template <size_t k>
  static MSOPS_BOTH C polynomial([[maybe_unused]] C w) {
    constexpr C kTerm = Tail<T>::kTerms[k];
    if constexpr (k + 1 == sizeof Tail<T>::kTerms / sizeof(C)) {
      return kTerm;
    } else {
      return kTerm + w * polynomial<k + 1>(w);
    }
  }
};

// Phi is s = 1 / (1 + e^-u), where u = 2 sqrt(2/pi) (x + 0.044715 x^3), since (1 + tanh(u/2)) / 2 = s. Then
// f' = s + x s (1 - s) u',  f'' = s (1 - s) (2u' + x ((1 - 2s) u'^2 + u''))
//
// With e = e^-|u| and r = 1 / (1 + e), the smaller of s and 1 - s is e r, the larger one r: neither loses digits.
template <typename T>
struct Tanh {
  using C = Compute<T>;
  C value, slope, bend;

  MSOPS_BOTH explicit Tanh(C x) {
    constexpr C kFar = 64;  // s is 0 or 1 long before, and no power of a smaller x overflows
    constexpr C kLinear = C(1.5957691216057307), kCubic = kLinear * C(0.044715);
    const C near = clamp(x, -kFar, kFar), square = near * near;
    const C u = near * (kLinear + kCubic * square), e = Activations<T>::exp(-abs(u));
    const C r = Activations<T>::quotient(C(1), 1 + e), s = u < 0 ? e * r : r, width = e * r * r;
    const C u1 = kLinear + 3 * kCubic * square, u2 = 6 * kCubic * near;
    value = x * s;
    slope = s + near * width * u1;
    bend = width * (2 * u1 + near * ((1 - 2 * s) * u1 * u1 + u2));
  }
};

// Phi is s = 1 / (1 + e^-ax):  f' = s + ax s (1 - s),  f'' = a s (1 - s) (2 + ax (1 - 2s))
template <typename T>
struct Sigmoid {
  using C = Compute<T>;
  C value, slope, bend;

  MSOPS_BOTH explicit Sigmoid(C x) {
    constexpr C kFar = 512, kA = C(1.702);  // beyond, s is 0 or 1, and the products with s (1 - s) are 0
    const C u = kA * clamp(x, -kFar, kFar), e = Activations<T>::exp(-abs(u));
    const C r = Activations<T>::quotient(C(1), 1 + e), s = u < 0 ? e * r : r, width = e * r * r;
    value = x * s;
    slope = s + u * width;
    bend = kA * width * (2 + u * (1 - 2 * s));
  }
};

// FormulaOf has a formula of one of them for each dtype.
template <template <template <typename> class, typename> class Formula, template <typename> class Gelu>
struct FormulaOf {
  template <typename T>
  using Type = Formula<Gelu, T>;
};

// Calls run(FormulaOf<Formula, Gelu>{}), where Gelu is at this place of the list.
template <template <template <typename> class, typename> class Formula, template <typename> class First,
          template <typename> class... Rest, typename Run>
int with_gelu_at(int64_t place, const Run& run) {
  if constexpr (sizeof...(Rest) > 0)
    if (place > 0) return with_gelu_at<Formula, Rest...>(place - 1, run);
  return run(FormulaOf<Formula, First>{});
}

// Does so, where the attribute "approximate" is a place among Exact, Tanh and More.
template <template <template <typename> class, typename> class Formula, template <typename> class... More, typename Run>
int with_gelu(Call& call, const Run& run) {
  return with_gelu_at<Formula, Exact, Tanh, More...>(call.attribute("approximate", 0, 1 + sizeof...(More)), run);
}

// run<Formula, More...>(call, {"x"}, {"y"}) is an entry of these inputs and outputs.
template <template <template <typename> class, typename> class Formula, template <typename> class... More,
          size_t kInputs, size_t kOutputs>
int run(Call& call, const char* const (&inputs)[kInputs], const char* const (&outputs)[kOutputs]) {
  return with_gelu<Formula, More...>(
      call, [&](auto of) { return run_formula<decltype(of)::template Type>(call, inputs, outputs, Names<0>{}); });
}

}  // namespace msops::gelu
