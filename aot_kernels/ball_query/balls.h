// What the kernels of ball_query share.
#pragma once

#include "../shared/point_cloud/cells.h"

namespace msops::points {

// Balls describes a call: for each query, the first points of its cloud whose squared distance is in [inner, outer).
// All points and queries count.
template <typename T>
struct Balls {
  using C = Compute<T>;
  static constexpr bool kRagged = false;
  const T *points, *queries;  // (clouds, size, 3), (clouds, number, 3)
  int64_t clouds, size, number, samples;
  C inner, outer;
  int32_t *indices, *counts;  // (clouds, number, samples), (clouds, number)

  MSOPS_BOTH int64_t length(int64_t) const { return size; }
  MSOPS_BOTH bool has_query(int64_t) const { return true; }
  // NaN is outside.
  MSOPS_BOTH bool has(C distance) const { return inner <= distance && distance < outer; }

  // Whether a query visits the cells around its ball rather than all points in their order, where it ends once the ball
  // has given `samples`. About half of the visited points are in the ball.
  MSOPS_BOTH bool takes_cells(int64_t visited) const {
    return static_cast<double>(visited) * static_cast<double>(visited) <=
           2 * static_cast<double>(samples) * static_cast<double>(size);
  }
};

// RaggedBalls are Balls of clouds with lengths.
template <typename T>
struct RaggedBalls : Balls<T> {
  static constexpr bool kRagged = true;
  const int32_t *lengths, *new_lengths;  // how many points and queries of each cloud count, or null: all

  MSOPS_BOTH int64_t length(int64_t cloud) const { return length_of(lengths, cloud, this->size); }
  MSOPS_BOTH bool has_query(int64_t i) const {
    return i % this->number < length_of(new_lengths, i / this->number, this->number);
  }
};

// Returns how many points the cells of a box have.
template <typename C>
MSOPS_BOTH int64_t points_of_row(const Cells<C>& cells, const CellBox& box, int64_t row) {
  int32_t from, to;
  cells.run(box, no_cells(), row, 0, from, to);
  return to - from;
}

}  // namespace msops::points
