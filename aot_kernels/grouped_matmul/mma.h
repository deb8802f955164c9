// Products of float16 and float32 on the tensor cores of sm_80 and later (mma.sync), of rows of any alignment.
#pragma once

#include "../shared/product/mma_sides.h"
#include "places.h"

#ifdef __CUDACC__

namespace msops::grouped_matmul {

using product::has_packs;
using product::MmaSide;

// A block of eight warps takes a tile of 128 x 128 sums; a warp takes 64 x 32 of them. Shared memory has kStages
// stages of kDeep terms of both sides.
template <typename T_>
struct MmaShape {
  using T = T_;
  static constexpr int kSide = kTileRows, kDeep = 128 / static_cast<int>(sizeof(T)), kStages = 3, kThreads = 256;
  static constexpr int kM = 4, kN = 4, kRows = 16 * kM, kColumns = 8 * kN;  // of a warp
  static constexpr int kElements = kSide * kDeep, kBytes = 2 * kStages * kElements * static_cast<int>(sizeof(T));
};

// Rows of the left side, the right side and the result may each begin at multiples of 16 bytes, and have whole packs.
struct Aligned {
  bool left, right, out;
};

template <typename S, bool kLeftByTerms, bool kRightByTerms, typename Products>
__device__ __forceinline__ void multiply_by_mma(const Products& p, const Aligned& aligned) {
  using T = typename S::T;
  using Left = MmaSide<S, kLeftByTerms>;
  using Right = MmaSide<S, kRightByTerms>;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const stages = reinterpret_cast<T*>(shared);
  const Place place = find_place<kTileRows, S::kSide>(p, blockIdx.x);
  if (place.rows == 0) return;
  const Vectors<T> left = p.left(place), right = p.right(place);
  const int64_t tiles = parts(place.deep, S::kDeep);
  const auto left_tile = [&](int64_t i) { return stages + i % S::kStages * 2 * S::kElements; };
  const auto begin_copy = [&](int64_t i) {
    if (i < tiles) {
      const int64_t k = i * S::kDeep;
      Left::load(left_tile(i), left.from(0, k), place.rows, place.deep - k, aligned.left);
      Right::load(left_tile(i) + S::kElements, right.from(0, k), place.columns, place.deep - k, aligned.right);
    }
    cp_async_commit();
  };

  const int warp = threadIdx.x / 32, row = warp / 4 * S::kRows, part = warp % 4;
  float sums[S::kM][S::kN][4];
  product::for_sums<S::kM, S::kN>(
      [&](int m, int n, int i, int, int column) { sums[m][n][i] = p.first_of(place, part * S::kColumns + column); });
  for (int i = 0; i < S::kStages - 1; ++i) begin_copy(i);
  for (int64_t i = 0; i < tiles; ++i) {
    cp_async_wait<S::kStages - 2>();
    __syncthreads();
    begin_copy(i + S::kStages - 1);
    if (row >= place.rows) continue;  // the warp has no sums that are stored
    product::add_products<S, Left, Right>(sums, Left::left(left_tile(i), row),
                                          Right::right(left_tile(i) + S::kElements, part * S::kColumns));
  }
  cp_async_wait<0>();
  __syncthreads();
  const product::TileRows<T> to{p.to(place), p.columns, place.columns, aligned.out};
  product::store_rows<S::kSide>(sums, stages + row * S::kSide, to, row, place.rows, part, [](int, int) { return 1.f; });
}

template <typename S, bool kLeftByTerms, bool kRightByTerms, typename Products>
__global__ void __launch_bounds__(S::kThreads)
    mma_kernel(const __grid_constant__ Products p, const __grid_constant__ Aligned aligned) {
  if (has_instructions_of(80)) multiply_by_mma<S, kLeftByTerms, kRightByTerms>(p, aligned);
}

template <bool kLeftByTerms, bool kRightByTerms, typename T, template <typename> class Products>
bool launch_mma(Call& call, const Products<T>& p, const Aligned& aligned) {
  using S = MmaShape<T>;
  const auto kernel = mma_kernel<S, kLeftByTerms, kRightByTerms, Products<T>>;
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < S::kBytes) return false;
  launch(call, kernel, most_tiles<kTileRows, S::kSide>(p), S::kThreads, S::kBytes, p, aligned);
  return true;
}

// Return false, and launch nothing, if the GPU lacks the instructions.
template <typename T>
bool multiply_by_mma(Call& call, const RowProducts<T>& p) {
  const Aligned aligned{has_packs(p.x, p.deep), has_packs(p.weight, p.is_transposed ? p.deep : p.columns),
                        has_packs(p.out, p.columns)};
  return p.is_transposed ? launch_mma<true, true>(call, p, aligned) : launch_mma<true, false>(call, p, aligned);
}
template <typename T>
bool multiply_by_mma(Call& call, const WeightProducts<T>& p) {
  return launch_mma<false, false>(call, p,
                                  {has_packs(p.a, p.height), has_packs(p.b, p.columns), has_packs(p.out, p.columns)});
}

}  // namespace msops::grouped_matmul

#endif
