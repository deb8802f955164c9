// Tiles of float16 in shared memory, and products of them on the tensor cores (mma.sync), for sm_80 and later.
//
// A warp's sums are kM x kN matrices of 16 x 8. Thread `lane` holds, in sums[m][n][i], row 16 m + lane / 4 (+ 8 where
// i >= 2) and column 8 n + 2 (lane % 4) + i % 2, as mma_m16n8k16 has it.
#pragma once

#include <algorithm>

#include "../common/pack.h"
#include "items.h"

#ifdef __CUDACC__

#include "../common/gpu/approx.h"
#include "../common/gpu/cp_async.h"
#include "../common/gpu/ldmatrix.h"
#include "../common/gpu/mma.h"
#include "../common/gpu/unrolled.h"
#include "../common/launch.h"

namespace msops::flash_attention {

constexpr float kLn2 = 0.6931471805599453f;

// HalfRows are the rows of one head of one sequence. Where `aligned`, each begins at a multiple of 16 bytes and has a
// whole number of packs of 8 elements; where paired(), at a multiple of 4 bytes, and has a whole number of pairs.
template <typename Element>
struct HalfRows {
  Element* first;
  int64_t stride;
  int width;
  bool aligned;

  __device__ Element* operator[](int64_t row) const { return first + row * stride; }
  __device__ bool paired() const {
    return reinterpret_cast<uintptr_t>(first) % 4 == 0 && stride % 2 == 0 && width % 2 == 0;
  }
};

// Describes the rows of a head, whose first one is at an offset.
template <typename Element>
__device__ __forceinline__ HalfRows<Element> rows_of(Element* data, const Strides& strides, int64_t offset,
                                                     int64_t width, bool aligned) {
  return {data + offset, strides.row, static_cast<int>(width), aligned};
}

// A Tile has rows of kWidth elements, a multiple of 64. Pack p of row r is stored at position p ^ r % 8, so that the 8
// rows of a matrix that ldmatrix reads are in different banks.
template <int kWidth>
struct Tile {
  static constexpr int kPacks = kWidth / 8, kRowBytes = kWidth * 2;

  // Returns where pack `pack` of a row is.
  static __device__ __forceinline__ Half* pack(Half* tile, int row, int pack) {
    return tile + row * kWidth + (pack ^ row % 8) * 8;
  }

  // Begins to copy rows to a tile of kRows, by kThreads threads. What is beyond row `end` or the rows' width becomes 0.
  // Rows that are neither aligned nor paired are copied at once.
  template <int kRows, int kThreads>
  static __device__ __forceinline__ void load(Half* tile, const HalfRows<const Half>& rows, int begin, int end,
                                              int thread) {
    constexpr int kStep = kThreads / kPacks;  // rows that the threads copy at once
    static_assert(kRows % kStep == 0, "threads copy whole rows");
    if (!rows.aligned && rows.paired()) return load_pairs<kRows, kThreads>(tile, rows, begin, end, thread);
    const int column = thread % kPacks * 8, first = thread / kPacks;
    const int inside = column < rows.width ? end - begin : 0;
    const Half* from = rows[begin + first] + column;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i, from += kStep * rows.stride) {
      const int row = first + i * kStep;
      Half* const to = pack(tile, row, column / 8);
      if (rows.aligned) {
        cp_async<16>(to, from, row < inside);
      } else {
        Pack<Half, 8> values;
#pragma unroll
        for (int j = 0; j < 8; ++j) values.values[j] = row < inside && column + j < rows.width ? from[j] : Half{0.f};
        store(to, values);
      }
    }
  }

  // Begins to copy paired rows, by 4 bytes at a time. A warp's copies are neighbours.
  template <int kRows, int kThreads>
  static __device__ __forceinline__ void load_pairs(Half* tile, const HalfRows<const Half>& rows, int begin, int end,
                                                    int thread) {
    constexpr int kPairs = kWidth / 2, kAtOnce = kThreads < kPairs ? kThreads : kPairs, kStep = kThreads / kAtOnce;
    const int first = thread / kAtOnce;
#pragma unroll 1
    for (int column = thread % kAtOnce * 2; column < kWidth; column += 2 * kAtOnce) {
      const int inside = column < rows.width ? end - begin : 0;
      const Half* from = rows[begin + first] + column;
#pragma unroll 2
      for (int row = first; row < kRows; row += kStep, from += kStep * rows.stride)
        cp_async<4>(pack(tile, row, column / 8) + column % 8, from, row < inside);
    }
  }

  // Returns the addresses that the thread gives to ldmatrix for an operand, at its first step. A left operand has 16
  // rows; a right operand has 16 rows that are columns of the product; a right operand to be transposed has 16 rows
  // that the product sums over, and 16 columns.
  static __device__ __forceinline__ unsigned left(const Half* tile, int row) {
    const int lane = threadIdx.x % 32;
    return shared_address(tile) + (row + lane % 16) * kRowBytes + (lane / 16 ^ lane % 8) * 16;
  }
  static __device__ __forceinline__ unsigned right(const Half* tile) {
    const int lane = threadIdx.x % 32;
    return shared_address(tile) + (lane / 16 * 8 + lane % 8) * kRowBytes + (lane / 8 % 2 ^ lane % 8) * 16;
  }
  static __device__ __forceinline__ unsigned transposed(const Half* tile) { return left(tile, 0); }

  // Returns the address of 16 columns `step` steps and 16 rows `rows` times further. Tiles begin at multiples of 128
  // bytes, so that the exclusive or with a step applies to the whole address.
  static __device__ __forceinline__ unsigned at(unsigned first, int step, int rows = 0) {
    return (first ^ step % 4 * 32) + step / 4 * 128 + rows * 16 * kRowBytes;
  }

  // Wide tiles skip their columns beyond the width that rows have.
  static __device__ __forceinline__ bool has_columns(int step, int width) { return kWidth <= 128 || step * 16 < width; }

  // sums += a b^T, where a are 16 kM rows of a tile, and b are 8 kN rows of another. Both rows have `width` elements.
  template <int kM, int kN>
  static __device__ __forceinline__ void multiply_rows(float (&sums)[kM][kN][4], unsigned a, unsigned b, int width) {
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      if (step % 4 == 0 && !has_columns(step, width)) break;
      uint32_t left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) ldmatrix_x4(left[m], at(a, step, m));
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t right[4];
        ldmatrix_x4(right, at(b, step, n / 2));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16(sums[m][n], left[m], {right[0], right[1]});
          mma_m16n8k16(sums[m][n + 1], left[m], {right[2], right[3]});
        }
      }
    }
  }

  // sums += a b, where a are 16 kM rows of 16 kK numbers in registers, as `operand` gives them, and b is a tile of 16
  // kK rows, from the column on that the address has. Columns from `width` on are skipped.
  template <int kM, int kN, int kK>
  static __device__ __forceinline__ void multiply(float (&sums)[kM][kN][4], const uint32_t (&a)[kM][kK][4], unsigned b,
                                                  int width) {
#pragma unroll
    for (int first = 0; first < kN; first += 8) {
      if (!has_columns(first / 2, width)) break;
#pragma unroll
      for (int k = 0; k < kK; ++k)
#pragma unroll
        for (int n = first; n < kN && n < first + 8; n += 2) {
          uint32_t right[4];
          ldmatrix_x4_trans(right, at(b, n / 2, k));
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            mma_m16n8k16(sums[m][n], a[m][k], {right[0], right[1]});
            mma_m16n8k16(sums[m][n + 1], a[m][k], {right[2], right[3]});
          }
        }
    }
  }
};

// Rounds two numbers to float16; the first is the lower half.
__device__ __forceinline__ uint32_t pair_of(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// Rounds sums to a left operand of 16 kM rows.
template <int kM, int kN>
__device__ __forceinline__ void operand(uint32_t (&words)[kM][kN / 2][4], const float (&sums)[kM][kN][4]) {
  unrolled<kM, kN, 2>(
      [&](int m, int n, int i) { words[m][n / 2][n % 2 * 2 + i] = pair_of(sums[m][n][2 * i], sums[m][n][2 * i + 1]); });
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&sums)[kM][kN][4]) {
  unrolled<kM, kN, 4>([&](int m, int n, int i) { sums[m][n][i] = 0; });
}

// Calls f(m, n, i, row, column) for each sum of the thread, with its place among the warp's.
template <int kM, int kN, typename F>
__device__ __forceinline__ void for_sums(F&& f) {
  const int lane = threadIdx.x % 32;
  unrolled<kM, kN, 4>(
      [&](int m, int n, int i) { f(m, n, i, 16 * m + i / 2 * 8 + lane / 4, 8 * n + lane % 4 * 2 + i % 2); });
}

// Stores a warp's sums times `factor(m, half)` as rows, from column 8 kN part on, through 16 kM rows of a tile, of
// which only this warp uses these columns.
template <int kWidth, int kM, int kN, typename Factor>
__device__ __forceinline__ void store_rows(const float (&sums)[kM][kN][4], Half* tile, const HalfRows<Half>& rows,
                                           int begin, int end, int part, Factor&& factor) {
  using T = Tile<kWidth>;
  const int lane = threadIdx.x % 32;
  __syncwarp();
  unrolled<kM, 2>([&](int m, int half) {
    const float times = factor(m, half);
    const int row = 16 * m + 8 * half + lane / 4;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint32_t* const to = reinterpret_cast<uint32_t*>(T::pack(tile, row, part * kN + n));
      to[lane % 4] = pair_of(sums[m][n][2 * half] * times, sums[m][n][2 * half + 1] * times);
    }
  });
  __syncwarp();
  for (int i = lane; i < 16 * kM * kN; i += 32) {
    const int row = i / kN, column = (part * kN + i % kN) * 8;
    if (begin + row >= end || column >= rows.width) continue;
    const Pack<Half, 8> pack = load<8>(T::pack(tile, row, column / 8));
    Half* const to = rows[begin + row] + column;
    if (rows.aligned) {
      store(to, pack);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < rows.width) to[j] = pack.values[j];
    }
  }
}

// Launches a kernel, if the GPU has its instructions and its shared memory.
template <typename S, typename... Parameters, typename... Arguments>
bool launch_on_tensor_cores(Call& call, void (*kernel)(Parameters...), int64_t blocks, const Arguments&... arguments) {
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < S::kBytes) return false;
  launch(call, kernel, least(blocks, INT32_MAX), S::kThreads, S::kBytes, arguments...);
  return true;
}

}  // namespace msops::flash_attention

#endif
