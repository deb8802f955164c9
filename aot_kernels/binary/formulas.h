// The formulas of the operations of two tensors. Which one runs is known at the launch only: a switch for each pack
// takes a dozen of its hundred instructions, while memory is the limit, and spares a kernel for each operation.
#pragma once

#include "../common/functions.h"
#ifdef __CUDACC__
#include "../common/gpu/approx.h"
#endif
#include "../shared/broadcast/apply.h"
#include "../shared/broadcast/operations.h"

namespace msops::binary {

template <typename T, typename Result>
struct OfTwo {
  static constexpr int kOperands = 2;
  using First = T;
  using Rest = T;
  using Out = Result;
};

// Widened holds a pack's elements as they are computed with.
template <typename T, int N>
struct Widened {
  Compute<T> of[N];

  MSOPS_BOTH explicit Widened(const Pack<T, N>& pack) {
    MSOPS_UNROLL
    for (int j = 0; j < N; ++j) of[j] = Compute<T>(pack.values[j]);
  }
};

// Returns the pack of f(x, y) for each pair of numbers, rounded.
template <typename T, int N, typename F>
MSOPS_BOTH Pack<T, N> each(const Widened<T, N>& x, const Widened<T, N>& y, const F& f) {
  Compute<T> z[N];
  MSOPS_UNROLL
  for (int j = 0; j < N; ++j) z[j] = f(x.of[j], y.of[j]);
  return rounded_pack<T>(z);
}

// Whole numbers wrap around.
template <typename C>
MSOPS_BOTH C plus(C x, C y) {
  if constexpr (std::is_integral<C>::value) {
    using U = std::make_unsigned_t<C>;
    return static_cast<C>(static_cast<U>(x) + static_cast<U>(y));
  } else {
    return x + y;
  }
}
template <typename C>
MSOPS_BOTH C minus(C x, C y) {
  if constexpr (std::is_integral<C>::value) {
    using U = std::make_unsigned_t<C>;
    return static_cast<C>(static_cast<U>(x) - static_cast<U>(y));
  } else {
    return x - y;
  }
}
template <typename C>
MSOPS_BOTH C times(C x, C y) {
  if constexpr (std::is_integral<C>::value) {
    using U = std::make_unsigned_t<C>;
    return static_cast<C>(static_cast<U>(x) * static_cast<U>(y));
  } else {
    return x * y;
  }
}

// Divides elements of T. The exact division of floats takes 11 instructions; for float16, a reciprocal to a unit of
// float32 is enough, with a correction where results are subnormal, which have exact ties.
template <typename T>
MSOPS_BOTH Compute<T> quotient(Compute<T> x, Compute<T> y) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 2) {
    const float reciprocal = rcp_approx_ftz(y), near = x * reciprocal;
    const bool is_subnormal = fabsf(near) < 0x1p-14f && near != 0;
    return is_subnormal ? fmaf(fmaf(-y, near, x), reciprocal, near) : near;
  }
#endif
  return x / y;
}

template <typename C>
MSOPS_BOTH C reciprocal_root(C x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(C) == 4) return rsqrtf(x);
#endif
  return C(1) / ::sqrt(x);
}

// MindSpore's div_no_nan and mul_no_nan take a second number for zero that is nearer to zero than this.
template <typename T>
MSOPS_BOTH constexpr Compute<T> nearly_zero() {
  return sizeof(T) == 2 ? Compute<T>(1e-5) : sizeof(T) == 4 ? Compute<T>(2e-7) : Compute<T>(2e-15);
}

// Arithmetic gives MindSpore's results, also where a number is NaN: maximum and minimum are then the second number.
template <typename T>
struct Arithmetic : OfTwo<T, T> {
  using C = Compute<T>;
  static constexpr C kNear = nearly_zero<T>();
  int op;

  explicit Arithmetic(int operation) : op(operation) {}
  MSOPS_BOTH Arithmetic prepared() const { return *this; }

  template <int N>
  MSOPS_BOTH Pack<T, N> operator()(const Pack<T, N>& first, const Pack<T, N> (&rest)[1]) const {
    const Widened<T, N> x(first), y(rest[0]);
    if (op == kAdd) return each(x, y, [](C a, C b) { return plus(a, b); });
    if (op == kMul) return each(x, y, [](C a, C b) { return times(a, b); });
    if (op == kSub) return each(x, y, [](C a, C b) { return minus(a, b); });
    if (op == kMaximum) return each(x, y, [](C a, C b) { return a > b ? a : b; });
    if (op == kMinimum) return each(x, y, [](C a, C b) { return a < b ? a : b; });
    if (op == kSquaredDifference)
      return each(x, y, [](C a, C b) {
        const C difference = C(T(minus(a, b)));
        return times(difference, difference);
      });
    if constexpr (std::is_integral<T>::value) {  // mul_no_nan, as 0 is the only number near 0
      return each(x, y, [](C a, C b) { return times(a, b); });
    } else {
      if (op == kMulNoNan) return each(x, y, [](C a, C b) { return b < kNear && b > -kNear ? C(0) : a * b; });
      const bool no_nan = op == kDivNoNan;
      return each(x, y, [=](C a, C b) { return no_nan && b < kNear && b > -kNear ? C(0) : quotient<T>(a, b); });
    }
  }
};

// Multiplies or divides numbers of float16 and float32, in either order, as float32.
template <typename T, typename U>
struct Mixed {
  static constexpr int kOperands = 2;
  using First = T;
  using Rest = U;
  using Out = float;
  int op;

  explicit Mixed(int operation) : op(operation) {}
  MSOPS_BOTH Mixed prepared() const { return *this; }

  template <int N>
  MSOPS_BOTH Pack<float, N> operator()(const Pack<T, N>& first, const Pack<U, N> (&rest)[1]) const {
    const Widened<T, N> x(first);
    const Widened<U, N> y(rest[0]);
    Pack<float, N> z;
    MSOPS_UNROLL
    for (int j = 0; j < N; ++j) z.values[j] = op == kMul ? x.of[j] * y.of[j] : quotient<float>(x.of[j], y.of[j]);
    return z;
  }
};

// Returns base^exponent of whole numbers, whose product wraps around. Negative exponents give 0, except of 1 and -1.
template <typename C>
MSOPS_BOTH C whole_power(C base, C exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? -1 : 1) : 0;
  C result = 1;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result = times(result, base);
    base = times(base, base);
  }
  return result;
}

// glibc 2.29 gave pow a new version, which older systems lack. powl has kept its own.
template <typename C>
MSOPS_BOTH C floating_power(C base, C exponent) {
#ifdef __CUDA_ARCH__
  return ::pow(base, exponent);
#else
  return static_cast<C>(::powl(base, exponent));
#endif
}

// An exponent that all elements share is mostly one for which a product or a root is as exact, and faster.
template <typename T>
struct Power : OfTwo<T, T> {
  using C = Compute<T>;
  bool is_shared;

  explicit Power(bool is_shared_exponent) : is_shared(is_shared_exponent) {}
  MSOPS_BOTH Power prepared() const { return *this; }

  template <int N>
  MSOPS_BOTH Pack<T, N> operator()(const Pack<T, N>& first, const Pack<T, N> (&rest)[1]) const {
    const Widened<T, N> x(first), y(rest[0]);
    if constexpr (std::is_integral<T>::value) {
      return each(x, y, [](C a, C b) { return whole_power(a, b); });
    } else {
      if (is_shared) {
        const C exponent = y.of[0], infinity = std::numeric_limits<C>::infinity();
        if (exponent == C(2)) return each(x, y, [](C a, C) { return a * a; });
        // The root of -0 is 0 here, and that of negative infinity is infinite.
        if (exponent == C(0.5)) return each(x, y, [=](C a, C) { return a == -infinity ? infinity : ::sqrt(a + C(0)); });
        if (exponent == C(-0.5))
          return each(x, y, [=](C a, C) { return a == -infinity ? C(0) : reciprocal_root(a + C(0)); });
        if (exponent == C(-1)) return each(x, y, [](C a, C) { return quotient<T>(C(1), a); });
        if (exponent == C(3)) return each(x, y, [](C a, C) { return a * a * a; });
        if (exponent == C(1)) return each(x, y, [](C a, C) { return a; });
      }
      return each(x, y, [](C a, C b) { return floating_power(a, b); });
    }
  }
};

// ScaledSum is x + alpha y or x - alpha y, with alpha on the device. It is rounded once, also for float16.
template <typename T>
struct ScaledSum : OfTwo<T, T> {
  using C = Compute<T>;
  const void* at;
  bool is_long, is_difference;
  C alpha = 0;

  ScaledSum(const void* alpha_at, bool is_long_alpha, bool subtracts)
      : at(alpha_at), is_long(is_long_alpha), is_difference(subtracts) {}
  MSOPS_BOTH ScaledSum prepared() const {
    ScaledSum result = *this;
    result.alpha =
        is_long ? static_cast<C>(*static_cast<const int64_t*>(at)) : static_cast<C>(*static_cast<const float*>(at));
    if (is_difference) result.alpha = minus(C(0), result.alpha);
    return result;
  }

  template <int N>
  MSOPS_BOTH Pack<T, N> operator()(const Pack<T, N>& first, const Pack<T, N> (&rest)[1]) const {
    const Widened<T, N> x(first), y(rest[0]);
    if constexpr (std::is_integral<T>::value) {
      return each(x, y, [this](C a, C b) { return plus(a, times(alpha, b)); });
    } else {
      return each(x, y, [this](C a, C b) { return ::fma(alpha, b, a); });
    }
  }
};

template <typename T>
struct Comparison : OfTwo<T, uint8_t> {
  using C = Compute<T>;
  int op;

  explicit Comparison(int operation) : op(operation) {}
  MSOPS_BOTH Comparison prepared() const { return *this; }

  template <int N>
  MSOPS_BOTH Pack<uint8_t, N> operator()(const Pack<T, N>& first, const Pack<T, N> (&rest)[1]) const {
    const Widened<T, N> x(first), y(rest[0]);
    if (op == kGreater) return all(x, y, [](C a, C b) { return a > b; });
    if (op == kLess) return all(x, y, [](C a, C b) { return a < b; });
    if (op == kEqual) return all(x, y, [](C a, C b) { return a == b; });
    if (op == kGreaterEqual) return all(x, y, [](C a, C b) { return a >= b; });
    if (op == kLessEqual) return all(x, y, [](C a, C b) { return a <= b; });
    if (op == kNotEqual) return all(x, y, [](C a, C b) { return a != b; });
    if (op == kLogicalAnd) return all(x, y, [](C a, C b) { return a != C(0) && b != C(0); });
    return all(x, y, [](C a, C b) { return a != C(0) || b != C(0); });
  }

 private:
  template <int N, typename F>
  static MSOPS_BOTH Pack<uint8_t, N> all(const Widened<T, N>& x, const Widened<T, N>& y, const F& f) {
    Pack<uint8_t, N> pack;
    MSOPS_UNROLL
    for (int j = 0; j < N; ++j) pack.values[j] = f(x.of[j], y.of[j]);
    return pack;
  }
};

}  // namespace msops::binary
