// Points and their distances. Both devices compute a squared distance by the same roundings, so that they find the same
// neighbours, and draw the same ties.
#pragma once

#include <math.h>

#include <limits>

#include "../../common/dtype.h"

namespace msops::points {

template <typename C>
struct Point {
  C x, y, z;
};

// Loads point i of an array (..., 3).
template <typename T>
MSOPS_BOTH Point<Compute<T>> point_at(const T* points, int64_t i) {
  using C = Compute<T>;
  return {C(points[3 * i]), C(points[3 * i + 1]), C(points[3 * i + 2])};
}

template <typename C>
constexpr C kInfinity = std::numeric_limits<C>::infinity();

// Returns a b, which the compiler must not join with a sum, and a b + c, rounded once.
MSOPS_BOTH float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
MSOPS_BOTH double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
MSOPS_BOTH float product_sum(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSOPS_BOTH double product_sum(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Returns x^2 + y^2 + z^2. It grows with each |x|, |y| and |z|, also after rounding: bounds of these give an exact
// bound of the result.
template <typename C>
MSOPS_BOTH C square_of(C x, C y, C z) {
  return product_sum(z, z, product_sum(y, y, product(x, x)));
}

template <typename C>
MSOPS_BOTH C squared_distance(const Point<C>& a, const Point<C>& b) {
  return square_of(a.x - b.x, a.y - b.y, a.z - b.z);
}

// Points of other numbers of coordinates have at most kMostAxes. A Point is their projection: their first three
// coordinates, with 0 for those that they lack.
constexpr int kMostAxes = 8;

template <typename T>
MSOPS_BOTH Point<Compute<T>> projection_of(const T* point, int64_t axes) {
  using C = Compute<T>;
  return {C(point[0]), axes > 1 ? C(point[1]) : C(0), axes > 2 ? C(point[2]) : C(0)};
}

// Returns the squared distance of points of `axes` coordinates. It continues the sum of the squared distance of their
// projections, and so is at least that, also after rounding.
template <typename T>
MSOPS_BOTH Compute<T> squared_distance(const T* a, const T* b, int64_t axes) {
  using C = Compute<T>;
  C sum = squared_distance(projection_of(a, axes), projection_of(b, axes));
  for (int64_t axis = 3; axis < axes; ++axis) {
    const C difference = C(a[axis]) - C(b[axis]);
    sum = product_sum(difference, difference, sum);
  }
  return sum;
}

// Whether all coordinates are finite: 0 times another number is NaN.
template <typename C>
MSOPS_BOTH bool is_finite(const Point<C>& p) {
  return product(p.x, C(0)) == 0 && product(p.y, C(0)) == 0 && product(p.z, C(0)) == 0;
}

}  // namespace msops::points
