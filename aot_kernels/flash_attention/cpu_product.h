// Products of small matrices on the CPU: tiles of rows that are side by side in memory, in the type of computation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/dtype.h"

namespace msops::flash_attention::cpu {

// Twelve vectors of sums hide the latency of multiply-add, and fit into the 16 vector registers.
constexpr int kRows = 4, kVectors = 3;
template <typename C>
constexpr int kWidth = 32 / sizeof(C);
template <typename C>
constexpr int kColumns = kVectors * kWidth<C>;

// Returns a number of columns, or of rows, that is whole vectors, and whole multiples of kRows.
template <typename C>
constexpr int64_t padded(int64_t columns) {
  return (columns + kWidth<C> - 1) / kWidth<C> * kWidth<C>;
}

// Returns the first element of a column of panels that have `rows` rows; the next one is kColumns further.
template <typename C>
MSOPS_CPU C* column_of(C* panels, int64_t column, int64_t rows) {
  return panels + column / kColumns<C> * kColumns<C> * rows + column % kColumns<C>;
}

// Element (r, k) of a View is data[r * row + k * column].
template <typename C>
struct View {
  const C* data;
  int64_t row, column;
};

// Computes kRows rows and kV vectors of columns of multiply, or as many vectors as there are, if these are less.
template <int kV, typename C, typename Finish>
MSOPS_CPU void multiply_block(int64_t vectors, int64_t depth, View<C> x, const C* y, int64_t y_pitch, C* out,
                              int64_t out_pitch, const Finish& finish) {
  if constexpr (kV > 1) {
    if (vectors < kV) return multiply_block<kV - 1>(vectors, depth, x, y, y_pitch, out, out_pitch, finish);
  }
  C sums[kRows][kV][kWidth<C>] = {};
  for (int64_t k = 0; k < depth; ++k)
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kV; ++v)
#pragma omp simd
        for (int w = 0; w < kWidth<C>; ++w)
          sums[r][v][w] += x.data[r * x.row + k * x.column] * y[k * y_pitch + v * kWidth<C> + w];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kV; ++v)
#pragma omp simd
      for (int w = 0; w < kWidth<C>; ++w) {
        C& to = out[r * out_pitch + v * kWidth<C> + w];
        to = finish(to, sums[r][v][w], v * kWidth<C> + w);
      }
}

// out(r, c) = finish(out(r, c), sum over k of x(r, k) y(k, c), c). There is room for whole multiples of kRows rows of x
// and out, and of whole vectors of columns of y and out; what is there does not matter.
template <typename C, typename Finish>
MSOPS_CPU void multiply(int64_t rows, int64_t columns, int64_t depth, View<C> x, const C* y, int64_t y_pitch, C* out,
                        int64_t out_pitch, const Finish& finish) {
  for (int64_t c = 0; c < columns; c += kColumns<C>)
    for (int64_t r = 0; r < rows; r += kRows)
      multiply_block<kVectors>(padded<C>(columns - c) / kWidth<C>, depth, View<C>{x.data + r * x.row, x.row, x.column},
                               y + c, y_pitch, out + r * out_pitch + c, out_pitch, finish);
}

template <typename C>
struct Set {
  MSOPS_CPU C operator()(C, C sum, int) const { return sum; }
};
template <typename C>
struct Add {
  MSOPS_CPU C operator()(C before, C sum, int) const { return before + sum; }
};

// Copies rows, with zeros up to the pitch.
template <typename T, typename C>
MSOPS_CPU void load_rows(const T* from, int64_t stride, int64_t rows, int64_t width, C* to, int64_t pitch) {
  for (int64_t r = 0; r < rows; ++r) {
    widen(from + r * stride, to + r * pitch, width);
    for (int64_t d = width; d < pitch; ++d) to[r * pitch + d] = 0;
  }
}

// Transposes `rows` rows of `width` elements, times a factor, into columns of a panel, with zeros in the others.
template <typename C>
MSOPS_CPU void transpose(const C* from, int64_t pitch, int64_t rows, int64_t width, C factor, C* panel) {
  for (int64_t d = 0; d < width; ++d) {
    for (int64_t r = 0; r < rows; ++r) panel[d * kColumns<C> + r] = factor * from[r * pitch + d];
    for (int64_t r = rows; r < kColumns<C>; ++r) panel[d * kColumns<C> + r] = 0;
  }
}

}  // namespace msops::flash_attention::cpu
