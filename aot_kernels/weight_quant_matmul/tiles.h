// Products of float16 and float32 on the tensor cores of sm_80 and later (mma.sync), for any number of rows of any
// alignment. Codes are widened on their way to shared memory: while a tile is multiplied, the next one's codes are on
// their way to registers.
#pragma once

#include "../shared/product/mma_sides.h"
#include "widener.h"

#ifdef __CUDACC__

#include "../common/launch.h"

namespace msops::weight_quant_matmul {

// A block of eight warps takes a tile of 128 x 128 sums; a warp takes 64 x 32 of them. Shared memory has kStages
// stages of kDeep terms of both sides.
template <typename T_>
struct TileShape {
  using T = T_;
  static constexpr int kSide = 128, kDeep = 128 / static_cast<int>(sizeof(T)), kStages = 3, kThreads = 256;
  static constexpr int kM = 4, kN = 4, kRows = 16 * kM, kColumns = 8 * kN;  // of a warp
  static constexpr int kElements = kSide * kDeep, kBytes = 2 * kStages * kElements * static_cast<int>(sizeof(T));

  template <bool kByTerms>
  static __device__ __forceinline__ T* at(T* tile, int row, int column) {
    using Tile = product::MmaTile<T, kByTerms ? kDeep : kSide>;
    return Tile::at(tile, row, column);
  }
};

struct Aligned {
  bool x, out;  // rows may be read, or written, by packs
};

template <typename S, bool kByTerms>
__device__ __forceinline__ void multiply_tiles(const Products<typename S::T>& p, const Runs& runs,
                                               const Aligned& aligned) {
  using T = typename S::T;
  using Left = product::MmaSide<S, true>;
  using Right = product::MmaSide<S, kByTerms>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float table[256];
  T* const stages = reinterpret_cast<T*>(shared);
  if (p.weights.table) {
    for (int i = threadIdx.x; i < 1 << p.weights.bits; i += S::kThreads) table[i] = p.weights.table[i];
    __syncthreads();
  }
  const int64_t down = (p.tokens + S::kSide - 1) / S::kSide;  // neighbouring blocks share codes
  const int64_t token = blockIdx.x % down * S::kSide, output = blockIdx.x / down * S::kSide;
  const int rows = static_cast<int>(p.tokens - token < S::kSide ? p.tokens - token : S::kSide);
  const int columns = static_cast<int>(p.outputs - output < S::kSide ? p.outputs - output : S::kSide);
  const product::Vectors<T> left{p.x + token * p.deep, p.deep, 1};
  const int64_t tiles = (p.deep + S::kDeep - 1) / S::kDeep;
  Widener<S, kByTerms> widener{p.weights, runs, p.weights.table ? table : nullptr, static_cast<int>(threadIdx.x)};
  const auto left_tile = [&](int64_t i) { return stages + i % S::kStages * 2 * S::kElements; };
  const auto right_tile = [&](int64_t i) { return left_tile(i) + S::kElements; };
  const auto begin_copy = [&](int64_t i) {
    const int64_t k = i * S::kDeep;
    if (i < tiles) Left::load(left_tile(i), left.from(0, k), rows, p.deep - k, aligned.x);
    cp_async_commit();
  };
  const auto load_codes = [&](int64_t i) {
    kByTerms ? widener.load(output, i * S::kDeep) : widener.load(i * S::kDeep, output);
  };

  const int warp = threadIdx.x / 32, row = warp / 4 * S::kRows, part = warp % 4;
  float sums[S::kM][S::kN][4];
  product::for_sums<S::kM, S::kN>([&](int m, int n, int i, int, int column) {
    const int at = part * S::kColumns + column;
    sums[m][n][i] = at < columns ? p.bias[output + at] : 0.f;
  });
  for (int i = 0; i < S::kStages - 1; ++i) begin_copy(i);
  if (tiles > 0) load_codes(0), widener.store(right_tile(0));
  for (int64_t i = 0; i < tiles; ++i) {
    cp_async_wait<S::kStages - 2>();
    __syncthreads();
    begin_copy(i + S::kStages - 1);
    if (i + 1 < tiles) load_codes(i + 1);
    if (row < rows)
      product::add_products<S, Left, Right>(sums, Left::left(left_tile(i), row),
                                            Right::right(right_tile(i), part * S::kColumns));
    if (i + 1 < tiles) widener.store(right_tile(i + 1));
  }
  cp_async_wait<0>();
  __syncthreads();
  const product::TileRows<T> to{p.out + token * p.outputs + output, p.outputs, columns, aligned.out};
  product::store_rows<S::kSide>(sums, stages + row * S::kSide, to, row, rows, part, [](int, int) { return 1.f; });
}

template <typename S, bool kByTerms>
__global__ void __launch_bounds__(S::kThreads)
    tile_kernel(const __grid_constant__ Products<typename S::T> p, const __grid_constant__ Runs runs,
                const __grid_constant__ Aligned aligned) {
  if (has_instructions_of(80)) multiply_tiles<S, kByTerms>(p, runs, aligned);
}

template <bool kByTerms, typename T>
bool launch_tiles(Call& call, const Products<T>& p) {
  using S = TileShape<T>;
  const auto kernel = tile_kernel<S, kByTerms>;
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < S::kBytes) return false;
  const int64_t down = (p.tokens + S::kSide - 1) / S::kSide, across = (p.outputs + S::kSide - 1) / S::kSide;
  const Aligned aligned{product::has_packs(p.x, p.deep), product::has_packs(p.out, p.outputs)};
  launch(call, kernel, down * across, S::kThreads, S::kBytes, p, Runs(p.weights), aligned);
  return true;
}

// Returns false, and launches nothing, if the GPU lacks the instructions.
template <typename T>
bool multiply_tiles(Call& call, const Products<T>& p) {
  return p.by_terms ? launch_tiles<true>(call, p) : launch_tiles<false>(call, p);
}

}  // namespace msops::weight_quant_matmul

#endif
