// The depthwise convolution on the CPU cuts out a tile, copies it, and correlates it with taps.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../common/sum.h"

namespace msops::depthwise::cpu {

constexpr int kRoom = 8192;      // numbers of a tile: 32 KB of float, as large as most first level caches
constexpr int kMostTaps = 1024;  // 32 x 32
constexpr int kVectors = 8;      // in flight at once, to hide the latency of multiply-add
template <typename C>
constexpr int kWidth = 32 / sizeof(C);
template <typename C>
constexpr int kSlack = kVectors * kWidth<C>;  // loops end at whole multiples of it

// A vector may lie anywhere in memory.
template <typename C>
struct VectorOf {
  typedef C type __attribute__((vector_size(32), aligned(sizeof(C)), may_alias));
};
template <typename C>
using Vector = typename VectorOf<C>::type;
template <typename C>
MSOPS_CPU Vector<C>& vector_at(C* at) {
  return *reinterpret_cast<Vector<C>*>(at);
}
template <typename C>
MSOPS_CPU const Vector<C>& vector_at(const C* at) {
  return *reinterpret_cast<const Vector<C>*>(at);
}

// Tiling says how a plane of results is cut into tiles.
struct Tiling {
  int64_t rows, columns, down, across;  // of a tile; tiles of a plane
  int64_t pitch, plane;                 // numbers that a row and a copy take

  // Chooses the sizes; returns false if no useful tile has room.
  bool fit(int64_t all_rows, int64_t all_columns, int64_t copies, int64_t reach_h, int64_t reach_w) {
    if (all_rows == 0 || all_columns == 0) return false;
    for (across = (all_columns + 255) / 256;; across *= 2) {
      columns = (all_columns + across - 1) / across;
      pitch = columns + reach_w;
      rows = std::min(all_rows, kRoom / (copies * pitch) - reach_h);
      if (rows >= std::min(all_rows, 1 + reach_h / 2)) break;
      if (columns <= 16) return false;
    }
    across = (all_columns + columns - 1) / columns;
    down = (all_rows + rows - 1) / rows;
    rows = (all_rows + down - 1) / down;
    plane = (rows + reach_h) * pitch;
    return true;
  }
  int64_t tiles() const { return down * across; }
};

// Tile is one of a tiling's tiles.
struct Tile {
  int64_t row, column, rows, columns, length;  // length: of all rows as one

  MSOPS_CPU Tile(const Tiling& t, int64_t index, int64_t all_rows, int64_t all_columns)
      : row(index / t.across * t.rows), column(index % t.across * t.columns) {
    rows = std::min(t.rows, all_rows - row), columns = std::min(t.columns, all_columns - column);
    length = rows > 0 && columns > 0 ? (rows - 1) * t.pitch + columns : 0;
  }
};

// Writes zeros after the last number of a copy. GCC compiles std::fill of so few into `rep stos`, which starts slowly.
template <typename C>
MSOPS_CPU void fill_slack(C* to) {
  MSOPS_UNROLL
  for (int v = 0; v < kVectors; ++v) vector_at(to + v * kWidth<C>) = Vector<C>{};
}

// Steps is one direction of a copy: the elements first, first + step, ... of an array of `size`, or 0 where there is
// none.
struct Steps {
  int64_t first, step, size, count;

  // Returns which are the first that is in the array, and the first after it that is not.
  MSOPS_CPU int64_t begin() const { return std::min(count, first < 0 ? (step - 1 - first) / step : 0); }
  MSOPS_CPU int64_t end() const {
    return std::max(begin(), std::min(count, first < size ? (size - 1 - first) / step + 1 : 0));
  }
};

// Writes zeros before `begin` and from `end` on, and elsewhere any numbers.
template <typename C>
MSOPS_CPU void zero_ends(int64_t begin, int64_t end, int64_t count, C* to) {
  if (count < kWidth<C> || begin > kWidth<C> || count - end > kWidth<C>) {
    std::fill(to, to + count, C(0));
  } else {
    vector_at(to) = vector_at(to + count - kWidth<C>) = Vector<C>{};
  }
}

template <typename T, typename C>
MSOPS_CPU void copy_vector(const T* from, C* to) {
  if constexpr (std::is_same_v<T, C>) {
    vector_at(to) = vector_at(from);
  } else {
    widen(from, to, kWidth<C>);
  }
}

// Rows are the rows of a copy that are not all zeros.
struct Rows {
  int64_t begin, end;

  // Writes zeros to the others.
  template <typename C>
  MSOPS_CPU void zero_others(const Steps& h, const Steps& w, C* to) const {
    std::fill(to, to + begin * w.count, C(0));
    std::fill(to + end * w.count, to + h.count * w.count, C(0));
  }
};

// The steps are copies, since GCC would read their members again after each store of a vector.
template <typename T, typename C>
MSOPS_CPU void copy(const T* image, int64_t image_pitch, Steps h, Steps w, C* to) {
  const int64_t begin = w.begin(), end = w.end();
  const Rows rows = begin < end ? Rows{h.begin(), h.end()} : Rows{0, 0};
  rows.zero_others(h, w, to);
  const bool plain = w.step == 1 && end - begin >= kWidth<C>;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const from = image + (h.first + r * h.step) * image_pitch + w.first;
    C* const row = to + r * w.count;
    zero_ends(begin, end, w.count, row);
    if (plain) {
      for (int64_t i = begin; i < end; i += kWidth<C>) {
        const int64_t at = std::min(i, end - kWidth<C>);
        copy_vector(from + at, row + at);
      }
    } else {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) row[i] = C(from[i * w.step]);
    }
  }
}

// Copies every second element as `copy` does, and the elements after these to a second copy.
template <typename T, typename C>
MSOPS_CPU void copy_pairs(const T* image, int64_t image_pitch, Steps h, Steps w, C* to, C* second) {
  const Steps next{w.first + 1, 2, w.size, w.count};
  const int64_t begin = w.begin(), end = std::max(begin, next.end());  // of whole pairs
  const Rows rows{h.begin(), h.end()};
  rows.zero_others(h, w, to);
  rows.zero_others(h, w, second);
  to += rows.begin * w.count, second += rows.begin * w.count;
  for (int64_t r = rows.begin; r < rows.end; ++r, to += w.count, second += w.count) {
    const T* from = image + (h.first + r * h.step) * image_pitch + w.first;
    zero_ends(begin, end, w.count, to);
    zero_ends(begin, end, w.count, second);
    if (next.begin() < std::min(begin, next.end())) second[begin - 1] = C(from[2 * begin - 1]);
    if (end < w.end()) to[end] = C(from[2 * end]);
    if (end - begin >= kWidth<C>) {
      for (int64_t i = begin; i < end; i += kWidth<C>) {
        const int64_t at = std::min(i, end - kWidth<C>);
#pragma omp simd
        for (int64_t k = at; k < at + kWidth<C>; ++k) to[k] = C(from[2 * k]), second[k] = C(from[2 * k + 1]);
      }
    } else {
      for (int64_t k = begin; k < end; ++k) to[k] = C(from[2 * k]), second[k] = C(from[2 * k + 1]);
    }
  }
}

// Taps are the taps that one kernel uses: their weights, and where they meet the first result.
template <typename C>
struct Taps {
  int count;
  const int* offsets;
  const C* weights;
};

// result[q] = (add ? result[q] : start) + sum over the taps of weight * from[offset + q]
template <typename C>
MSOPS_CPU void correlate(const C* from, int64_t length, const Taps<C>& taps, bool add, C start, C* result) {
  for (int64_t q = 0; q < length; q += kSlack<C>) {
    Vector<C> sums[kVectors];
    MSOPS_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[v] = add ? vector_at(result + q + v * kWidth<C>) : Vector<C>{} + start;
    for (int t = 0; t < taps.count; ++t) {
      const C* at = from + taps.offsets[t] + q;
      MSOPS_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[v] += taps.weights[t] * vector_at(at + v * kWidth<C>);
    }
    MSOPS_UNROLL
    for (int v = 0; v < kVectors; ++v) vector_at(result + q + v * kWidth<C>) = sums[v];
  }
}

// Kernel is a kernel whose rows of taps meet neighbouring rows of the copy. Its columns meet columns that are `gap`
// apart.
template <typename C>
struct Kernel {
  int64_t rows, columns, gap;
  const C* weights;
};

constexpr int kBlockRows = 4;  // a Block has so many rows of two vectors
template <typename C>
constexpr int kBlockColumns = 2 * kWidth<C>;
template <typename C>
using Block = C[kBlockRows][2][kWidth<C>];

// Adds up what rows kFirst to kLast - 1 of a block get from a row of the copy. Row j's first weight is at
// weights - j * kernel.columns.
template <int kFirst, int kLast, typename C>
MSOPS_CPU void add_row(const C* from, const C* weights, const Kernel<C>& kernel, Block<C>& sums) {
  for (int64_t b = 0; b < kernel.columns; ++b)
    for (int j = kFirst; j < kLast; ++j) {
      const C weight = weights[b - j * kernel.columns];
      for (int v = 0; v < 2; ++v)
#pragma omp simd
        for (int w = 0; w < kWidth<C>; ++w) sums[j][v][w] += weight * from[b * kernel.gap + v * kWidth<C> + w];
    }
}
template <int kFirst = 0, int kLast = 1, typename C>
MSOPS_CPU void add_row(int first, int last, const C* from, const C* weights, const Kernel<C>& kernel, Block<C>& sums) {
  if (first == kFirst && last == kLast) return add_row<kFirst, kLast>(from, weights, kernel, sums);
  if constexpr (kLast < kBlockRows) {
    add_row<kFirst, kLast + 1>(first, last, from, weights, kernel, sums);
  } else if constexpr (kFirst + 1 < kBlockRows) {
    add_row<kFirst + 1, kFirst + 2>(first, last, from, weights, kernel, sums);
  }
}

// Correlates a tile as `correlate` does, but by blocks of results, whose rows share what is read of the copy. Returns
// false, and does nothing, where that is slower: for few rows of taps, or if most of a block would be outside the tile.
template <typename C>
MSOPS_CPU bool correlate_blocks(const C* from, const Tile& tile, int64_t pitch, const Kernel<C>& kernel, C start,
                                C* result) {
  constexpr int64_t kColumns = kBlockColumns<C>;
  if (kernel.rows < 5 || tile.rows < kBlockRows || tile.columns <= kColumns / 2) return false;
  // The last blocks begin earlier, and compute some results again. Where a row is shorter than a block, what is written
  // after its end is overwritten by the next row.
  const int64_t last_row = tile.rows - kBlockRows, last_column = std::max<int64_t>(0, tile.columns - kColumns);
  for (int64_t row = 0; row < tile.rows; row += kBlockRows)
    for (int64_t column = 0; column < tile.columns; column += kColumns) {
      const int64_t at = std::min(row, last_row) * pitch + std::min(column, last_column);
      Block<C> sums;
      for (auto& of_row : sums)
        for (auto& vector : of_row)
          for (C& sum : vector) sum = start;
      for (int64_t a = 0; a < kernel.rows + kBlockRows - 1; ++a) {
        const int first = static_cast<int>(std::max<int64_t>(0, a + 1 - kernel.rows));
        const int last = static_cast<int>(std::min<int64_t>(kBlockRows, a + 1));
        add_row(first, last, from + at + a * pitch, kernel.weights + a * kernel.columns, kernel, sums);
      }
      for (int j = 0; j < kBlockRows; ++j)
        for (int v = 0; v < 2; ++v)
#pragma omp simd
          for (int w = 0; w < kWidth<C>; ++w) result[at + j * pitch + v * kWidth<C> + w] = sums[j][v][w];
    }
  return true;
}

// sums[t] += sum over q of d[q] * from[offsets[t] + q], for kTaps taps or, if `count` is less, that many.
template <int kTaps, typename S, typename C>
MSOPS_CPU void dot_products(const C* d, const C* from, int64_t length, int count, const int* offsets, S* sums) {
  if constexpr (kTaps > 1) {
    if (count < kTaps) return dot_products<kTaps - 1>(d, from, length, count, offsets, sums);
  }
  constexpr int64_t kRun = 64 * kWidth<C>;  // products that are summed plainly
  for (int64_t begin = 0; begin < length; begin += kRun) {
    const int64_t end = std::min(begin + kRun, length);
    C products[kTaps][kWidth<C>] = {};
    for (int64_t q = begin; q < end; q += kWidth<C>)
      for (int t = 0; t < kTaps; ++t)
#pragma omp simd
        for (int w = 0; w < kWidth<C>; ++w) products[t][w] += d[q + w] * from[offsets[t] + q + w];
    for (int t = 0; t < kTaps; ++t) {
      for (int half = kWidth<C> / 2; half > 0; half /= 2)
        for (int w = 0; w < half; ++w) products[t][w] += products[t][w + half];
      sums[t] += products[t][0];
    }
  }
}

}  // namespace msops::depthwise::cpu
