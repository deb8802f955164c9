// Real spherical harmonics of degree l and order m as polynomials of x, y and z, Y = K Q(z) Re (x + iy)^m for m >= 0
// and Y = K Q(z) Im (x + iy)^|m| for m < 0, where Q is the |m|-th derivative of the Legendre polynomial of degree l,
// and K makes Y orthonormal and gives its sign.
#pragma once

#include "../common/dtype.h"

namespace msops::harmonics {

constexpr int kMostDegrees = 8;

// A Dual is a number and its derivative along a direction.
template <typename C>
struct Dual {
  C value, slope;

  Dual() = default;
  MSOPS_BOTH Dual(C value_) : value(value_), slope(C(0)) {}
  MSOPS_BOTH Dual(C value_, C slope_) : value(value_), slope(slope_) {}
  friend MSOPS_BOTH Dual operator+(const Dual& a, const Dual& b) { return {a.value + b.value, a.slope + b.slope}; }
  friend MSOPS_BOTH Dual operator-(const Dual& a, const Dual& b) { return {a.value - b.value, a.slope - b.slope}; }
  friend MSOPS_BOTH Dual operator*(const Dual& a, const Dual& b) {
    return {a.value * b.value, a.slope * b.value + a.value * b.slope};
  }
  friend MSOPS_BOTH Dual operator*(const C& a, const Dual& b) { return {a * b.value, a * b.slope}; }
};

constexpr double square_root(double x) {
  double root = x > 1 ? x : 1;
  for (int i = 0; i < 100; ++i) root = (root + x / root) / 2;
  return root;
}

// Returns K of degree l and order m or -m.
constexpr double factor(int l, int m) {
  constexpr double kPi = 3.14159265358979323846;
  double square = (2 * l + 1) / (4 * kPi) * (m > 0 ? 2 : 1);
  for (int k = l - m + 1; k <= l + m; ++k) square /= k;
  return (m % 2 ? -1 : 1) * square_root(square);
}

// Returns the m-th derivative of the Legendre polynomial of degree m, (2m - 1)!!
constexpr double first_derivative(int m) { return m > 0 ? (2 * m - 1) * first_derivative(m - 1) : 1; }

// Legendre goes through the degrees l of one order m: `now` is Q of degree l, and `before` that of l - 1.
template <typename N, typename C>
struct Legendre {
  N now, before = N(C(0));

  explicit MSOPS_BOTH Legendre(C first) : now(first) {}

  template <int l, int m>
  MSOPS_BOTH void next(const N& z) {
    const N after = C(double(2 * l + 1) / (l + 1 - m)) * (z * now) - C(double(l + m) / (l + 1 - m)) * before;
    before = now;
    now = after;
  }
};

// Powers go through the orders m: re + i im = (x + iy)^m.
template <typename N>
struct Powers {
  N re, im;

  MSOPS_BOTH Powers next(const N& x, const N& y) const { return {x * re - y * im, x * im + y * re}; }
};

// Calls emit(k, Y) for the degrees below `degrees`, with k = l^2 + l + m. N is C, a number type, or what is made of it.
template <typename C, int m = 0, typename N, typename Emit>
MSOPS_BOTH void for_harmonics(int degrees, const N& x, const N& y, const N& z, const Powers<N>& powers,
                              const Emit& emit);

template <typename C, int l, int m, typename N, typename Emit>
MSOPS_BOTH void for_degrees(int degrees, const N& z, const Powers<N>& powers, Legendre<N, C>& legendre,
                            const Emit& emit) {
  if (l >= degrees) return;
  const N height = C(factor(l, m)) * legendre.now;
  emit(l * l + l + m, height * powers.re);
  if (m > 0) emit(l * l + l - m, height * powers.im);
  if constexpr (l + 1 < kMostDegrees) {
    legendre.template next<l, m>(z);
    for_degrees<C, l + 1, m>(degrees, z, powers, legendre, emit);
  }
}

template <typename C, int m, typename N, typename Emit>
MSOPS_BOTH void for_harmonics(int degrees, const N& x, const N& y, const N& z, const Powers<N>& powers,
                              const Emit& emit) {
  if (m >= degrees) return;
  Legendre<N, C> legendre(C(first_derivative(m)));
  for_degrees<C, m, m>(degrees, z, powers, legendre, emit);
  if constexpr (m + 1 < kMostDegrees) for_harmonics<C, m + 1>(degrees, x, y, z, powers.next(x, y), emit);
}

// The gradient of a sum of harmonics with the weights w(k): the derivative of (x + iy)^m is m (x + iy)^(m - 1), and
// that of Q is Q of order m + 1.
template <typename N>
struct Slope {
  N x, y, z;
};

// SumsOfOrder are sums over the degrees of one order, of w K Q and of w K Q' for +m and -m.
template <typename N>
struct SumsOfOrder {
  N re, im, dre, dim;
};

template <typename C, int l, int m, typename N, typename Weight>
MSOPS_BOTH void sum_degrees(int degrees, const N& z, Legendre<N, C>& legendre, Legendre<N, C>& derived,
                            const Weight& weight, SumsOfOrder<N>& sums) {
  if (l >= degrees) return;
  const auto re = C(factor(l, m)) * weight(l * l + l + m), im = C(m > 0 ? factor(l, m) : 0) * weight(l * l + l - m);
  sums.re = sums.re + re * legendre.now;
  sums.im = sums.im + im * legendre.now;
  if constexpr (l > m) {
    sums.dre = sums.dre + re * derived.now;
    sums.dim = sums.dim + im * derived.now;
  }
  if constexpr (l + 1 < kMostDegrees) {
    legendre.template next<l, m>(z);
    if constexpr (l > m) derived.template next<l, m + 1>(z);
    sum_degrees<C, l + 1, m>(degrees, z, legendre, derived, weight, sums);
  }
}

template <typename C, int m = 0, typename N, typename Weight>
MSOPS_BOTH void add_slopes(int degrees, const N& x, const N& y, const N& z, const Powers<N>& powers,
                           const Powers<N>& before, const Weight& weight, Slope<N>& slope) {
  if (m >= degrees) return;
  const N zero = N(C(0));
  SumsOfOrder<N> sums{zero, zero, zero, zero};
  Legendre<N, C> legendre(C(first_derivative(m))), derived(C(first_derivative(m + 1)));
  sum_degrees<C, m, m>(degrees, z, legendre, derived, weight, sums);
  slope.x = slope.x + C(m) * (sums.re * before.re + sums.im * before.im);
  slope.y = slope.y + C(m) * (sums.im * before.re - sums.re * before.im);
  slope.z = slope.z + sums.dre * powers.re + sums.dim * powers.im;
  if constexpr (m + 1 < kMostDegrees) add_slopes<C, m + 1>(degrees, x, y, z, powers.next(x, y), powers, weight, slope);
}

// Calls emit(k, Y) for each harmonic.
template <typename C, typename N, typename Emit>
MSOPS_BOTH void harmonics(int degrees, const N& x, const N& y, const N& z, const Emit& emit) {
  for_harmonics<C>(degrees, x, y, z, Powers<N>{N(C(1)), N(C(0))}, emit);
}

// Returns the gradient of the sum of w(k) Y over all k.
template <typename C, typename N, typename Weight>
MSOPS_BOTH Slope<N> slope_of(int degrees, const N& x, const N& y, const N& z, const Weight& weight) {
  const N zero = N(C(0));
  Slope<N> slope{zero, zero, zero};
  add_slopes<C>(degrees, x, y, z, Powers<N>{N(C(1)), zero}, Powers<N>{zero, zero}, weight, slope);
  return slope;
}

}  // namespace msops::harmonics
