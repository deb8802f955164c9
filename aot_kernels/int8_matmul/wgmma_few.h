// Products of few rows by wgmma on sm_90a, which read the weight once, and the choice among the kernels of sm_90a.
//
// The weight is the left factor: a tile has kOutputs outputs and up to kTokens tokens. So that many blocks read the
// weight at once, those of a cluster share the terms of a tile, and then add up each other's sums, which are exact.
#pragma once

#include "wgmma.h"

#ifdef __CUDACC__

namespace msops::int8_matmul {

#if CUDART_VERSION >= 12000

template <int kTokens_>
struct FewShape {
  static constexpr int kOutputs = 128, kTokens = kTokens_, kMostParts = 8;  // kMostParts: blocks of a cluster
  static constexpr int kConsumers = 2, kWarps = 4 * kConsumers, kThreads = 32 * (kWarps + 1);
  static constexpr int kStages = kTokens == 128 ? 3 : kTokens == 64 ? 4 : 5, kBlocks = 2;  // of a multiprocessor

  using Stage = WgmmaStage<kOutputs, kTokens>;
  using Factors = product::Ring<kStages, Stage>;
  using Memory = product::SharedMemory<Factors>;
  static constexpr int kBytes = Memory::kBytes;

  // In the end, the sums (kTokens, kOutputs) take the stages' place. Threads of a warp store them to different banks.
  static constexpr int kStride = kOutputs + 4;
  static_assert(kTokens * kStride * 4 <= Factors::kBytes, "the sums take the stages' place");
};

// FewTile is the tile of a cluster, and the block's part of its terms, in stages.
template <typename S>
struct FewTile {
  int64_t token, output;
  int part, parts;
  int64_t first, end;

  __device__ __forceinline__ explicit FewTile(const Products& p)
      : part(static_cast<int>(cluster_ctarank())), parts(static_cast<int>(cluster_nctarank())) {
    const int64_t down = (p.tokens + S::kTokens - 1) / S::kTokens, tile = blockIdx.x / static_cast<unsigned>(parts);
    const int64_t stages = (p.deep + kTerms - 1) / kTerms;
    token = tile % down * S::kTokens, output = tile / down * S::kOutputs;
    first = stages * part / parts, end = stages * (part + 1) / parts;
  }
};

// Copies the factors. One thread calls this.
template <typename S>
__device__ __forceinline__ void copy_factors(const FewTile<S>& tile, const typename S::Factors& factors,
                                             const TensorMap& x, const TensorMap& weight) {
  unsigned copy = 0;
  for (int64_t i = tile.first; i < tile.end; ++i, ++copy) {
    const typename S::Stage stage = factors.tile(copy);
    const unsigned full = factors.full(copy);
    const int term = static_cast<int>(i) * kTerms;
    factors.wait_for_room(copy);
    mbarrier_arrive_expect_tx(full, S::Stage::kBytes);
    tma_load_5d(stage.left().address, full, weight, term, static_cast<int>(tile.output), 0, 0, 0);
    tma_load_5d(stage.right().address, full, x, term, static_cast<int>(tile.token), 0, 0, 0);
  }
}

// Computes the block's part of the sums. A warpgroup calls this.
template <typename S, int kN>
__device__ __forceinline__ void compute_sums(int32_t (&sums)[kN][4], const FewTile<S>& tile, int consumer,
                                             const typename S::Factors& factors) {
  const unsigned count = static_cast<unsigned>(tile.end - tile.first);
  for (unsigned copy = 0; copy < count; ++copy) {
    factors.wait(copy);
    begin_products(sums, factors.tile(copy), 64 * consumer, copy > 0);
    wgmma_wait_group<1>();
    if (copy > 0) factors.release(copy - 1);
  }
  wgmma_wait_group<0>();
  wgmma_fence_operand(sums);
}

// Adds up the parts of sums, and stores results: a warp those of a token, in packs of four.
template <typename S, typename T>
__device__ __forceinline__ void store_few(const Products& p, const FewTile<S>& tile, const float* sums) {
  const int warp = threadIdx.x / 32, column = threadIdx.x % 32 * 4;
  const int64_t output = tile.output + column;
  const bool has_packs = p.outputs % 4 == 0 && is_aligned<4>(static_cast<const T*>(p.out));
  Products::OfOutput of[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) of[i] = output + i < p.outputs ? p.of_output(output + i) : Products::OfOutput{};
  for (int i = warp * tile.parts + tile.part; i < S::kTokens; i += S::kThreads / 32 * tile.parts) {
    const int64_t token = tile.token + i;
    if (token >= p.tokens) break;
    int32_t total[4] = {};
    for (int part = 0; part < tile.parts; ++part) {
      const Pack<float, 4> bits = ld_shared_cluster(sums + i * S::kStride + column, part);
      int32_t numbers[4];
      memcpy(numbers, &bits, sizeof bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += numbers[j];
    }
    const float of_row = p.scale_of_row(token);
    float results[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      results[j] = p.whole_bias ? Products::result<true>(total[j], of[j], of_row)
                                : Products::result<false>(total[j], of[j], of_row);
    T* const to = static_cast<T*>(p.out) + token * p.outputs + output;
    const Pack<T, 4> pack = rounded_pack<T>(results);
    if (has_packs) {
      if (output < p.outputs) store_at_once(to, pack);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (output + j < p.outputs) to[j] = pack.values[j];
    }
  }
}

template <typename S>
__device__ __forceinline__ void multiply_few(const Products& p, const TensorMap& x, const TensorMap& weight) {
  extern __shared__ __align__(1024) unsigned char shared[];
  typename S::Memory memory{shared};
  typename S::Factors factors;
  memory.take(factors);
  if (threadIdx.x == 0) {
    factors.init(S::kWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  const FewTile<S> tile(p);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // is known to be the same in a warp
  int32_t sums[S::kTokens / 8][4];
  if (warp == S::kWarps) {
    if (lane == 0) copy_factors(tile, factors, x, weight);
    __syncwarp();
  } else {
    compute_sums(sums, tile, warp / 4, factors);
  }
  __syncthreads();
  int32_t* const parts = reinterpret_cast<int32_t*>(shared);
  if (warp < S::kWarps)
#pragma unroll
    for (int n = 0; n < S::kTokens / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[(8 * n + 2 * (lane % 4) + i % 2) * S::kStride + 16 * warp + lane / 4 + i / 2 * 8] = sums[n][i];
  cluster_arrive_wait();
  const float* const bits = reinterpret_cast<const float*>(parts);
  p.is_half ? store_few<S, Half>(p, tile, bits) : store_few<S, float>(p, tile, bits);
  cluster_arrive_wait();  // other blocks may still read this one's sums
}

template <int kTokens>
__global__ void __launch_bounds__(kHasSm90a ? FewShape<kTokens>::kThreads : 1, FewShape<kTokens>::kBlocks)
    few_kernel(const __grid_constant__ Products p, const __grid_constant__ TensorMap x,
               const __grid_constant__ TensorMap weight) {
  if constexpr (kHasSm90a) multiply_few<FewShape<kTokens>>(p, x, weight);
}

// Returns false, and launches nothing, if the GPU lacks the instructions.
template <int kTokens>
bool launch_few(Call& call, const Products& p) {
  using S = FewShape<kTokens>;
  const int64_t tiles = (p.tokens + kTokens - 1) / kTokens * ((p.outputs + S::kOutputs - 1) / S::kOutputs);
  const int64_t stages = (p.deep + kTerms - 1) / kTerms, room = Gpu().multiprocessors;
  TensorMap x, weight;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, kTerms}, {p.tokens, p.deep, kTokens}};
  const TensorMap::Dimension of_weight[] = {{p.deep, 1, kTerms}, {p.outputs, p.deep, S::kOutputs}};
  if (product::wgmma_blocks<S>(few_kernel<kTokens>, 1) == 0 || !x.encode(p.x, of_x) ||
      !weight.encode(p.weight, of_weight))
    return false;
  unsigned parts = 1;
  while (parts < S::kMostParts && 2 * parts * tiles <= room && 4 * parts <= stages) parts *= 2;
  launch(call, few_kernel<kTokens>, Grid(parts * tiles).in_clusters(parts), S::kThreads, S::kBytes, p, x, weight);
  return true;
}

// Returns false, and launches nothing, if the GPU lacks the instructions or TMA cannot read the factors.
inline bool multiply_by_wgmma(Call& call, const Products& p) {
  if (!p.by_terms || p.deep == 0 || std::max({p.tokens, p.deep, p.outputs}) > INT32_MAX / 2 || !p.x_has_packs(16) ||
      !p.weight_has_packs(16))
    return false;
  if (p.tokens <= 32) return launch_few<32>(call, p);
  if (p.tokens <= 64) return launch_few<64>(call, p);
  using S = PairShape;
  const int64_t tiles = (p.tokens + S::kRows - 1) / S::kRows * PairTiles(p).across;
  const bool has_pairs = p.tokens > S::kRows && 2 * tiles >= Gpu().multiprocessors;  // with enough tiles for half
  return has_pairs ? launch_pairs(call, p) : launch_few<128>(call, p);
}

#else
inline bool multiply_by_wgmma(Call&, const Products&) { return false; }
#endif

}  // namespace msops::int8_matmul

#endif
