// Tiles of float16 or float32 in shared memory, and products of them on the tensor cores (mma.sync), for sm_80 and
// later. Those of float32 are sums of TF32 products (see common/gpu/product.h).
//
// A warp's sums are kM x kN matrices of 16 x 8. Thread `lane` holds, in sums[m][n][i], row 16 m + lane / 4 (+ 8 where
// i >= 2) and column 8 n + 2 (lane % 4) + i % 2, as mma_m16n8k16 and mma_m16n8k8 have it.
#pragma once

#include "../../common/pack.h"

#ifdef __CUDACC__

#include "../../common/gpu/cp_async.h"
#include "../../common/gpu/ld_st.h"
#include "../../common/gpu/ldmatrix.h"
#include "../../common/gpu/product.h"
#include "../../common/gpu/unrolled.h"

namespace msops::product {

// TileRows are rows in global memory. Where `aligned`, each begins at a multiple of 16 bytes and has a whole number of
// packs of 16 bytes; where has_words(), at a multiple of 4 bytes, and has a whole number of words.
template <typename Element>
struct TileRows {
  Element* first;
  int64_t stride;
  int width;
  bool aligned;

  __device__ Element* operator[](int64_t row) const { return first + row * stride; }
  __device__ bool has_words() const {
    return sizeof(Element) == 4 || (reinterpret_cast<uintptr_t>(first) % 4 == 0 && stride % 2 == 0 && width % 2 == 0);
  }
};

// Rounds two numbers to float16; the first is the lower half.
__device__ __forceinline__ uint32_t pair_of(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

__device__ __forceinline__ void store_pair(Half* to, float first, float second) {
  *reinterpret_cast<uint32_t*>(to) = pair_of(first, second);
}
__device__ __forceinline__ void store_pair(float* to, float first, float second) {
  store(to, Pack<float, 2>{first, second});
}

// An MmaTile has rows of kWidth elements of T, Half or float, a multiple of 64. Pack p of row r is stored at position
// p ^ r % 8, so that the 8 rows of a matrix that ldmatrix reads are in different banks.
template <typename T, int kWidth>
struct MmaTile {
  static constexpr bool kIsHalf = std::is_same<T, Half>::value;
  static constexpr int kPack = kPackWidth<T>, kPacks = kWidth / kPack, kRowBytes = kWidth * sizeof(T);
  static constexpr int kStep = 2 * kPack;  // numbers of a row that one mma multiplies
  using W = Word<kIsHalf ? msops::Product::kHalf : msops::Product::kFloat>;

  // Returns where an element of a row is; its pack follows where it is the first of one.
  static __device__ __forceinline__ T* at(T* tile, int row, int column) {
    return tile + row * kWidth + (column / kPack ^ row % 8) * kPack + column % kPack;
  }

  // Begins to copy rows to a tile of kRows, by kThreads threads. What is beyond row `end` or the rows' width becomes 0.
  template <int kRows, int kThreads>
  static __device__ __forceinline__ void load(T* tile, const TileRows<const T>& rows, int begin, int end, int thread) {
    constexpr int kApart = kThreads / kPacks;  // rows that the threads copy at once
    static_assert(kRows % kApart == 0, "threads copy whole rows");
    if (!rows.aligned && rows.has_words()) return load_words<kRows, kThreads>(tile, rows, begin, end, thread);
    const int column = thread % kPacks * kPack, first = thread / kPacks;
    const int inside = column < rows.width ? end - begin : 0;
    const T* from = rows[begin + first] + column;
    if (!rows.aligned) return load_elements<kRows, kApart>(tile, rows, from, first, column, inside);
#pragma unroll
    for (int i = 0; i < kRows / kApart; ++i, from += kApart * rows.stride)
      cp_async<16>(at(tile, first + i * kApart, column), from, first + i * kApart < inside);
  }

  // Does the same for aligned rows, with fewer instructions and more registers.
  template <int kRows, int kThreads>
  static __device__ __forceinline__ void load_aligned(T* tile, const TileRows<const T>& rows, int begin, int end,
                                                      int thread) {
    constexpr int kApart = kThreads / kPacks;
    static_assert(kRows % kApart == 0 && (kApart & (kApart - 1)) == 0, "threads copy whole rows");
    const int column = thread % kPacks * kPack, first = thread / kPacks;
    const int inside = column < rows.width ? end - begin : 0;
    const T* from = rows[begin + first] + column;
    const int place = static_cast<int>(at(tile, first, column) - tile);  // of the other rows it differs in few bits
#pragma unroll
    for (int i = 0; i < kRows / kApart; ++i, from += kApart * rows.stride)
      cp_async<16>(tile + (place ^ i * kApart % 8 * kPack) + i * kApart * kWidth, from, first + i * kApart < inside);
  }

  // Copies a pack of each row that load() gives the thread, at once. The loop is not unrolled, since its code would lie
  // between the other copies, and instructions that lie close together come faster.
  template <int kRows, int kApart>
  static __device__ __forceinline__ void load_elements(T* tile, const TileRows<const T>& rows, const T* from, int first,
                                                       int column, int inside) {
#pragma unroll 1
    for (int row = first; row < kRows; row += kApart, from += kApart * rows.stride) {
      Pack<T, kPack> values;
#pragma unroll
      for (int j = 0; j < kPack; ++j) values.values[j] = row < inside && column + j < rows.width ? from[j] : T{0.f};
      store(at(tile, row, column), values);
    }
  }

  // Begins to copy rows of whole words, by 4 bytes at a time. A warp's copies are neighbours.
  template <int kRows, int kThreads>
  static __device__ __forceinline__ void load_words(T* tile, const TileRows<const T>& rows, int begin, int end,
                                                    int thread) {
    constexpr int kWord = 4 / sizeof(T), kWords = kWidth / kWord;
    constexpr int kAtOnce = kThreads < kWords ? kThreads : kWords, kApart = kThreads / kAtOnce;
    const int first = thread / kAtOnce;
#pragma unroll 1
    for (int column = thread % kAtOnce * kWord; column < kWidth; column += kWord * kAtOnce) {
      const int inside = column < rows.width ? end - begin : 0;
      const T* from = rows[begin + first] + column;
#pragma unroll 2
      for (int row = first; row < kRows; row += kApart, from += kApart * rows.stride)
        cp_async<4>(at(tile, row, column), from, row < inside);
    }
  }

  // Returns the addresses that the thread gives to ldmatrix for an operand, at its first step. A left operand has 16
  // rows; a right operand has 16 rows that are columns of the product.
  static __device__ __forceinline__ unsigned left(const T* tile, int row) {
    const int lane = threadIdx.x % 32;
    return shared_address(tile) + (row + lane % 16) * kRowBytes + (lane / 16 ^ lane % 8) * 16;
  }
  static __device__ __forceinline__ unsigned right(const T* tile) {
    const int lane = threadIdx.x % 32;
    return shared_address(tile) + (lane / 16 * 8 + lane % 8) * kRowBytes + (lane / 8 % 2 ^ lane % 8) * 16;
  }
  // Returns the address for a right operand whose rows the product sums over. For float, which ldmatrix does not
  // transpose, it is where row 2 (lane % 4) and column lane / 4 are: a warp's reads are in different banks.
  static __device__ __forceinline__ unsigned transposed(const T* tile) {
    const int lane = threadIdx.x % 32, row = lane % 4 * 2;
    if constexpr (kIsHalf) return left(tile, 0);
    return shared_address(tile) + row * kRowBytes + (lane / 16 ^ row) * 16 + lane / 4 % 4 * 4;
  }

  // Returns the address of `column` columns, in whole steps, and `row` rows further, in eights. Tiles begin at
  // multiples of 128 bytes, so that the exclusive or with a step applies to the whole address.
  static __device__ __forceinline__ unsigned at(unsigned first, int column, int row = 0) {
    return (first ^ column / kStep % 4 * 32) + column / kStep / 4 * 128 + row * kRowBytes;
  }

  // Tiles that are often wider than rows skip what is beyond the width that rows have.
  static __device__ __forceinline__ bool has_column(int column, int width) {
    return kWidth <= (kIsHalf ? 128 : 64) || column < width;
  }

  static __device__ __forceinline__ void load(W (&words)[4], unsigned address) {
    uint32_t bits[4];
    ldmatrix_x4(bits, address);
    unrolled<4>([&](int i) { words[i] = W(bits[i]); });
  }
  // Loads 16 columns of a right operand whose rows the product sums over. For float, the thread's two rows are
  // neighbours, since `operand` gives the neighbours that the thread has in sums.
  static __device__ __forceinline__ void load_transposed(W (&words)[4], unsigned first, int column, int row) {
    uint32_t bits[4];
    if constexpr (kIsHalf) {
      ldmatrix_x4_trans(bits, at(first, column, row));
    } else {
      const unsigned next = (first ^ 16) + kRowBytes;
      unrolled<4>([&](int i) { bits[i] = ld_shared_b32(at(i % 2 ? next : first, column + i / 2 * 8, row)); });
    }
    unrolled<4>([&](int i) { words[i] = W(bits[i]); });
  }

  // Adds the products of kM left operands and two right ones to the sums of columns 8 n to 8 n + 15. For float, each of
  // a product's three parts waits for the one before (see product.h), so the parts of several products take turns.
  template <int kM, int kN>
  static __device__ __forceinline__ void add_products(float (&sums)[kM][kN][4], int n, const W (&left)[kM][4],
                                                      const W (&right)[4]) {
    if constexpr (kIsHalf) {
      unrolled<kM, 2>([&](int m, int j) { multiply_add(sums[m][n + j], left[m], {right[2 * j], right[2 * j + 1]}); });
    } else {
      float products[kM][2][4] = {};
      const auto add = [&](uint32_t W::* a, uint32_t W::* b) {
        unrolled<kM, 2>([&](int m, int j) {
          mma_m16n8k8(products[m][j], {left[m][0].*a, left[m][1].*a, left[m][2].*a, left[m][3].*a},
                      {right[2 * j].*b, right[2 * j + 1].*b});
        });
      };
      add(&W::lower, &W::upper);
      add(&W::upper, &W::lower);
      add(&W::upper, &W::upper);
      unrolled<kM, 2, 4>([&](int m, int j, int i) { sums[m][n + j][i] += products[m][j][i]; });
    }
  }

  // sums += a b^T, where a are 16 kM rows of a tile, and b are 8 kN rows of another. Both rows have `width` elements.
  template <int kM, int kN>
  static __device__ __forceinline__ void multiply_rows(float (&sums)[kM][kN][4], unsigned a, unsigned b, int width) {
#pragma unroll
    for (int column = 0; column < kWidth; column += kStep) {
      if (column % (4 * kStep) == 0 && !has_column(column, width)) break;
      W left[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load(left[m], at(a, column, 16 * m));
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        W right[4];
        load(right, at(b, column, 8 * n));
        add_products(sums, n, left, right);
      }
    }
  }

  // sums += a b, where a are 16 kM rows of kStep kK numbers in registers, as `operand` gives them, and b is a tile of
  // kStep kK rows, from the column on that the address has. Columns from `width` on are skipped.
  template <int kM, int kN, int kK>
  static __device__ __forceinline__ void multiply(float (&sums)[kM][kN][4], const uint32_t (&a)[kM][kK][4], unsigned b,
                                                  int width) {
    constexpr int kAtOnce = kIsHalf ? 8 : 16;
#pragma unroll
    for (int first = 0; first < kN; first += kAtOnce) {
      if (!has_column(8 * first, width)) break;
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        W left[kM][4];
        unrolled<kM, 4>([&](int m, int i) { left[m][i] = W(a[m][k][i]); });
#pragma unroll
        for (int n = first; n < kN && n < first + kAtOnce; n += 2) {
          W right[4];
          load_transposed(right, b, 8 * n, kStep * k);
          add_products(sums, n, left, right);
        }
      }
    }
  }
};

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
template <int kWidth, typename Element, int kM, int kN, typename Factor>
__device__ __forceinline__ void store_rows(const float (&sums)[kM][kN][4], Element* tile, const TileRows<Element>& rows,
                                           int begin, int end, int part, Factor&& factor) {
  using T = MmaTile<Element, kWidth>;
  constexpr int kPacks = 8 * kN / T::kPack;  // of a row's part
  const int lane = threadIdx.x % 32;
  __syncwarp();
  unrolled<kM, 2>([&](int m, int half) {
    const float times = factor(m, half);
    const int row = 16 * m + 8 * half + lane / 4;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      store_pair(T::at(tile, row, 8 * (part * kN + n) + lane % 4 * 2), sums[m][n][2 * half] * times,
                 sums[m][n][2 * half + 1] * times);
  });
  __syncwarp();
  for (int i = lane; i < 16 * kM * kPacks; i += 32) {
    const int row = i / kPacks, column = (part * kPacks + i % kPacks) * T::kPack;
    if (begin + row >= end || column >= rows.width) continue;
    const auto pack = load<T::kPack>(T::at(tile, row, column));
    Element* const to = rows[begin + row] + column;
    if (rows.aligned) {
      store(to, pack);
    } else {
#pragma unroll
      for (int j = 0; j < T::kPack; ++j)
        if (column + j < rows.width) to[j] = pack.values[j];
    }
  }
}

}  // namespace msops::product

#endif
