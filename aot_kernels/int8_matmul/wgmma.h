// Products of many rows by wgmma on sm_90a, where the weight is by terms and rows of both factors are whole packs of 16
// bytes.
//
// A pair of blocks, which is a cluster, goes through tiles of the result, each block through tiles of kRows tokens.
// One warp copies the factors by TMA into a ring of stages: a block's own rows of x, and half of the rows of the
// weight, for both blocks. Another warp brings what results of an output take. Each of two warpgroups computes half of
// a tile's rows.
#pragma once

#include "../shared/product/wgmma_tiles.h"
#include "problem.h"

#ifdef __CUDACC__

#include "../common/gpu/cluster.h"

namespace msops::int8_matmul {

#if CUDART_VERSION >= 12000

// The terms of a stage: rows of 128 bytes, as those of 64 float16, for which SharedTile has names.
constexpr int kTerms = 128;

// A WgmmaStage has rows of both factors.
template <int kLeft, int kRight>
struct WgmmaStage {
  using Element = unsigned char;
  using Left = product::SharedTile<kLeft, kTerms / 2>;
  using Right = product::SharedTile<kRight, kTerms / 2>;
  static constexpr int kBytes = Left::kBytes + Right::kBytes;
  unsigned address;

  __device__ __forceinline__ Left left() const { return {address}; }
  __device__ __forceinline__ Right right() const { return {address + Left::kBytes}; }
};

// Begins a group of products of a stage, for 64 rows from one on of its left factor.
template <typename Stage, int kN>
__device__ __forceinline__ void begin_products(int32_t (&sums)[kN][4], const Stage& stage, int row, bool adds) {
  const auto left = stage.left().rows(row);
  const auto right = stage.right();
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTerms / 32; ++step)
    wgmma_k32(sums, left.columns(step), right.columns(step), adds || step > 0);
  wgmma_commit_group();
}

struct PairShape {
  static constexpr int kRows = 128, kColumns = 256, kBlocks = 2;  // of a block's tile, whose columns are outputs
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kStages = 4;
  static constexpr int kProducerRegisters = 56, kRegisters = 224;

  using Stage = WgmmaStage<kRows, kColumns>;
  using Factors = product::Ring<kStages, Stage>;
  using Outputs = product::Ring<2, product::SharedArray<Products::OfOutput, kColumns>>;
  using Memory = product::SharedMemory<Factors, Outputs>;
  static constexpr int kBytes = Memory::kBytes;
};

// PairTiles orders the tiles of all pairs of blocks, so that those at work at once need few rows of either factor.
struct PairTiles {
  using S = PairShape;
  static constexpr int64_t kGroup = 8;
  int64_t down, across;

  MSOPS_BOTH explicit PairTiles(const Products& p)
      : down((p.tokens + S::kBlocks * S::kRows - 1) / (S::kBlocks * S::kRows)),
        across((p.outputs + S::kColumns - 1) / S::kColumns) {}
  MSOPS_BOTH int64_t count() const { return down * across; }

  // Calls f(token, output) for each tile of this pair of blocks, with the pair's first token.
  template <typename F>
  __device__ __forceinline__ void for_each(const F& f) const {
    for (int64_t tile = blockIdx.x / S::kBlocks; tile < count(); tile += gridDim.x / S::kBlocks) {
      const int64_t first = tile / (kGroup * across) * kGroup, rest = tile - first * across;
      const int64_t high = down - first < kGroup ? down - first : kGroup;
      f((first + rest % high) * S::kBlocks * S::kRows, rest / high * S::kColumns);
    }
  }
};

// PairRings are the stages, and what results take of the outputs of the next tiles.
struct PairRings {
  using S = PairShape;
  S::Memory memory;
  S::Factors factors;
  S::Outputs outputs;

  __device__ __forceinline__ explicit PairRings(unsigned char* shared) : memory{shared} {
    memory.take(factors), memory.take(outputs);
  }
  // A stage is copied for both blocks once the warps of both have used it.
  __device__ __forceinline__ void init() const {
    factors.init(4 * S::kConsumers * S::kBlocks), outputs.init(4 * S::kConsumers);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ void release_factors(unsigned copy) const {
    __syncwarp();
    const unsigned lane = threadIdx.x % 32;
    if (lane < S::kBlocks) mbarrier_arrive_cluster(factors.empty(copy), lane);
  }
  __device__ __forceinline__ Products::OfOutput* outputs_of(unsigned number) const {
    return memory[outputs.tile(number)];
  }
};

// Copies the factors. One thread calls this.
__device__ __forceinline__ void copy_factors(const Products& p, const PairRings& rings, const TensorMap& x,
                                             const TensorMap& weight) {
  using S = PairShape;
  constexpr int kHalf = S::kColumns / S::kBlocks;
  const int block = static_cast<int>(cluster_ctarank());
  unsigned copy = 0;
  PairTiles(p).for_each([&](int64_t token, int64_t output) {
    const int row = static_cast<int>(token) + block * S::kRows, column = static_cast<int>(output) + block * kHalf;
    for (int64_t k = 0; k < p.deep; k += kTerms, ++copy) {
      const S::Stage stage = rings.factors.tile(copy);
      const unsigned full = rings.factors.full(copy);
      const int term = static_cast<int>(k);
      rings.factors.wait_for_room(copy);
      mbarrier_arrive_expect_tx(full, S::Stage::kBytes);
      tma_load_5d(stage.left().address, full, x, term, row, 0, 0, 0);
      tma_load_5d_multicast(stage.right().rows(block * kHalf).address, full, weight, term, column, 0, 0, 0,
                            (1 << S::kBlocks) - 1);
    }
  });
}

// Brings what results take of the tiles' outputs. A warp calls this.
__device__ __forceinline__ void copy_outputs(const Products& p, const PairRings& rings) {
  using S = PairShape;
  unsigned number = 0;
  PairTiles(p).for_each([&](int64_t, int64_t output) {
    rings.outputs.wait_for_room(number);
    for (int i = threadIdx.x % 32; i < S::kColumns; i += 32)
      rings.outputs_of(number)[i] = output + i < p.outputs ? p.of_output(output + i) : Products::OfOutput{};
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(rings.outputs.full(number));
    ++number;
  });
}

// Stores a warp's 16 rows of a tile. Threads of a quad first exchange words, so that each stores packs of 16 bytes.
template <typename T, bool kHasWholeBias, int kN>
__device__ __forceinline__ void store_results(const Products& p, const int32_t (&sums)[kN][4], int64_t token,
                                              int64_t output, const Products::OfOutput* outputs) {
  constexpr int kWords = sizeof(T) / 2, kAtOnce = 4 / kWords, kPack = kPackWidth<T>;  // kWords: of two results
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const bool has_packs = p.outputs % kPack == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  float of_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = token + lane / 4 + 8 * half;
    of_row[half] = row < p.tokens ? p.scale_of_row(row) : 0.f;
  }
#pragma unroll
  for (int n = 0; n < kN; n += kAtOnce) {
    Pack<Products::OfOutput, 2> of[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) of[j] = load<2>(outputs + 8 * (n + j) + 2 * quad);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t (&pair)[2] = {sums[n + j][2 * half], sums[n + j][2 * half + 1]};
        const float first = Products::result<kHasWholeBias>(pair[0], of[j].values[0], of_row[half]);
        const float second = Products::result<kHasWholeBias>(pair[1], of[j].values[1], of_row[half]);
        if constexpr (kWords == 1) {
          words[j] = product::pair_of(first, second);
        } else {
          words[2 * j] = __float_as_uint(first), words[2 * j + 1] = __float_as_uint(second);
        }
      }
      product::transpose_words<kAtOnce>(words);
      Pack<T, kPack> pack;
      memcpy(&pack, words, sizeof pack);
      const int64_t row = token + lane / 4 + 8 * half;
      const int64_t column = output + 8 * (n + quad % kAtOnce) + quad / kAtOnce * kPack;
      T* const to = static_cast<T*>(p.out) + row * p.outputs + column;
      if (row >= p.tokens) continue;
      if (has_packs) {
        if (column < p.outputs) store_at_once(to, pack);
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i)
          if (column + i < p.outputs) to[i] = pack.values[i];
      }
    }
  }
}

template <int kN>
__device__ __forceinline__ void store_results(const Products& p, const int32_t (&sums)[kN][4], int64_t token,
                                              int64_t output, const Products::OfOutput* outputs) {
  if (p.is_half) {
    p.whole_bias ? store_results<Half, true>(p, sums, token, output, outputs)
                 : store_results<Half, false>(p, sums, token, output, outputs);
  } else {
    p.whole_bias ? store_results<float, true>(p, sums, token, output, outputs)
                 : store_results<float, false>(p, sums, token, output, outputs);
  }
}

// Computes the tiles. A warpgroup calls this; `consumer` is its number.
__device__ __forceinline__ void compute_tiles(const Products& p, int consumer, const PairRings& rings) {
  using S = PairShape;
  int32_t sums[S::kColumns / 8][4];
  unsigned copy = 0, number = 0;
  PairTiles(p).for_each([&](int64_t token, int64_t output) {
    for (int64_t k = 0; k < p.deep; k += kTerms, ++copy) {
      rings.factors.wait(copy);
      begin_products(sums, rings.factors.tile(copy), 64 * consumer, k > 0);
      wgmma_wait_group<1>();
      if (k > 0) rings.release_factors(copy - 1);
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    rings.release_factors(copy - 1);
    const int row = static_cast<int>(cluster_ctarank()) * S::kRows + 64 * consumer + threadIdx.x / 32 % 4 * 16;
    rings.outputs.wait(number);
    store_results(p, sums, token + row, output, rings.outputs_of(number));
    rings.outputs.release(number++);
  });
}

__device__ __forceinline__ void multiply_in_pairs(const Products& p, const TensorMap& x, const TensorMap& weight) {
  using S = PairShape;
  extern __shared__ __align__(1024) unsigned char shared[];
  const PairRings rings(shared);
  if (threadIdx.x == 0) rings.init();
  cluster_arrive_wait();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x == 0) copy_factors(p, rings, x, weight);
    if (threadIdx.x / 32 == 1) copy_outputs(p, rings);
    __syncwarp();
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    compute_tiles(p, consumer, rings);
  }
  cluster_arrive_wait();  // the other block may still copy to this one, and arrive at its barriers
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
__global__ void __launch_bounds__(kHasSm90a ? PairShape::kThreads : 1, 1)
    pair_kernel(const __grid_constant__ Products p, const __grid_constant__ TensorMap x,
                const __grid_constant__ TensorMap weight) {
  if constexpr (kHasSm90a) multiply_in_pairs(p, x, weight);
}

// Returns false, and launches nothing, if the GPU lacks the instructions.
inline bool launch_pairs(Call& call, const Products& p) {
  using S = PairShape;
  const int64_t blocks = product::wgmma_blocks<S>(pair_kernel, S::kBlocks * PairTiles(p).count());
  TensorMap x, weight;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, kTerms}, {p.tokens, p.deep, S::kRows}};
  const TensorMap::Dimension of_weight[] = {{p.deep, 1, kTerms}, {p.outputs, p.deep, S::kColumns / S::kBlocks}};
  if (blocks < S::kBlocks || !x.encode(p.x, of_x) || !weight.encode(p.weight, of_weight)) return false;
  const Grid grid = Grid(blocks / S::kBlocks * S::kBlocks).in_clusters(S::kBlocks);
  launch(call, pair_kernel, grid, S::kThreads, S::kBytes, p, x, weight);
  return true;
}

#endif

}  // namespace msops::int8_matmul

#endif
