// Products of float16 by wgmma on sm_90a, where all rows are whole packs of 16 bytes.
//
// A block goes through tiles of a result. The first warp finds their places, one after another, and one thread of it
// copies the factors by TMA into a ring of stages. Each of the two other warpgroups computes half of a tile's rows.
#pragma once

#include "../shared/product/wgmma_tiles.h"
#include "mma.h"

#ifdef __CUDACC__

namespace msops::grouped_matmul {

#if CUDART_VERSION >= 12000

// kRows and kTransposedRows are RowProducts with a weight that is not, or is, transposed.
enum class Kind { kRows, kTransposedRows, kWeights };

template <Kind kKind_>
struct WgmmaShape {
  static constexpr Kind kKind = kKind_;
  static constexpr int kRows = kTileRows, kColumns = 256, kDeep = 64;  // of a tile, and the terms of a stage
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kStages = 4;
  static constexpr int kProducerRegisters = 40, kRegisters = 232;

  // A Stage has the factors of a tile. Rows are vectors if the terms lie close together, else they are terms.
  struct Stage {
    using Element = unsigned char;
    using Left = std::conditional_t<kKind == Kind::kWeights, product::SharedTile<kDeep, kRows>,
                                    product::SharedTile<kRows, kDeep>>;
    using Right = std::conditional_t<kKind == Kind::kTransposedRows, product::SharedTile<kColumns, kDeep>,
                                     product::SharedTile<kDeep, kColumns>>;
    static constexpr int kBytes = Left::kBytes + Right::kBytes;
    unsigned address;

    __device__ __forceinline__ Left left() const { return {address}; }
    __device__ __forceinline__ Right right() const { return {address + Left::kBytes}; }
  };
  using Factors = product::Ring<kStages, Stage>;
  using Plan = product::Ring<2, product::SharedArray<Place, 1>>;
  using Memory = product::SharedMemory<Factors, Plan>;
  static constexpr int kBytes = Memory::kBytes;
};

// Rings are the stages in shared memory, and the places of the next tiles, which end with one without rows.
template <typename S>
struct Rings {
  typename S::Memory memory;
  typename S::Factors factors;
  typename S::Plan plan;

  __device__ __forceinline__ explicit Rings(unsigned char* shared) : memory{shared} {
    memory.take(factors), memory.take(plan);
  }
  __device__ __forceinline__ void init() const {
    factors.init(4 * S::kConsumers), plan.init(4 * S::kConsumers);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ Place* planned(unsigned number) const { return memory[plan.tile(number)]; }
  __device__ __forceinline__ void write(unsigned number, const Place& place) const {
    plan.wait_for_room(number);
    *planned(number) = place;
    mbarrier_arrive(plan.full(number));
  }
};

// Begins to copy a stage: the terms of a tile from number k on.
template <typename S>
__device__ __forceinline__ void copy_stage(const Rings<S>& rings, unsigned copy, const Place& place, int64_t k,
                                           const TensorMap& left, const TensorMap& right) {
  using Stage = typename S::Stage;
  const Stage stage = rings.factors.tile(copy);
  const unsigned full = rings.factors.full(copy);
  const int row = static_cast<int>(place.row), column = static_cast<int>(place.column);
  const int group = static_cast<int>(place.group), term = static_cast<int>(place.first + k);
  rings.factors.wait_for_room(copy);
  mbarrier_arrive_expect_tx(full, Stage::kBytes);
  if constexpr (S::kKind == Kind::kWeights) {
    for (int box = 0; box < Stage::Left::kBoxes; ++box)
      tma_load_5d(stage.left().box(box).address, full, left, row + 64 * box, term, 0, 0, 0);
  } else {
    tma_load_5d(stage.left().address, full, left, term, row, 0, 0, 0);
  }
  if constexpr (S::kKind == Kind::kTransposedRows) {
    tma_load_5d(stage.right().address, full, right, term, column, group, 0, 0);
  } else {
    const int matrix = S::kKind == Kind::kRows ? group : 0;
    for (int box = 0; box < Stage::Right::kBoxes; ++box)
      tma_load_5d(stage.right().box(box).address, full, right, column + 64 * box, term, matrix, 0, 0);
  }
}

// Plans the block's tiles, and copies their factors. One warp calls this.
template <typename S, typename Products>
__device__ __forceinline__ void copy_tiles(const Products& p, const TensorMap& left, const TensorMap& right,
                                           const Rings<S>& rings) {
  const bool is_first = threadIdx.x % 32 == 0;
  const int64_t count = order_of<S::kColumns>(p).count();
  unsigned number = 0, copies = 0;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const Place place = find_place<S::kColumns>(p, i);
    if (is_first) {
      rings.write(number, place);
      for (int64_t k = 0; k < place.deep; k += S::kDeep) copy_stage(rings, copies++, place, k, left, right);
    }
    __syncwarp();
    ++number;
  }
  if (is_first) rings.write(number, Place{});
}

// Sets a stage's terms from `inside` on to 0, on both sides: they are of other groups, and may be anything. All
// consumers call this.
template <typename S>
__device__ __forceinline__ void clear_terms(const Rings<S>& rings, const typename S::Stage& stage, int64_t inside) {
  constexpr int kThreads = 128 * S::kConsumers;
  for (int i = threadIdx.x % kThreads; i < S::Stage::kBytes / 16; i += kThreads)
    if (i / 8 % S::kDeep >= inside) *reinterpret_cast<uint4*>(rings.memory[stage] + i * 16) = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  bar_sync(1, kThreads);
}

// Begins a group of products of a stage, for 64 rows of the tile.
template <typename S, int kN>
__device__ __forceinline__ void begin_products(float (&sums)[kN][4], const typename S::Stage& stage, int consumer) {
  const auto left = stage.left();
  const auto right = stage.right();
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::kDeep / 16; ++step) {
    if constexpr (S::kKind == Kind::kWeights) {
      wgmma_m64n256k16<1, 1>(sums, left.box(consumer).transposed_rows(step), right.transposed_rows(step), 1);
    } else if constexpr (S::kKind == Kind::kRows) {
      wgmma_k16<1>(sums, left.rows(64 * consumer).columns(step), right.transposed_rows(step), 1);
    } else {
      wgmma_k16<0>(sums, left.rows(64 * consumer).columns(step), right.columns(step), 1);
    }
  }
  wgmma_commit_group();
}

// Computes the tiles. A warpgroup calls this; `consumer` is its number.
template <typename S, typename Products>
__device__ __forceinline__ void compute_tiles(const Products& p, int consumer, const Rings<S>& rings) {
  float sums[S::kColumns / 8][4];
  unsigned copies = 0;
  for (unsigned number = 0;; ++number) {
    rings.plan.wait(number);
    const Place place = *rings.planned(number);
    rings.plan.release(number);
    if (place.rows == 0) return;
#pragma unroll
    for (int n = 0; n < S::kColumns / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) sums[n][j] = sums[n][2 + j] = p.first_of(place, 8 * n + threadIdx.x % 4 * 2 + j);
    for (int64_t k = 0; k < place.deep; k += S::kDeep, ++copies) {
      rings.factors.wait(copies);
      const typename S::Stage stage = rings.factors.tile(copies);
      if (S::kKind == Kind::kWeights && place.deep - k < S::kDeep) clear_terms(rings, stage, place.deep - k);
      begin_products<S>(sums, stage, consumer);
      wgmma_wait_group<1>();
      if (k > 0) rings.factors.release(copies - 1);
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    if (place.deep > 0) rings.factors.release(copies - 1);
    const product::TileRows<Half> to{p.to(place), p.columns, place.columns, true};
    product::store_aligned(sums, {1.f, 1.f}, to, 64 * consumer + threadIdx.x / 32 % 4 * 16, place.rows);
  }
}

template <typename S, typename Products>
__device__ __forceinline__ void multiply_by_wgmma(const Products& p, const TensorMap& left, const TensorMap& right) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings<S> rings(shared);
  if (threadIdx.x == 0) rings.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x < 32) copy_tiles<S>(p, left, right, rings);
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    compute_tiles<S>(p, consumer, rings);
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S, typename Products>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_kernel(const __grid_constant__ Products p, const __grid_constant__ TensorMap left,
                 const __grid_constant__ TensorMap right) {
  if constexpr (kHasSm90a) multiply_by_wgmma<S>(p, left, right);
}

template <typename S, typename Products>
bool launch_wgmma(Call& call, const Products& p, const TensorMap& left, const TensorMap& right) {
  const auto kernel = wgmma_kernel<S, Products>;
  const int64_t blocks = product::wgmma_blocks<S>(kernel, most_tiles<S::kColumns>(p));
  if (blocks > 0) launch(call, kernel, blocks, S::kThreads, S::kBytes, p, left, right);
  return blocks > 0;
}

// TMA counts in 32 bits.
inline bool fits_tma(std::initializer_list<int64_t> sizes) { return std::max(sizes) <= INT32_MAX / 2; }

// Return false, and launch nothing, if the GPU lacks the instructions or TMA cannot read the tensors.
inline bool multiply_by_wgmma(Call& call, const RowProducts<Half>& p) {
  using S = WgmmaShape<Kind::kRows>;
  TensorMap left, right;
  const int64_t matrix = p.deep * p.columns;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, S::kDeep}, {p.groups.rows, p.deep, S::kRows}};
  const TensorMap::Dimension of_weight[] = {
      {p.columns, 1, 64}, {p.deep, p.columns, S::kDeep}, {p.groups.count, matrix, 1}};
  const TensorMap::Dimension transposed[] = {
      {p.deep, 1, S::kDeep}, {p.columns, p.deep, S::kColumns}, {p.groups.count, matrix, 1}};
  if (p.groups.count == 0 || p.deep == 0 || !fits_tma({p.groups.count, p.groups.rows, p.deep, p.columns}) ||
      !has_packs(p.x, p.deep) || !has_packs(p.weight, p.columns) || !has_packs(p.out, p.columns) ||
      !left.encode(p.x, of_x) || !right.encode(p.weight, p.is_transposed ? transposed : of_weight))
    return false;
  return p.is_transposed ? launch_wgmma<WgmmaShape<Kind::kTransposedRows>>(call, p, left, right)
                         : launch_wgmma<S>(call, p, left, right);
}
inline bool multiply_by_wgmma(Call& call, const WeightProducts<Half>& p) {
  using S = WgmmaShape<Kind::kWeights>;
  TensorMap left, right;
  const TensorMap::Dimension of_a[] = {{p.height, 1, 64}, {p.groups.rows, p.height, S::kDeep}};
  const TensorMap::Dimension of_b[] = {{p.columns, 1, 64}, {p.groups.rows, p.columns, S::kDeep}};
  if (p.groups.rows == 0 || !fits_tma({p.groups.count, p.groups.rows, p.height, p.columns}) ||
      !has_packs(p.a, p.height) || !has_packs(p.b, p.columns) || !has_packs(p.out, p.columns) ||
      !left.encode(p.a, of_a) || !right.encode(p.b, of_b))
    return false;
  return launch_wgmma<S>(call, p, left, right);
}

#else
template <template <typename> class Products>
bool multiply_by_wgmma(Call&, const Products<Half>&) {
  return false;
}
#endif

}  // namespace msops::grouped_matmul

#endif
