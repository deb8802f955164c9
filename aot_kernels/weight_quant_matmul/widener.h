// Widens codes to tiles in shared memory.
#pragma once

#include "../common/pack.h"
#include "codes.h"

#ifdef __CUDACC__

#include "../common/gpu/divisor.h"
#include "../common/gpu/f16x2.h"

namespace msops::weight_quant_matmul {

// Runs say how codes may be read: by kRun neighbours, which are all inside or all outside of the matrix, and which have
// one scale, or a scale each. Pairs of float16 may be widened at once if scales are of float16 and zero points whole.
constexpr int kRun = 16;
struct Runs {
  bool are_whole, have_one_scale, have_pairs, are_small;  // are_small: the matrix has fewer than 2^31 elements
  Divisor group;

  template <typename T>
  explicit Runs(const Codes<T>& w)
      : are_whole(w.columns % kRun == 0 && w.have_rows_at(2 * w.bits)),
        have_one_scale(!w.groups_rows && (w.groups == 1 || w.group % kRun == 0)),
        have_pairs(std::is_same<T, Half>::value && have_one_scale && !w.table && !w.scale.are_float &&
                   w.zero.kind != ZeroPoints<T>::kFloating),
        are_small(w.rows * w.columns < INT32_MAX),
        group(std::min<int64_t>(w.group, INT32_MAX)) {
    are_whole = are_whole && (have_one_scale || w.groups_rows);
  }
};

// Widener turns codes into a tile of the weights: (outputs, terms), or (terms, outputs), as they lie in memory. Of each
// tile, a thread has kRuns runs, whose codes load() begins to read and store() puts into the tile.
template <typename S, bool kByTerms>
struct Widener {
  using T = typename S::T;
  static constexpr int kWidth = kByTerms ? S::kDeep : S::kSide, kAcross = kWidth / kRun;
  static constexpr int kRuns = S::kSide * S::kDeep / kRun / S::kThreads;
  const Codes<T>& codes;
  const Runs runs;
  const float* table;  // in shared memory
  const int thread;    // of the block
  int64_t row = 0, column = 0;
  uint32_t words[kRuns][4] = {};
  float scale[kRuns], zero[kRuns];

  __device__ __forceinline__ int row_of(int run) const { return (run * S::kThreads + thread) / kAcross; }
  __device__ __forceinline__ int column_of() const { return thread % kAcross * kRun; }
  __device__ __forceinline__ bool has(int64_t r, int64_t c) const { return r < codes.rows && c < codes.columns; }

  // The tile begins with this row and this column of the codes.
  __device__ __forceinline__ void load(int64_t first_row, int64_t first_column) {
    row = first_row, column = first_column;
    if (!runs.are_whole) return;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int64_t r = row + row_of(i), c = column + column_of();
      scale[i] = zero[i] = 0;
      if (!has(r, c)) continue;
      const uint8_t* const from = codes.at(r, c);
      if (codes.bits == 8) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from);
        words[i][0] = bits.x, words[i][1] = bits.y, words[i][2] = bits.z, words[i][3] = bits.w;
      } else {
        const uint2 bits = *reinterpret_cast<const uint2*>(from);
        words[i][0] = bits.x, words[i][1] = bits.y;
      }
      if (!runs.have_one_scale) continue;
      const int64_t place = place_of(r, c);
      scale[i] = codes.scale[place], zero[i] = codes.zero[place];
    }
  }

  // What is outside of the matrix becomes 0.
  __device__ __forceinline__ void store(T* tile) const {
    if (!runs.are_whole) return store_one_by_one(tile);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int64_t r = row + row_of(i), c = column + column_of();
      if constexpr (std::is_same<T, Half>::value)
        if (runs.have_pairs) {
          store_pairs(tile, i, has(r, c));
          continue;
        }
      float values[kRun] = {};
      if (has(r, c)) codes.bits == 8 ? widen<8>(i, r, c, values) : widen<4>(i, r, c, values);
      constexpr int kPack = kPackWidth<T>;
#pragma unroll
      for (int j = 0; j < kRun; j += kPack) {
        float numbers[kPack];
#pragma unroll
        for (int l = 0; l < kPack; ++l) numbers[l] = values[j + l];
        msops::store(S::template at<kByTerms>(tile, row_of(i), column_of() + j), rounded_pack<T>(numbers));
      }
    }
  }

 private:
  // Returns the place of an element's scale. A division of 64 bits takes longer than to widen a run.
  __device__ __forceinline__ int64_t place_of(int64_t r, int64_t c) const {
    if (!runs.are_small) return codes.place(r, c);
    int rest;
    const int row = static_cast<int>(r), column = static_cast<int>(c);
    if (codes.groups_rows) return runs.group.divide(row, &rest) * static_cast<int>(codes.columns) + column;
    return row * static_cast<int>(codes.groups) + runs.group.divide(column, &rest);
  }

  // Returns the number of a run's code, from registers.
  template <int kBits>
  __device__ __forceinline__ float number(int run, int j) const {
    constexpr int kEach = 32 / kBits, kMask = (1 << kBits) - 1;
    const uint32_t code = words[run][j / kEach] >> j % kEach * kBits & kMask;
    if (table) return table[code];
    const uint32_t half = codes.are_signed ? 1 << (kBits - 1) : 0;
    return __uint_as_float(0x4b000000 | (code ^ half)) - (8388608.f + static_cast<float>(half));  // 2^23 has its unit 1
  }

  template <int kBits>
  __device__ __forceinline__ void widen(int run, int64_t r, int64_t c, float (&values)[kRun]) const {
    const int64_t place = runs.have_one_scale ? 0 : place_of(r, c);
#pragma unroll
    for (int j = 0; j < kRun; ++j)
      values[j] = (number<kBits>(run, j) - (runs.have_one_scale ? zero[run] : codes.zero[place + j])) *
                  (runs.have_one_scale ? scale[run] : codes.scale[place + j]);
  }

  // Neighbouring threads store neighbours.
  __device__ __forceinline__ void store_one_by_one(T* tile) const {
#pragma unroll 1
    for (int i = thread; i < S::kSide * S::kDeep; i += S::kThreads) {
      const int r = i / kWidth, c = i % kWidth;
      *S::template at<kByTerms>(tile, r, c) = T(has(row + r, column + c) ? codes.value(row + r, column + c) : 0.f);
    }
  }

  // Stores a run of pairs: code - zero point is a whole number, which float16 holds, so that its product with a scale
  // of float16 is rounded once.
  __device__ __forceinline__ void store_pairs(T* tile, int run, bool is_inside) const {
    constexpr uint32_t kBase = 0x64006400;  // two times 1024
    uint32_t bytes[4];
    if (codes.bits == 8) {
      const uint32_t flip = codes.are_signed ? 0x80808080 : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) bytes[j] = words[run][j] ^ flip;
    } else {
      const uint32_t flip = codes.are_signed ? 0x88888888 : 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t lower = (words[run][j] ^ flip) & 0x0f0f0f0f, upper = (words[run][j] ^ flip) >> 4 & 0x0f0f0f0f;
        bytes[2 * j] = prmt<0x5140>(lower, upper), bytes[2 * j + 1] = prmt<0x7362>(lower, upper);
      }
    }
    const float most = codes.are_signed ? 1 << (codes.bits - 1) : 0;
    const uint32_t zeros = Half(1024.f + most + zero[run]).bits * 0x10001u;
    const uint32_t scales = Half(scale[run]).bits * 0x10001u;
#pragma unroll
    for (int j = 0; j < kRun; j += 8) {
      uint32_t pack[4];
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        const uint32_t four = bytes[j / 4 + l / 2];
        const uint32_t pair = l % 2 ? prmt<0x4342>(four, kBase >> 8) : prmt<0x4140>(four, kBase >> 8);
        pack[l] = is_inside ? mul_f16x2(sub_f16x2(pair, zeros), scales) : 0;
      }
      *reinterpret_cast<uint4*>(S::template at<kByTerms>(tile, row_of(run), column_of() + j)) =
          uint4{pack[0], pack[1], pack[2], pack[3]};
    }
  }
};

}  // namespace msops::weight_quant_matmul

#endif
