// Convolutions with 3 x 3 and 5 x 5 taps go down strips of a tile on the CPU, and keep their sums in registers. What is
// read of a row of the copy serves all rows of results, or all rows of taps, that it meets.
#pragma once

#include "convolution.h"
#include "cpu_tiles.h"

namespace msops::depthwise::cpu {

// Returns the columns of a strip, or 0 if the convolution is not for strips.
MSOPS_CPU int64_t strip_columns(const Axis& h, const Axis& w) {
  if (h.kernel != w.kernel || h.dilation > 1) return 0;
  return h.kernel == 3 ? kWidth<float> : h.kernel == 5 ? 2 * kWidth<float> : 0;
}

// Adds what a row of the copy gives to kRows rows of results. sums[j] are of row - j, counted from the last row that is
// complete then.
template <int kTaps, int kStride, int kRows, int kVectors, typename C>
MSOPS_CPU __attribute__((always_inline)) void add_strip_row(const C* const (&at)[kStride * kTaps], int64_t offset,
                                                            const C (&weights)[kTaps * kTaps], C start,
                                                            Vector<C> (&sums)[kRows][kVectors]) {
  MSOPS_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    MSOPS_UNROLL
    for (int j = kRows - 1; j > 0; --j) sums[j][v] = sums[j - 1][v];
    sums[0][v] = Vector<C>{} + start;
  }
  MSOPS_UNROLL
  for (int t = 0; t < kStride * kTaps; ++t) {
    MSOPS_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const Vector<C> x = vector_at(at[t] + offset + v * kWidth<C>);
      MSOPS_UNROLL
      for (int j = 0; j < kRows; ++j)
        if (j * kStride * kTaps + t < kTaps * kTaps) sums[j][v] += weights[j * kStride * kTaps + t] * x;
    }
  }
}

// Correlates a tile as `correlate` does. Where a row is shorter than a strip, what is written after its end is
// overwritten by the next row. The last strip begins earlier than where the one before ends, if the tile ends there.
template <int kTaps, int kStride, int kVectors, typename C>
MSOPS_CPU void correlate_strips(const C* from, const Tile& tile, int64_t pitch, const Taps<C>& taps, C start, C* result,
                                int64_t result_pitch) {
  constexpr int kRows = (kTaps + kStride - 1) / kStride;  // of results at once
  constexpr int64_t kColumns = kVectors * kWidth<C>;
  const int64_t last = std::max<int64_t>(0, tile.columns - kColumns), rows = tile.rows + kRows - 1;
  C weights[kTaps * kTaps];  // in registers, since nothing that is written can be one of them
  std::copy(taps.weights, taps.weights + kTaps * kTaps, weights);
  for (int64_t column = 0; column < tile.columns; column += kColumns) {
    const C* at[kStride * kTaps];
    MSOPS_UNROLL
    for (int t = 0; t < kStride * kTaps; ++t) at[t] = from + std::min(column, last) + taps.offsets[t];
    C* to = result + std::min(column, last);
    Vector<C> sums[kRows][kVectors] = {};
    for (int64_t row = 0; row < kRows - 1; ++row) add_strip_row<kTaps, kStride>(at, row * pitch, weights, start, sums);
    for (int64_t row = kRows - 1; row < rows; ++row, to += result_pitch) {
      add_strip_row<kTaps, kStride>(at, row * pitch, weights, start, sums);
      MSOPS_UNROLL
      for (int v = 0; v < kVectors; ++v) vector_at(to + v * kWidth<C>) = sums[kRows - 1][v];
    }
  }
}

template <int kMostStride, typename C>
MSOPS_CPU void correlate_strips(int64_t kernel, int64_t stride, const C* from, const Tile& tile, int64_t pitch,
                                const Taps<C>& taps, C start, C* result, int64_t result_pitch) {
  if constexpr (kMostStride == 2) {
    if (stride == 2 && kernel == 3)
      return correlate_strips<3, 2, 1>(from, tile, pitch, taps, start, result, result_pitch);
    if (stride == 2) return correlate_strips<5, 2, 2>(from, tile, pitch, taps, start, result, result_pitch);
  }
  if (kernel == 3) {
    correlate_strips<3, 1, 1>(from, tile, pitch, taps, start, result, result_pitch);
  } else {
    correlate_strips<5, 1, 2>(from, tile, pitch, taps, start, result, result_pitch);
  }
}

constexpr int64_t kStripRows = 64;  // whose products are summed plainly
template <int kTaps>
constexpr int kRowsOfTaps = kTaps == 3 ? 3 : 2;  // whose sums are registers

// Strip is a part of a tile of the gradient of the results, with rows of zeros below.
template <typename C>
using Strip = C[kStripRows + kRowsOfTaps<3> - 1][kWidth<C>];

// Copies the first `count` columns of a strip, but has zeros in the first `skipped`, and adds up what it has. Columns
// past a vector are left out.
template <typename C>
MSOPS_CPU void copy_strip(const C* from, int64_t pitch, int64_t rows, int64_t skipped, int64_t count, Strip<C>& to,
                          C* sums) {
  C keep[kWidth<C>];
  for (int64_t w = 0; w < kWidth<C>; ++w) keep[w] = w < skipped ? C(0) : C(1);
  const Vector<C> factor = vector_at(keep);
  Vector<C> total = vector_at(sums);
  for (int64_t r = 0; r < rows; ++r, from += pitch) {
    if (count >= kWidth<C>) {
      vector_at(to[r]) = factor * vector_at(from);
    } else {
      for (int64_t w = 0; w < kWidth<C>; ++w) to[r][w] = w < count ? from[w] : C(0);
    }
    total += vector_at(to[r]);
  }
  for (int64_t r = rows; r < rows + kRowsOfTaps<3> - 1; ++r) vector_at(to[r]) = Vector<C>{};
  vector_at(sums) = total;
}

// LaneSums has the sums of each lane of a vector, for up to 5 x 5 taps and the bias: `plain` those of the last rows, up
// to kStripRows, and `sums` those of all rows before.
template <typename T>
struct LaneSums {
  using C = Compute<T>;
  static constexpr int kMost = 26;
  C plain[kMost][kWidth<C>];
  Sum<T> sums[kMost][kWidth<C>];
  int count;
  int64_t rows = 0;

  explicit MSOPS_CPU LaneSums(int of) : count(of) {
    for (int t = 0; t < count; ++t) vector_at(plain[t]) = Vector<C>{};
  }
  MSOPS_CPU void make_room(int64_t more) {
    if ((rows += more) <= kStripRows) return;
    rows = more;
    for (int t = 0; t < count; ++t)
#pragma omp simd
      for (int w = 0; w < kWidth<C>; ++w) sums[t][w] += plain[t][w], plain[t][w] = 0;
  }
  MSOPS_CPU C total(int64_t t) const {
    Sum<T> sum;
    for (int w = 0; w < kWidth<C>; ++w) sum += sums[t][w].total() + plain[t][w];
    return sum.total();
  }
};

// sums[j * step + b] += products of the strip with what tap b of row j meets, for kRows rows of taps that meet
// neighbouring rows of the copy.
template <int kRows, int kTaps, typename C>
MSOPS_CPU void strip_products(const Strip<C>& d, int64_t rows, const C* from, int64_t pitch, const int* offsets,
                              int64_t step, C (*sums)[kWidth<C>]) {
  Vector<C> products[kRows][kTaps], gradient[kRows] = {};
  const C* at[kTaps];
  MSOPS_UNROLL
  for (int b = 0; b < kTaps; ++b) {
    at[b] = from + offsets[b];
    MSOPS_UNROLL
    for (int j = 0; j < kRows; ++j) products[j][b] = vector_at(sums[j * step + b]);
  }
  for (int64_t row = 0; row < rows + kRows - 1; ++row) {
    MSOPS_UNROLL
    for (int j = kRows - 1; j > 0; --j) gradient[j] = gradient[j - 1];
    gradient[0] = vector_at(d[row]);
    MSOPS_UNROLL
    for (int b = 0; b < kTaps; ++b) {
      const Vector<C> x = vector_at(at[b] + row * pitch);
      MSOPS_UNROLL
      for (int j = 0; j < kRows; ++j) products[j][b] += gradient[j] * x;
    }
  }
  MSOPS_UNROLL
  for (int b = 0; b < kTaps; ++b) {
    MSOPS_UNROLL
    for (int j = 0; j < kRows; ++j) vector_at(sums[j * step + b]) = products[j][b];
  }
}

// Does this for a whole kernel. Rows of taps at a distance of `period` meet neighbouring rows of one copy.
template <int kTaps, typename C>
MSOPS_CPU void add_products(const Strip<C>& d, int64_t rows, const C* from, int64_t pitch, int64_t period,
                            const int* offsets, C (*sums)[kWidth<C>]) {
  constexpr int kAtOnce = kRowsOfTaps<kTaps>;
  for (int64_t first = 0; first < std::min<int64_t>(kTaps, period); ++first)
    for (int64_t a = first; a < kTaps; a += kAtOnce * period) {
      const int64_t left = (kTaps - a + period - 1) / period, step = period * kTaps;
      if (left >= kAtOnce) {
        strip_products<kAtOnce, kTaps>(d, rows, from, pitch, offsets + a * kTaps, step, sums + a * kTaps);
      } else if (left == 2) {
        strip_products<2, kTaps>(d, rows, from, pitch, offsets + a * kTaps, step, sums + a * kTaps);
      } else {
        strip_products<1, kTaps>(d, rows, from, pitch, offsets + a * kTaps, step, sums + a * kTaps);
      }
    }
}

}  // namespace msops::depthwise::cpu
