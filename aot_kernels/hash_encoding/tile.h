// A Tile is a run of points on the CPU, for which loops over corners vectorize.
#pragma once

#include "grid.h"

namespace msops::hash_encoding {

template <int D, bool kAlong, typename C>
struct Tile {
  static constexpr int kPoints = 64;
  using Numbers = C[kPoints];
  int count;
  const Level* level;
  uint32_t indices[2][D][kPoints];  // of the near and the far side, multiplied by the level's factors
  Numbers sides[2][D], slopes[2][D], tilts[2][D], bends[2][D];  // as an Axis has them, of the near and the far side

  // Finds the points from the n-th on.
  MSOPS_CPU void locate(const Grids& grids, const Level& level_, const Coordinates& points, const Coordinates& along,
                        int64_t n, int count_) {
    count = count_, level = &level_;
    for (int d = 0; d < D; ++d) {
      if (sizeof(C) == 8 || points.bytes == 8) {
        find<double>(grids, points, along, n, d);
      } else {
        find<float>(grids, points, along, n, d);
      }
    }
  }

  // Writes a corner's shares or, if `axis` is one of the axes, how they grow with its coordinate.
  MSOPS_CPU void shares(int corner, int axis, C* to) const {
    const C *values[D], *changes[D];
    for (int d = 0; d < D; ++d) {
      const int side = corner >> d & 1;
      values[d] = d == axis ? slopes[side][d] : sides[side][d];
      changes[d] = d == axis ? bends[side][d] : tilts[side][d];
    }
#pragma omp simd
    for (int j = 0; j < count; ++j) {
      Share<kAlong, C> product;
      MSOPS_UNROLL
      for (int d = 0; d < D; ++d) product.multiply(values[d][j], kAlong ? changes[d][j] : C(0));
      to[j] = product.result();
    }
  }

  // Writes a corner's entries in the level.
  MSOPS_CPU void entries(int corner, uint32_t* to) const {
    const uint32_t *of_axis[D], size = level->size;
    for (int d = 0; d < D; ++d) of_axis[d] = indices[corner >> d & 1][d];
    if (level->is_dense) {
#pragma omp simd
      for (int j = 0; j < count; ++j) {
        uint32_t index = 0;
        MSOPS_UNROLL
        for (int d = 0; d < D; ++d) index += of_axis[d][j];
        to[j] = index < size ? index : index - size;
      }
    } else {
#pragma omp simd
      for (int j = 0; j < count; ++j) {
        uint32_t index = 0;
        MSOPS_UNROLL
        for (int d = 0; d < D; ++d) index ^= of_axis[d][j];
        to[j] = index & (size - 1);
      }
    }
  }

 private:
  template <typename X>
  MSOPS_CPU void find(const Grids& grids, const Coordinates& points, const Coordinates& along, int64_t n, int d) {
    const uint32_t factor = level->factors[d];
    const Level& own = *level;
    const bool is_smooth = grids.is_smooth;
    const C scale = C(own.scale);
    X x[kPoints];
    C directions[kPoints] = {};
    for (int j = 0; j < count; ++j) x[j] = points.get<X>((n + j) * D + d);
    if (kAlong)
      for (int j = 0; j < count; ++j) directions[j] = along.get<C>((n + j) * D + d);
#pragma omp simd
    for (int j = 0; j < count; ++j) {
      Place<C> place;
      place.find(own, x[j]);
      indices[0][d][j] = place.cell * factor;
      indices[1][d][j] = place.cell * factor + factor;
      const Axis<C> axis(place.fraction, place.is_outside, scale, is_smooth, directions[j]);
      sides[0][d][j] = 1 - axis.far, sides[1][d][j] = axis.far;
      slopes[0][d][j] = -axis.slope, slopes[1][d][j] = axis.slope;
      if (kAlong) {
        tilts[0][d][j] = -axis.tilt, tilts[1][d][j] = axis.tilt;
        bends[0][d][j] = -axis.bend, bends[1][d][j] = axis.bend;
      }
    }
  }
};

}  // namespace msops::hash_encoding
