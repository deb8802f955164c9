// The grids of a hash encoding: which entries of the table surround a point, and how much each of them counts. A
// level's grid has cells of side 1 / scale, and its corners share the level's entries by a dense index, or by a hash
// where there are more corners than entries. Names: n is a point, d an axis, c a corner, whose bit d is 1 on the far
// side of axis d.
#pragma once

#include <cmath>

#include "../common/parallel.h"
#include "../common/scratch.h"

namespace msops::hash_encoding {

constexpr int kMostLevels = 32, kMostAxes = 4;

struct Level {
  double scale;
  float scale_high, scale_low;  // two numbers whose sum is scale
  int64_t first;                // entry of the table
  uint32_t size;                // entries; a power of 2 if the level is hashed
  uint32_t factors[kMostAxes];  // of an index along each axis: strides, or the hash's primes
  bool is_dense;
};

struct Grids {
  int levels;
  bool is_smooth;
  int64_t entries;  // of all levels
  Level level[kMostLevels];
};

// Reads the attributes. Level l has the scale base 2^(l log2(growth)) - 1, as the Python function computes it, too.
inline Grids grids_of(Call& call, int64_t axes) {
  constexpr uint32_t kPrimes[kMostAxes] = {1, 2654435761u, 805459861u, 3674653429u};
  constexpr double kMostCells = 1 << 30;
  Grids grids{};
  call.require(!call.ok() || axes == call.attribute("dim", 2, kMostAxes), kBadShape, "points have %lld axes",
               static_cast<long long>(axes));
  call.require(2 <= axes && axes <= kMostAxes, kBadShape, "points have %lld axes, expected 2, 3 or 4",
               static_cast<long long>(axes));
  grids.levels = static_cast<int>(call.attribute("levels", 1, kMostLevels));
  const double base = static_cast<double>(call.attribute("base_resolution", 1, 1 << 30));
  const double growth = call.number("growth");
  const int64_t most = int64_t{1} << call.attribute("log2_size", 3, 31);
  grids.is_smooth = call.attribute("interpolation", 0, 1) != 0;
  call.require(growth >= 1 && growth <= kMostCells, kBadAttribute, "growth is %g, expected at least 1", growth);
  if (!call.ok()) return Grids{};
  // These functions of double would need glibc 2.29; those of long double are older.
  const double exponent = static_cast<double>(std::log2(static_cast<long double>(growth)));
  for (int l = 0; l < grids.levels; ++l) {
    Level& level = grids.level[l];
    // A volatile product is rounded before 1 is subtracted, as in Python; the compiler would fuse both.
    const volatile double cells = static_cast<double>(std::exp2(static_cast<long double>(l * exponent))) * base;
    level.scale = cells - 1;
    call.require(level.scale < kMostCells, kBadAttribute, "level %d has more than 2^30 cells along an axis", l);
    if (!call.ok()) return Grids{};
    level.scale_high = static_cast<float>(level.scale);
    level.scale_low = static_cast<float>(level.scale - static_cast<double>(level.scale_high));
    const int64_t resolution = static_cast<int64_t>(std::ceil(level.scale)) + 1;
    int64_t corners = 1;  // no more than 2^62 before the loop ends
    level.is_dense = true;
    for (int d = 0; d < axes; ++d) {
      level.factors[d] = static_cast<uint32_t>(corners);
      if (level.is_dense) corners *= resolution;
      level.is_dense &= corners <= most;
    }
    level.size = static_cast<uint32_t>(level.is_dense ? std::min((corners + 7) / 8 * 8, most) : most);
    for (int d = 0; d < kMostAxes && !level.is_dense; ++d) level.factors[d] = kPrimes[d];
    level.first = grids.entries;
    grids.entries += level.size;
  }
  call.require(grids.entries == call.attribute("entries", 8, int64_t{1} << 36), kBadAttribute,
               "attribute entries is not %lld", static_cast<long long>(grids.entries));
  return grids;
}

// Coordinates are numbers of their own dtype: of the points, or of directions at the points.
struct Coordinates {
  const void* data;
  int bytes;  // of a number

  static Coordinates of(const Tensor& tensor) {
    const bool is_half = tensor.dtype && std::strcmp(tensor.dtype, dtype_name<Half>()) == 0;
    const bool is_double = tensor.dtype && std::strcmp(tensor.dtype, dtype_name<double>()) == 0;
    return {tensor.data, is_half ? 2 : is_double ? 8 : 4};
  }
  MSOPS_BOTH double as_double(int64_t i) const { return static_cast<const double*>(data)[i]; }
  MSOPS_BOTH float as_float(int64_t i) const {
    return bytes == 4 ? static_cast<const float*>(data)[i] : float(static_cast<const Half*>(data)[i]);
  }
  template <typename C>
  MSOPS_BOTH C get(int64_t i) const {
    return bytes == 8 ? C(as_double(i)) : C(as_float(i));
  }
};

// CoordinatesOut are numbers to be written, of their own dtype.
struct CoordinatesOut {
  void* data;
  int bytes;  // of a number

  template <typename C>
  MSOPS_BOTH void set(int64_t i, C value) const {
    if (bytes == 8) static_cast<double*>(data)[i] = value;
    if (bytes == 4) static_cast<float*>(data)[i] = static_cast<float>(value);
    if (bytes == 2) static_cast<Half*>(data)[i] = Half(static_cast<float>(value));
  }
};

// Returns a * b + c, rounded once. On the CPU it vectorizes: fmaf would do so with some instruction sets alone.
MSOPS_BOTH float product_sum(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return fmaf(a, b, c);
#else
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
#endif
}

// Place is where a coordinate lies in a level: in which cell, and where in this. Outside of [0, 1], the nearest end
// counts; NaN stays NaN. The products are fused with the sums on both devices: in a grid of many cells, a rounded
// product would be far from the exact one, as seen from within a cell.
template <typename C>
struct Place {
  uint32_t cell;
  C fraction;
  bool is_outside;

  MSOPS_BOTH void find(const Level& level, double x) {
    is_outside = x < 0 || x > 1;
    x = x < 0 ? 0 : x > 1 ? 1 : x;
    const double at = __builtin_fma(level.scale, x, 0.5);
    cell = static_cast<uint32_t>(at >= 0 ? static_cast<int32_t>(at) : 0);
    fraction = C(__builtin_fma(level.scale, x, 0.5 - static_cast<int32_t>(cell)));
  }
  MSOPS_BOTH void find(const Level& level, float x) {
    is_outside = x < 0 || x > 1;
    x = x < 0 ? 0 : x > 1 ? 1 : x;
    const float at = product_sum(level.scale_high, x, 0.5f);
    cell = static_cast<uint32_t>(at >= 0 ? static_cast<int32_t>(at) : 0);
    const float begin = static_cast<float>(static_cast<int32_t>(cell)) - 0.5f;
    fraction = C(product_sum(level.scale_low, x, product_sum(level.scale_high, x, -begin)));
  }
};

// Axis says how much the sides of a cell count along one axis, and how that changes with the coordinate: by `slope` on
// the far side and by -slope on the near side. `tilt` and `bend` are how `far` and `slope` change along the direction.
template <typename C>
struct Axis {
  C far, slope, tilt, bend;

  Axis() = default;
  MSOPS_BOTH Axis(C t, bool is_outside, C scale, bool is_smooth, C direction) {
    const C moves = is_outside ? C(0) : scale;
    far = is_smooth ? t * t * (3 - 2 * t) : t;
    slope = is_smooth ? 6 * t * (1 - t) * moves : moves;
    tilt = direction * slope;
    bend = is_smooth ? direction * (6 - 12 * t) * moves * moves : C(0);
  }
};

// Share is a product over the axes: what a corner counts, and how that changes along the direction.
template <bool kAlong, typename C>
struct Share {
  C value = 1, change = 0;

  MSOPS_BOTH void multiply(C side, C tilt) {
    if (kAlong) change = change * side + value * tilt;
    value *= side;
  }
  MSOPS_BOTH C result() const { return kAlong ? change : value; }
};

// Returns a corner's share of the value at a point, or, if kAlong, how that changes along the direction. If kAxis is
// one of the axes, returns how much this grows with the coordinate of kAxis. Axes before kFrom do not count.
template <int D, bool kAlong, int kAxis = -1, int kFrom = 0, typename C>
MSOPS_BOTH C share(const Axis<C> (&axes)[D], int corner) {
  Share<kAlong, C> product;
  for (int d = kFrom; d < D; ++d) {
    const bool is_far = corner >> d & 1;
    const C far = d == kAxis ? axes[d].slope : axes[d].far, near = d == kAxis ? -far : 1 - far;
    const C tilt = d == kAxis ? axes[d].bend : axes[d].tilt;
    product.multiply(is_far ? far : near, is_far ? tilt : -tilt);
  }
  return product.result();
}

// Cell has the indices of a cell's corners: of each axis, the products of the near side's and the far side's indices
// with the level's factor.
template <int D>
struct Cell {
  uint32_t near[D], far[D];

  // Writes the entries, counted from the level's first one, of the corners on one side of the first axis, which is
  // near[0] or far[0]. A dense index may be one row beyond the end.
  MSOPS_BOTH void entries(const Level& level, uint32_t side, uint32_t (&to)[1 << (D - 1)]) const {
    if (level.is_dense) {
      for (int c = 0; c < 1 << (D - 1); ++c) {
        uint32_t index = side;
        for (int d = 1; d < D; ++d) index += c >> (d - 1) & 1 ? far[d] : near[d];
        to[c] = index < level.size ? index : index - level.size;
      }
    } else {
      for (int c = 0; c < 1 << (D - 1); ++c) {
        uint32_t index = side;
        for (int d = 1; d < D; ++d) index ^= c >> (d - 1) & 1 ? far[d] : near[d];
        to[c] = index & (level.size - 1);
      }
    }
  }
};

// Point locates a point in levels. It keeps the coordinates, except doubles, which would take twice the registers.
template <int D, bool kAlong, typename C>
class Point {
 public:
  MSOPS_BOTH Point(const Grids& grids, const Coordinates& points, const Coordinates& along, int64_t n)
      : grids_(grids), points_(points), along_(along), first_(n * D) {
    if (points.bytes == 8) return;
    for (int d = 0; d < D; ++d) coordinates_[d] = points.as_float(first_ + d);
  }
  // Finds the cell in a level, and its axes.
  MSOPS_BOTH void locate(const Level& level, Cell<D>& cell, Axis<C> (&axes)[D]) const {
    if (points_.bytes == 8) {
      for (int d = 0; d < D; ++d) locate(level, d, points_.as_double(first_ + d), cell, axes[d]);
    } else {
      for (int d = 0; d < D; ++d) locate(level, d, Wide(coordinates_[d]), cell, axes[d]);
    }
  }

 private:
  using Wide = typename std::conditional<sizeof(C) == 8, double, float>::type;

  template <typename X>
  MSOPS_BOTH void locate(const Level& level, int d, X coordinate, Cell<D>& cell, Axis<C>& axis) const {
    Place<C> place;
    place.find(level, coordinate);
    cell.near[d] = place.cell * level.factors[d];
    cell.far[d] = cell.near[d] + level.factors[d];
    const C direction = kAlong ? along_.get<C>(first_ + d) : C(0);
    axis = Axis<C>(place.fraction, place.is_outside, C(level.scale), grids_.is_smooth, direction);
  }

  const Grids& grids_;
  const Coordinates &points_, &along_;
  const int64_t first_;
  float coordinates_[D];
};

}  // namespace msops::hash_encoding
