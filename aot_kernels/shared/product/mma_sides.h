// The two sides of a product in tiles of shared memory, for mma.sync, on sm_80 and later.
#pragma once

#include "matrix.h"
#include "mma_tiles.h"

#ifdef __CUDACC__

namespace msops::product {

// MmaSide is kSide vectors of kDeep terms in shared memory: (kSide, kDeep) if terms lie close together, else
// (kDeep, kSide).
template <typename S, bool kByTerms>
struct MmaSide {
  using T = typename S::T;
  using Tile = MmaTile<T, kByTerms ? S::kDeep : S::kSide>;
  using W = typename Tile::W;
  static constexpr bool kHasTrans = Tile::kIsHalf;  // ldmatrix transposes float16 alone

  // Begins to copy terms, of which `left` are left. What is beyond these and beyond `count` vectors becomes 0.
  static __device__ __forceinline__ void load(T* tile, const Vectors<T>& from, int count, int64_t left, bool aligned) {
    const int terms = static_cast<int>(left < S::kDeep ? left : S::kDeep), rows = kByTerms ? count : terms,
              width = kByTerms ? terms : count;
    const TileRows<const T> all{from.first, kByTerms ? from.apart : from.step, width, aligned};
    Tile::template load<kByTerms ? S::kSide : S::kDeep, S::kThreads>(tile, all, 0, rows, threadIdx.x);
  }

  // Return the address that the thread reads an operand at, if it begins with this vector.
  static __device__ __forceinline__ unsigned left(const T* tile, int vector) {
    const int lane = threadIdx.x % 32;
    if constexpr (kByTerms) return Tile::left(tile, vector);
    if constexpr (!kHasTrans) return Tile::at(of_words(tile), vector);
    return Tile::at(shared_address(Tile::at(const_cast<T*>(tile), lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8)), vector);
  }
  static __device__ __forceinline__ unsigned right(const T* tile, int vector) {
    if constexpr (kByTerms) return Tile::at(Tile::right(tile), 0, vector);
    if constexpr (!kHasTrans) return Tile::at(of_words(tile), vector);
    return Tile::at(Tile::transposed(tile), vector);
  }

  // Load 16 vectors of a left or a right operand, `vectors` after the first, at a step of terms.
  static __device__ __forceinline__ void load_left(W (&words)[4], unsigned address, int vectors, int step) {
    load_words<true>(words, address, vectors, step);
  }
  static __device__ __forceinline__ void load_right(W (&words)[4], unsigned address, int vectors, int step) {
    load_words<false>(words, address, vectors, step);
  }

 private:
  // Returns where the number of term lane % 4 and vector lane / 4 is.
  static __device__ __forceinline__ unsigned of_words(const T* tile) {
    const int lane = threadIdx.x % 32;
    return shared_address(Tile::at(const_cast<T*>(tile), lane % 4, lane / 4));
  }

  template <bool kIsLeft>
  static __device__ __forceinline__ void load_words(W (&words)[4], unsigned address, int vectors, int step) {
    uint32_t bits[4];
    if constexpr (kByTerms) {
      ldmatrix_x4(bits, Tile::at(address, step * Tile::kStep, vectors));
    } else if constexpr (kHasTrans) {
      ldmatrix_x4_trans(bits, Tile::at(address, vectors, step * Tile::kStep));
    } else {
      const unsigned later = (address ^ 64) + 4 * Tile::kRowBytes;  // where the term 4 terms later is
      unrolled<4>([&](int i) {
        const bool is_later = kIsLeft ? i / 2 : i % 2;
        const int vector = vectors + 8 * (kIsLeft ? i % 2 : i / 2);
        bits[i] = ld_shared_b32(Tile::at(is_later ? later : address, vector, step * Tile::kStep));
      });
    }
    unrolled<4>([&](int i) { words[i] = W(bits[i]); });
  }
};

// Adds the products of a stage's terms to the sums of a warp: 16 S::kM vectors of the left side times 8 S::kN of the
// right side, whose operands begin at these addresses.
template <typename S, typename Left, typename Right>
__device__ __forceinline__ void add_products(float (&sums)[S::kM][S::kN][4], unsigned from_left, unsigned from_right) {
#pragma unroll 2
  for (int step = 0; step < S::kDeep / Left::Tile::kStep; ++step) {
    typename Left::W of_left[S::kM][4];
#pragma unroll
    for (int m = 0; m < S::kM; ++m) Left::load_left(of_left[m], from_left, 16 * m, step);
#pragma unroll
    for (int n = 0; n < S::kN; n += 2) {
      typename Right::W of_right[4];
      Right::load_right(of_right, from_right, 8 * n, step);
      Left::Tile::add_products(sums, n, of_left, of_right);
    }
  }
}

// Returns whether rows of these lengths, from these addresses on, have whole packs of 16 bytes.
template <typename T>
bool has_packs(const T* first, int64_t length) {
  return is_aligned<kPackWidth<T>>(first) && length % kPackWidth<T> == 0;
}

}  // namespace msops::product

#endif
