// Products of float16 by wgmma on sm_90a, for weights whose outputs lie close together, where the rows of x and of the
// result are whole packs of 16 bytes.
//
// A block goes through tiles of the result. The first warpgroup fills a ring of stages: it widens codes, and one thread
// copies x by TMA. Each of the two other warpgroups computes half of a tile's rows. A code is widened once for kRows
// rows, so that these are the longer side of a tile.
#pragma once

#include "../shared/product/wgmma_tiles.h"
#include "tiles.h"

#ifdef __CUDACC__

namespace msops::weight_quant_matmul {

#if CUDART_VERSION >= 12000

template <int kM_>
struct WgmmaShape {
  using T = Half;
  static constexpr bool kOnlyWholeRuns = true;
  static constexpr int kConsumers = 2, kM = kM_;  // a consumer has kM times 64 rows
  static constexpr int kRows = 64 * kM * kConsumers, kColumns = 128, kSide = kColumns, kDeep = 64;
  static constexpr int kWideners = 128, kThreads = 128 * (kConsumers + 1), kStages = 4;
  static constexpr int kProducerRegisters = 88, kRegisters = 208;

  // A Stage has the factors of a tile. Rows of the right one are terms.
  struct Stage {
    using Element = unsigned char;
    using Left = product::SharedTile<kRows, kDeep>;
    using Right = product::SharedTile<kDeep, kColumns>;
    static constexpr int kBytes = Left::kBytes + Right::kBytes;
    unsigned address;

    __device__ __forceinline__ Left left() const { return {address}; }
    __device__ __forceinline__ Right right() const { return {address + Left::kBytes}; }
  };
  using Factors = product::Ring<kStages, Stage>;
  using Memory = product::SharedMemory<Factors>;
  static constexpr int kTableBytes = 1024, kBytes = Memory::kBytes + kTableBytes;

  // Returns where an element of the right factor is.
  template <bool>  // is false
  static __device__ __forceinline__ Half* at(Half* tile, int row, int column) {
    return tile + column / 64 * Stage::Right::kRows * 64 + row * 64 + (column % 64 / 8 ^ row % 8) * 8 + column % 8;
  }
};

template <typename S>
int64_t tiles_of(const Products<Half>& p) {
  return (p.tokens + S::kRows - 1) / S::kRows * ((p.outputs + S::kColumns - 1) / S::kColumns);
}

// Tiles of neighbouring blocks share codes. A block computes several, one after another.
template <typename S>
struct BlockTiles {
  const Products<Half>& p;

  __device__ __forceinline__ int64_t down() const { return (p.tokens + S::kRows - 1) / S::kRows; }
  __device__ __forceinline__ int64_t count() const { return down() * ((p.outputs + S::kColumns - 1) / S::kColumns); }
  __device__ __forceinline__ int64_t token(int64_t tile) const { return tile % down() * S::kRows; }
  __device__ __forceinline__ int64_t output(int64_t tile) const { return tile / down() * S::kColumns; }
};

// Fills stages. The first warpgroup calls this.
template <typename S>
__device__ __forceinline__ void fill_stages(const Products<Half>& p, const Runs& runs, const TensorMap& x,
                                            const typename S::Memory& memory, const typename S::Factors& factors,
                                            const float* table) {
  const BlockTiles<S> tiles{p};
  const int64_t count = tiles.count();
  Widener<S, false> widener{p.weights, runs, p.weights.table ? table : nullptr, static_cast<int>(threadIdx.x)};
  const auto load = [&](int64_t tile, int64_t k) {
    if (tile < count) widener.load(k, tiles.output(tile));
  };
  load(blockIdx.x, 0);
  unsigned copy = 0;
  for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x)
    for (int64_t k = 0; k < p.deep; k += S::kDeep, ++copy) {
      factors.wait_for_room(copy);
      const typename S::Stage stage = factors.tile(copy);
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(factors.full(copy), S::Stage::Left::kBytes);
        tma_load_5d(stage.left().address, factors.full(copy), x, static_cast<int>(k),
                    static_cast<int>(tiles.token(tile)), 0, 0, 0);
      }
      widener.store(reinterpret_cast<Half*>(memory[stage.right()]));
      const bool is_last = k + S::kDeep >= p.deep;  // the next codes arrive while the others are multiplied
      load(is_last ? tile + gridDim.x : tile, is_last ? 0 : k + S::kDeep);
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(factors.full(copy));
    }
}

template <int kM, int kN>
__device__ __forceinline__ void add_bias(float (&sums)[kM][kN][4], const OptionalNumbers<Half>& bias, int64_t output,
                                         int columns) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = 8 * n + threadIdx.x % 4 * 2 + j;
      const float number = column < columns ? bias[output + column] : 0.f;
#pragma unroll
      for (int m = 0; m < kM; ++m) sums[m][n][j] += number, sums[m][n][2 + j] += number;
    }
}

// Computes the tiles. A warpgroup calls this; `consumer` is its number.
template <typename S>
__device__ __forceinline__ void multiply_stages(const Products<Half>& p, int consumer,
                                                const typename S::Factors& factors) {
  const BlockTiles<S> tiles{p};
  float sums[S::kM][S::kColumns / 8][4];
  unsigned copy = 0;
  for (int64_t tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    const int64_t token = tiles.token(tile), output = tiles.output(tile);
    for (int64_t k = 0; k < p.deep; k += S::kDeep, ++copy) {
      factors.wait(copy);
      const typename S::Stage stage = factors.tile(copy);
      const auto left = stage.left();
      const auto right = stage.right();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < S::kDeep / 16; ++step)
#pragma unroll
        for (int m = 0; m < S::kM; ++m) {
          const int adds = k > 0 || step > 0;
          const uint64_t a = left.rows(64 * (S::kM * consumer + m)).columns(step);
          wgmma_k16<1>(sums[m], a, right.transposed_rows(step), adds);
        }
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (k > 0) factors.release(copy - 1);
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int m = 0; m < S::kM; ++m) wgmma_fence_operand(sums[m]);
    factors.release(copy - 1);
    const int rows = static_cast<int>(p.tokens - token < S::kRows ? p.tokens - token : S::kRows);
    const int columns = static_cast<int>(p.outputs - output < S::kColumns ? p.outputs - output : S::kColumns);
    if (p.bias.data) add_bias(sums, p.bias, output, columns);
    const product::TileRows<Half> to{p.out + token * p.outputs + output, p.outputs, columns, true};
#pragma unroll
    for (int m = 0; m < S::kM; ++m)
      product::store_aligned(sums[m], {1.f, 1.f}, to, 64 * (S::kM * consumer + m) + threadIdx.x / 32 % 4 * 16, rows);
  }
}

template <typename S>
__device__ __forceinline__ void multiply_by_wgmma(const Products<Half>& p, const Runs& runs, const TensorMap& x) {
  extern __shared__ __align__(1024) unsigned char shared[];
  typename S::Memory memory{shared};
  typename S::Factors factors;
  memory.take(factors);
  float* const table = reinterpret_cast<float*>(shared + S::Memory::kBytes);
  if (threadIdx.x == 0) {
    factors.init(4 * S::kConsumers, 1 + S::kWideners / 32);
    fence_mbarrier_init();
  }
  if (p.weights.table)
    for (int i = threadIdx.x; i < 1 << p.weights.bits; i += S::kThreads) table[i] = p.weights.table[i];
  __syncthreads();
  if (threadIdx.x < S::kWideners) {
    setmaxnreg_dec<S::kProducerRegisters>();
    fill_stages<S>(p, runs, x, memory, factors, table);
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    multiply_stages<S>(p, consumer, factors);
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ Runs runs,
                 const __grid_constant__ TensorMap x) {
  if constexpr (kHasSm90a) multiply_by_wgmma<S>(p, runs, x);
}

template <int kM>
bool launch_wgmma(Call& call, const Products<Half>& p, const Runs& runs, const TensorMap& x) {
  using S = WgmmaShape<kM>;
  const auto kernel = wgmma_kernel<S>;
  const int64_t blocks = product::wgmma_blocks<S>(kernel, tiles_of<S>(p));
  if (blocks > 0) launch(call, kernel, blocks, S::kThreads, S::kBytes, p, runs, x);
  return blocks > 0;
}

// Higher tiles are for results where they are enough for all multiprocessors.
inline bool launch_wgmma(Call& call, const Products<Half>& p, const Runs& runs) {
  using Low = WgmmaShape<1>;
  using High = WgmmaShape<2>;
  const bool is_high = tiles_of<High>(p) >= Gpu().multiprocessors;
  TensorMap x;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, Low::kDeep}, {p.tokens, p.deep, is_high ? High::kRows : Low::kRows}};
  if (!x.encode(p.x, of_x)) return false;
  return is_high ? launch_wgmma<2>(call, p, runs, x) : launch_wgmma<1>(call, p, runs, x);
}

// Returns false, and launches nothing, if the GPU lacks the instructions, or TMA cannot read x, or codes have no whole
// runs.
inline bool multiply_by_wgmma(Call& call, const Products<Half>& p) {
  const Runs runs(p.weights);
  if (p.by_terms || !runs.are_whole || p.deep == 0 || std::max({p.tokens, p.deep, p.outputs}) > INT32_MAX / 2 ||
      !product::has_packs(p.x, p.deep) || !product::has_packs(p.out, p.outputs))
    return false;
  return launch_wgmma(call, p, runs);
}

#else
inline bool multiply_by_wgmma(Call&, const Products<Half>&) { return false; }
#endif

}  // namespace msops::weight_quant_matmul

#endif
