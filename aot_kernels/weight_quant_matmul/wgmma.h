// Products of float16 by wgmma on sm_90a, for rows of whole packs of 16 bytes and groups of 32 n. One thread copies
// codes and x by TMA into a ring of stages, and the warps of two warpgroups widen and multiply them (see wgmma_warp.h).
#pragma once

#include "wgmma_warp.h"

#ifdef __CUDACC__

namespace msops::weight_quant_matmul {

#if CUDART_VERSION >= 12000

// Fills stages. One thread calls this.
template <typename S>
__device__ __forceinline__ void copy_stages(const Products<Half>& p, const TensorMap& x, const TensorMap& codes,
                                            const typename S::Factors& factors) {
  unsigned copy = 0;
  for (WgmmaTiles<S> tiles(p); tiles.has_more(); tiles.advance()) {
    const int token = static_cast<int>(tiles.token()), output = static_cast<int>(tiles.output());
    for (int k = static_cast<int>(tiles.first); k < static_cast<int>(tiles.end); k += S::kDeep, ++copy) {
      const typename S::Stage stage = factors.tile(copy);
      const unsigned full = factors.full(copy);
      factors.wait_for_room(copy);
      mbarrier_arrive_expect_tx(full, S::Stage::kBytes);
      for (int box = 0; box < S::Stage::X::kBoxes; ++box)
        tma_load_5d(stage.x().box(box).address, full, x, k + 64 * box, token, 0, 0, 0);
      if constexpr (S::kByTerms) {
        tma_load_5d(stage.codes(), full, codes, k * S::kBits / 8, output / S::kEach, 0, 0, 0);
      } else {
        tma_load_5d(stage.codes(), full, codes, output * S::kBits / 8, 0, 0, k / 8, 0);
      }
    }
  }
}

// Adds the sums of a cluster's blocks, and stores them: a warp those of a token, four outputs a lane.
template <typename S>
__device__ __forceinline__ void store_shared(const Products<Half>& p, const float* sums) {
  const WgmmaTiles<S> tiles(p);
  const int part = static_cast<int>(cluster_ctarank()), parts = static_cast<int>(cluster_nctarank());
  const int column = threadIdx.x % 32 * 4;
  static_assert(S::kOutputs == 128, "a warp has the outputs of a token");
  for (int i = threadIdx.x / 32 * parts + part; i < S::kTokens; i += S::kThreads / 32 * parts) {
    const int64_t token = tiles.token() + i, output = tiles.output() + column;
    if (token >= p.tokens) break;
    Pack<float, 4> packs[S::kMostParts];  // all are on their way at once
    float total[4] = {};
    unrolled<S::kMostParts>([&](int of) {
      if (of < parts) packs[of] = ld_shared_cluster(sums + i * S::kStride + column, of);
    });
    unrolled<S::kMostParts, 4>([&](int of, int j) {
      if (of < parts) total[j] += packs[of].values[j];
    });
    if (output >= p.outputs) continue;
    unrolled<4>([&](int j) { total[j] += p.bias[output + j]; });
    store_at_once(p.out + token * p.outputs + output, rounded_pack<Half>(total));
  }
}

template <typename S>
__device__ __forceinline__ void multiply_by_wgmma(const Products<Half>& p, const Divisor& groups, const TensorMap& x,
                                                  const TensorMap& codes) {
  extern __shared__ __align__(1024) unsigned char shared[];
  typename S::Memory memory{shared};
  typename S::Factors factors;
  memory.take(factors);
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(shared + S::Memory::kBytes);
  if (threadIdx.x == 0) {
    factors.init(4 * S::kConsumers);
    fence_mbarrier_init();
  }
  if (p.weights.table)
    for (int i = threadIdx.x; i < 256; i += S::kThreads)
      pairs[i] = product::pair_of(p.weights.table[i & 15], p.weights.table[i >> 4]);
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - S::kFirst;  // is known to be the same in a warp
  WgmmaWarp<S> of_warp(p, groups, p.weights.table ? pairs : nullptr, memory, factors, warp);
  if (0 <= warp && warp < 4 * S::kConsumers) {
    if constexpr (!S::kIsShared) setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    of_warp.compute();
  } else {
    if constexpr (!S::kIsShared) setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x == (S::kIsShared ? 128 * S::kConsumers : 0)) copy_stages<S>(p, x, codes, factors);
    __syncwarp();
  }
  if constexpr (S::kIsShared) {
    float* const sums = reinterpret_cast<float*>(shared);
    __syncthreads();  // all stages have been read
    if (warp < 4 * S::kConsumers) of_warp.put(sums);
    cluster_arrive_wait();
    store_shared<S>(p, sums);
    cluster_arrive_wait();  // other blocks may still read this one's sums
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, S::kBlocks)
    wgmma_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ Divisor groups,
                 const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes) {
  if constexpr (kHasSm90a) multiply_by_wgmma<S>(p, groups, x, codes);
}

template <typename S>
bool launch_wgmma(Call& call, const Products<Half>& p) {
  const auto kernel = wgmma_kernel<S>;
  const Codes<Half>& w = p.weights;
  const int64_t tiles = WgmmaTiles<S>::count(p), stages = (p.deep + S::kDeep - 1) / S::kDeep;
  const int64_t blocks = product::wgmma_blocks<S>(kernel, tiles);
  TensorMap x, codes;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, 64}, {p.tokens, p.deep, S::kTokens}};
  const TensorMap::Dimension by_terms[] = {{w.pitch(), 1, S::kRowBytes},
                                           {p.outputs / S::kEach, S::kEach * w.pitch(), S::kOutputs / S::kEach},
                                           {S::kEach, w.pitch(), S::kEach}};
  const TensorMap::Dimension by_outputs[] = {{w.pitch(), 1, S::kRowBytes},
                                             {4, 2 * w.pitch(), 4},
                                             {2, w.pitch(), 2},
                                             {p.deep / 8, 8 * w.pitch(), S::kDeep / 8}};
  const bool has_codes =
      S::kByTerms ? codes.encode(w.data, by_terms, TensorMap::kNoSwizzle)
                  : codes.encode(w.data, by_outputs, S::kBits == 8 ? TensorMap::kSwizzle128 : TensorMap::kNoSwizzle);
  if (blocks == 0 || !x.encode(p.x, of_x) || !has_codes) return false;
  constexpr int64_t kEndless = 1 << 30;  // of a single group
  const Divisor groups(w.groups == 1 ? kEndless : w.group / (S::kScalesTerms ? 16 : S::kPiece));
  unsigned parts = 1;
  if (S::kIsShared)
    while (parts < S::kMostParts && 2 * parts * tiles <= Gpu().multiprocessors && 2 * parts <= stages) parts *= 2;
  const Grid grid = S::kIsShared ? Grid(parts * tiles).in_clusters(parts) : Grid(blocks);
  return launch(call, kernel, grid, S::kThreads, S::kBytes, p, groups, x, codes), true;
}

// Results that have no tiles for two thirds of the multiprocessors are shared.
template <int kBits, bool kIsExact, Layout kLayout>
bool launch_wgmma(Call& call, const Products<Half>& p) {
  using Wide = WgmmaShape<kBits, kIsExact, Tiling::kWide, kLayout>;
  using Tall = WgmmaShape<kBits, kIsExact, Tiling::kTall, kLayout>;
  using Shared = WgmmaShape<kBits, kIsExact, Tiling::kShared, kLayout>;
  using LowShared = WgmmaShape<kBits, kIsExact, Tiling::kLowShared, kLayout>;
  const auto are_enough = [](int64_t tiles) { return 3 * tiles > 2 * Gpu().multiprocessors; };
  if (p.tokens > (kLayout == Layout::kTerms ? 256 : 64) && are_enough(WgmmaTiles<Wide>::count(p)))
    return launch_wgmma<Wide>(call, p);
  if constexpr (kLayout == Layout::kTerms)
    if (p.tokens > 64 && are_enough(WgmmaTiles<Tall>::count(p))) return launch_wgmma<Tall>(call, p);
  return p.tokens > 64 ? launch_wgmma<Shared>(call, p) : launch_wgmma<LowShared>(call, p);
}
template <int kBits, bool kIsExact>
bool launch_wgmma(Call& call, const Products<Half>& p) {
  if (p.by_terms) return launch_wgmma<kBits, kIsExact, Layout::kTerms>(call, p);
  return p.weights.groups_rows ? launch_wgmma<kBits, kIsExact, Layout::kOutputs>(call, p)
                               : launch_wgmma<kBits, kIsExact, Layout::kScaledTerms>(call, p);
}

// Tells whether rows are whole packs, and groups whole pieces.
inline bool have_wgmma_layout(const Products<Half>& p) {
  const Codes<Half>& w = p.weights;
  return !(p.by_terms && w.groups_rows) && p.deep > 0 && (w.groups == 1 || w.group % 32 == 0) &&
         !(w.table && w.bits == 8) && std::max({p.tokens, p.deep, p.outputs}) <= INT32_MAX / 2 && w.have_rows_at(16) &&
         product::has_packs(p.x, p.deep) && product::has_packs(p.out, p.outputs);
}
inline bool is_exact(const Codes<Half>& w) {
  return !w.scale.are_float && w.zero.kind != ZeroPoints<Half>::kFloating && !w.table;
}

// Returns false, and launches nothing, if the GPU lacks the instructions, or rows are not whole packs.
inline bool multiply_by_wgmma(Call& call, const Products<Half>& p) {
  if (!have_wgmma_layout(p)) return false;
  if (p.weights.bits == 4)
    return is_exact(p.weights) ? launch_wgmma<4, true>(call, p) : launch_wgmma<4, false>(call, p);
  return is_exact(p.weights) ? launch_wgmma<8, true>(call, p) : launch_wgmma<8, false>(call, p);
}

// Does so for up to 64 tokens, and codes by terms with scales of float16 and whole zero points. A library that calls
// nothing else of this file compiles two kernels.
inline bool multiply_low_by_wgmma(Call& call, const Products<Half>& p) {
  if (p.tokens > 64 || !p.by_terms || !is_exact(p.weights) || !have_wgmma_layout(p)) return false;
  return p.weights.bits == 4 ? launch_wgmma<WgmmaShape<4, true, Tiling::kLowShared, Layout::kTerms>>(call, p)
                             : launch_wgmma<WgmmaShape<8, true, Tiling::kLowShared, Layout::kTerms>>(call, p);
}

#else
inline bool multiply_by_wgmma(Call&, const Products<Half>&) { return false; }
inline bool multiply_low_by_wgmma(Call&, const Products<Half>&) { return false; }
#endif

}  // namespace msops::weight_quant_matmul

#endif
