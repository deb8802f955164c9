// A sample of deformable attention is a place on one level of the value, at location (x, y): pixel (i, j) of a level of
// H x W pixels is at ((j + 1/2) / W, (i + 1/2) / H). Its value lies between four pixels; those outside of the level are
// zeros.
#pragma once

#include <cmath>

#include "../common/numbers.h"
#include "../common/pack.h"
#include "../common/parallel.h"

namespace msops::ms_deform_attn {

struct Sizes {
  int64_t samples, pixels, heads, features, queries, levels, points;  // `pixels` of all levels together

  MSOPS_BOTH int64_t rows() const { return samples * queries * heads; }     // of `out`
  MSOPS_BOTH int64_t of_row() const { return levels * points; }             // samples of a row of `out`
  MSOPS_BOTH int64_t sources() const { return queries * levels * points; }  // samples of a head
};

// Level has the sizes of a level, and the pixel where it begins. It has no pixels if it is not within the value.
struct Level {
  int64_t height, width, begin;

  MSOPS_BOTH bool is_within(int64_t pixels) const {
    return 0 <= height && 0 <= width && 0 <= begin && begin <= pixels &&
           (width == 0 || height <= (pixels - begin) / width);
  }
};

// AxisPlace is a location along an axis of `length` pixels. The shares are differences of pixels' centers and the
// location by one rounding: rounded to a place among the pixels, the location would lose digits.
template <typename C>
struct AxisPlace {
  int64_t low;  // the pixel before the location, from -1 on; -2 if the location is not near the level
  C share;      // of the pixel after it

  MSOPS_BOTH AxisPlace(C location, int64_t length) {
    const C at = std::fma(location, C(length), C(-0.5));
    low = C(-1) < at && at < C(length) ? static_cast<int64_t>(std::floor(at)) : -2;
    share = is_near() ? std::fma(location, C(length), -(C(low) + C(0.5))) : C(0);
  }
  MSOPS_BOTH bool is_near() const { return low >= -1; }

  // Returns the share of any pixel, which is 0 if that is not next to the location.
  static MSOPS_BOTH C share_of(int64_t pixel, C location, int64_t length) {
    const C distance = std::fma(location, C(length), -(C(pixel) + C(0.5))), share = 1 - std::fabs(distance);
    return share > 0 ? share : 0;
  }
};

// Task is what all kernels read.
template <typename T>
struct Task {
  using C = Compute<T>;
  Sizes s;
  const T* value;
  Integers shapes, begins;
  Numbers<T> locations, weights;

  MSOPS_BOTH Level level(int64_t l) const {
    const Level level{shapes[2 * l], shapes[2 * l + 1], begins[l]};
    return level.is_within(s.pixels) ? level : Level{0, 0, 0};
  }
};

// Corners are the four pixels around a sample: 2 i + j is the one i below and j to the right of the first.
template <typename T>
struct Corners {
  using C = Compute<T>;
  const T* from[4];                // the head's features of each pixel; null outside of the level
  C share[4], across[2], down[2];  // of the corners, and of the columns and rows that they are in

  // Returns a sample whose corners are all outside if its location is not near the level.
  MSOPS_BOTH Corners(const Task<T>& task, const Level& level, const AxisPlace<C>& x, const AxisPlace<C>& y, int64_t n,
                     int64_t head) {
    across[0] = 1 - x.share, across[1] = x.share, down[0] = 1 - y.share, down[1] = y.share;
    for (int c = 0; c < 4; ++c) {
      const int64_t i = y.low + c / 2, j = x.low + c % 2;
      const bool is_inside = x.is_near() && y.is_near() && 0 <= i && i < level.height && 0 <= j && j < level.width;
      share[c] = down[c / 2] * across[c % 2];
      const int64_t pixel = n * task.s.pixels + level.begin + i * level.width + j;
      from[c] = is_inside ? task.value + (pixel * task.s.heads + head) * task.s.features : nullptr;
    }
  }
};

// Sample is a sample with its location and weight.
template <typename T>
struct Sample {
  using C = Compute<T>;
  Level level;
  C x, y, weight;
  Corners<T> corners;

  MSOPS_BOTH Sample(const Task<T>& task, int64_t row, int64_t k)
      : level(task.level(k / task.s.points)),
        x(task.locations[2 * (row * task.s.of_row() + k)]),
        y(task.locations[2 * (row * task.s.of_row() + k) + 1]),
        weight(task.weights[row * task.s.of_row() + k]),
        corners(task, level, {x, level.width}, {y, level.height}, row / (task.s.queries * task.s.heads),
                row % task.s.heads) {}

  // Returns 0, or NaN if the location is NaN, which no corner tells.
  MSOPS_BOTH C nothing() const { return x != x ? x : y != y ? y : C(0); }
};

}  // namespace msops::ms_deform_attn
