// Tensor cores compute the sums of a block's tile, of samples and units, from stages in shared memory that TMA has
// filled.
#pragma once

#include "../common/gpu/ld_st.h"
#include "../common/gpu/ldmatrix.h"
#include "../common/gpu/product.h"
#include "../common/gpu/wgmma.h"
#include "../common/pack.h"

namespace msops::lltm {

#if CUDART_VERSION >= 12000

// Returns where, in rows of 128 bytes, the lane's first number is for `ldmatrix_x4` of 16 rows by 8.
__device__ __forceinline__ int first_of_matrices(int first_row) {
  const int lane = threadIdx.x % 32;
  return (first_row + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
}

// Returns where it is for `load_column` of backward's weights, in boxes of 32 units and 32 rows. As the rows k and k +
// 4 are neighbours, a warp's loads hit all banks.
__device__ __forceinline__ int first_of_columns(int first_column) {
  const int lane = threadIdx.x % 32, row = lane % 4 * 2, column = first_column % 32 + lane / 4;
  return (first_column / 32 * 32 + row) * 128 + (column / 4 ^ row) * 16 + column % 4 * 4;
}
// Loads number lane % 4 of four rows and lane / 4 of eight columns.
__device__ __forceinline__ unsigned load_column(unsigned first, int rows, int columns) {
  return ld_shared_b32((first ^ (columns % 4 * 32 + rows % 2 * 16)) +
                       (rows % 2 + rows / 2 * 8 + columns / 4 * 32) * 128);
}

// WarpSums are a warp's sums, over all or a part of the products' length: kM x kN matrices of 16 x 8.
template <typename Tile>
class WarpSums {
 public:
  __device__ __forceinline__ WarpSums() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    first_row_ = warp / kWarpColumns * (16 * kM), first_column_ = warp % kWarpColumns * (8 * kN);
    samples_ = first_of_matrices(first_row_);
    weights_ = Tile::kForward ? (first_column_ + lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16
                              : first_of_columns(first_column_);
  }

  // Adds all stages.
  template <typename Stages>
  __device__ __forceinline__ void add_all(const Stages& stages) {
    for (int i = 0; i < stages.count; ++i) {
      stages.wait(i);
      add(stages.samples(i), stages.weights(i));
      stages.release(i);
    }
  }

  // Stores the sums to an array [kSamples][kPitch].
  __device__ __forceinline__ void store_to(float* all) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float* const to = all + (first_row_ + 16 * m + lane / 4) * Tile::kPitch + first_column_ + 8 * n + lane % 4 * 2;
        store(to, Pack<float, 2>{{sums_[n][m][0], sums_[n][m][1]}});
        store(to + 8 * Tile::kPitch, Pack<float, 2>{{sums_[n][m][2], sums_[n][m][3]}});
      }
  }

 private:
  using Operand = Word<Product::kFloat>;
  static constexpr int kWarpColumns = 2, kWarpRows = Tile::kWarps / kWarpColumns;
  static constexpr int kM = Tile::kSamples / kWarpRows / 16, kN = Tile::kColumns / kWarpColumns / 8;
  static constexpr int kAtOnce = kM == 1 ? kN : kN / 2;

  // Adds a stage. While the products of some sums are computed, the ones before are added.
  __device__ __forceinline__ void add(unsigned samples, unsigned weights) {
#pragma unroll
    for (int step = 0; step < Tile::kDepth / 8; ++step) {
      Operand a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        unsigned words[4];
        ldmatrix_x4(words, ((samples + samples_) ^ step * 32) + m * 16 * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = Operand(words[i]);
      }
      unsigned b[kN][2];
      load_weights(weights + weights_, step, b);
#pragma unroll
      for (int first = 0; first < kN; first += kAtOnce) add(a, &b[first], &sums_[first]);
    }
  }

  __device__ __forceinline__ static void load_weights(unsigned from, int step, unsigned (&b)[kN][2]) {
    if constexpr (Tile::kForward) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        unsigned words[4];
        ldmatrix_x4(words, (from ^ step * 32) + n * 8 * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n + i / 2][i % 2] = words[i];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[n][i] = load_column(from, 2 * step + i, n);
    }
  }

  // Works as `multiply_add` does, but makes one kind of products for all sums before the next, so that they do not wait
  // for each other.
  __device__ __forceinline__ static void add(const Operand (&a)[kM][4], const unsigned (*words)[2],
                                             float (*sums)[kM][4]) {
    Operand b[kAtOnce][2];
    float products[kAtOnce][kM][4] = {};
    const auto for_all = [](const auto& f) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int m = 0; m < kM; ++m) f(n, m);
    };
    const auto multiply = [&](uint32_t Operand::* of_a, uint32_t Operand::* of_b) {
      for_all([&](int n, int m) {
        mma_m16n8k8(products[n][m], {a[m][0].*of_a, a[m][1].*of_a, a[m][2].*of_a, a[m][3].*of_a},
                    {b[n][0].*of_b, b[n][1].*of_b});
      });
    };
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) b[n][i] = Operand(words[n][i]);
    multiply(&Operand::lower, &Operand::upper);
    multiply(&Operand::upper, &Operand::lower);
    multiply(&Operand::upper, &Operand::upper);
    for_all([&](int n, int m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][m][i] += products[n][m][i];
    });
  }

  float sums_[kN][kM][4] = {};
  int first_row_, first_column_;
  unsigned samples_, weights_;  // offsets of the thread's first numbers, in bytes
};

// WarpgroupSums are a warpgroup's sums of TF32 products, over all or a part of the products' length, for 64 columns and
// all samples. The weights are rounded in registers; the samples' numbers, from shared memory, must be rounded before.
template <typename Tile>
class WarpgroupSums {
 public:
  __device__ __forceinline__ WarpgroupSums() {
    first_column_ = threadIdx.x / 32 * 16;
    weights_ = Tile::kForward ? first_of_matrices(first_column_) : first_of_columns(first_column_);
  }

  // Adds all stages. While the tensor cores work on one, the weights of the next are loaded.
  template <typename Stages>
  __device__ __forceinline__ void add_all(const Stages& stages) {
    for (int first = 0; first < stages.count; first += 2) {
#pragma unroll
      for (int i = first; i < first + 2; ++i) {
        if (i == stages.count) break;
        unsigned a[kSteps][4];
        stages.wait(i);
        load_weights(stages.weights(i), a);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int n = 0; n < kN; ++n)
            wgmma_m64n64k8(sums_[n], a[step], wgmma_matrix(stages.samples(i) + n * 64 * 128 + step * 32));
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (i > 0) stages.release(i - 1);
      }
    }
    wgmma_wait_group<0>();
  }

  // Stores the sums to an array [kSamples][kPitch].
  __device__ __forceinline__ void store_to(float* all) const {
    const int lane = threadIdx.x % 32;
    float* const to = all + lane % 4 * 2 * Tile::kPitch + first_column_ + lane / 4;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int j = 0; j < 32; ++j) to[(n * 64 + j / 4 * 8 + j % 2) * Tile::kPitch + j / 2 % 2 * 8] = sums_[n][j];
  }

 private:
  static constexpr int kSteps = Tile::kDepth / 8, kN = Tile::kSamples / 64;

  // Loads the weights rounded, except for the bits that the instruction cuts off.
  __device__ __forceinline__ void load_weights(unsigned from, unsigned (&words)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Tile::kForward) {
        ldmatrix_x4(words[step], from + weights_ ^ step * 32);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[step][i] = load_column(from + weights_, 2 * step + i / 2, i % 2);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (unsigned& word : words[step])
        if (isfinite(__uint_as_float(word))) word += 0x1000;
  }

  float sums_[kN][32] = {};
  int first_column_;
  unsigned weights_;  // offset of the thread's first number, in bytes
};

// TileShape describes a block's tile, and its stages in shared memory. A stage has kDepth numbers of the products'
// length, in rows of 128 bytes. Each sample has a row. The weights have a box for each 32 units: forward, with a row
// for each of these units and each gate; backward, with kDepth rows of the 32 units.
template <Product kProduct_, int kSamples_, typename Loop>
struct TileShape {
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kForward = Loop::kTiles != 1, kTf32 = kProduct == Product::kTf32;
  static constexpr int kDepth = 32;
  static constexpr int kBoxColumns = 32 * Loop::kTiles, kBoxBytes = kBoxColumns * 128;
  static constexpr int kSamples = kSamples_, kColumns = kTf32 ? 192 : kForward ? 96 : kSamples / 2;
  static constexpr int kUnits = kColumns / Loop::kTiles, kWarps = kTf32 ? 12 : 8;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kSampleBytes = kSamples * 128, kStageBytes = kSampleBytes + kColumns * 128;
  static constexpr int kMostStages = (226 << 10) / kStageBytes, kStages = kMostStages < 8 ? kMostStages : 8;
  static constexpr int kSharedBytes = 1023 + kStages * (kStageBytes + 16);
  static constexpr int kPitch = kColumns + (kTf32 ? 4 : 8);  // stride of sums, so that a warp's stores hit all banks
  static_assert(kSamples * kPitch * 4 <= kStages * kStageBytes, "the sums take the stages' place");
  // An H200 takes about this many us for a stage.
  static constexpr double kLargeCost = kTf32 ? 0.6 : kForward ? 2 : 1, kSmallCost = kTf32 ? 0.42 : kForward ? 1 : 0.4;
  static constexpr double kStageCost = kSamples == 128 ? kLargeCost : kSmallCost;
  static constexpr bool kHasCode = kTf32 ? kHasSm90a : kHasSm90;
  using Sums = std::conditional_t<kTf32, WarpgroupSums<TileShape>, WarpSums<TileShape>>;
};

#endif

}  // namespace msops::lltm
