// Products of float16 by wgmma on sm_90a, where all rows are whole packs of 16 bytes.
//
// Two blocks, a cluster, go through tiles of a result together; each computes half of a tile's columns. One warp finds
// the tiles' places, one after another, and a thread of another one copies the factors by TMA into a ring of stages.
// Both blocks need the tile's rows: each reads half of them, and TMA writes them to both. The two other warpgroups take
// the tile's rows by 64 in turn, and leave out those that the tile lacks. Each sum is over the same instructions
// wherever its row is.
#pragma once

#include "../shared/product/wgmma_tiles.h"
#include "mma.h"

#ifdef __CUDACC__

#include "../common/gpu/cluster.h"
#include "../common/gpu/griddepcontrol.h"
#include "../common/gpu/ldmatrix.h"

namespace msops::grouped_matmul {

#if CUDART_VERSION >= 12000

// kRows and kTransposedRows are RowProducts with a weight that is not, or is, transposed.
enum class Kind { kRows, kTransposedRows, kWeights };

template <Kind kKind_, int kRows_ = 2 * kTileRows>
struct WgmmaShape {
  static constexpr Kind kKind = kKind_;
  static constexpr int kCluster = 2;                                // blocks
  static constexpr int kRows = kRows_, kColumns = 128, kDeep = 64;  // of a block's tile, and the terms of a stage
  static constexpr int kTileColumns = kColumns * kCluster;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 192 * 1024 / (2 * kDeep * (kRows + kColumns));  // what fits beside the results
  static constexpr int kParts = kRows / 64 / kConsumers;                         // of 64 rows, of a consumer
  static constexpr int kProducerRegisters = 40, kRegisters = 232;
  // TMA copies so many vectors of the left side at once.
  static constexpr int kLeftBox = kKind == Kind::kWeights ? 64 : 32, kLeftBoxBytes = kLeftBox * kDeep * 2;

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
  using Plan = product::Ring<4, product::SharedArray<Place, 1>>;
  using Results = product::Stages<4 * kConsumers, product::SharedTile<16, kColumns>>;  // each is a warp's
  using Memory = product::SharedMemory<Factors, Results, Plan>;
  static constexpr int kBytes = Memory::kBytes;
};

// Rings are the stages in shared memory, and the places of the next tiles, which end with one without rows.
template <typename S>
struct Rings {
  typename S::Memory memory;
  typename S::Factors factors;
  typename S::Plan plan;
  typename S::Results results;

  __device__ __forceinline__ explicit Rings(unsigned char* shared) : memory{shared} {
    memory.take(factors), memory.take(results), memory.take(plan);
  }
  __device__ __forceinline__ void init() const {
    factors.init(4 * S::kConsumers * S::kCluster), plan.init(4 * S::kConsumers + 1);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ Place* planned(unsigned number) const { return memory[plan.tile(number)]; }
  __device__ __forceinline__ void write(unsigned number, const Place& place) const {
    plan.wait_for_room(number);
    *planned(number) = place;
    mbarrier_arrive(plan.full(number));
  }
  // Returns the place of a tile. All threads of a warp call this.
  __device__ __forceinline__ Place read(unsigned number) const {
    plan.wait(number);
    const Place place = *planned(number);
    plan.release(number);
    return place;
  }
  // Tells all blocks of the cluster that a warp no longer uses a stage, which they write to.
  __device__ __forceinline__ void release(unsigned copy) const {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < S::kCluster) mbarrier_arrive_cluster(factors.empty(copy), lane);
  }
};

// Plans the block's tiles. One warp calls this.
template <typename S, typename Products>
__device__ __forceinline__ void plan_tiles(const Products& p, const Rings<S>& rings, int block) {
  const bool is_first = threadIdx.x % 32 == 0;
  unsigned number = 0;
  griddepcontrol_wait();
  const int64_t count = tiles_of<S::kRows, S::kTileColumns>(p);
  for (int64_t i = blockIdx.x / S::kCluster; i < count; i += gridDim.x / S::kCluster) {
    Place place = find_place<S::kRows, S::kTileColumns>(p, i);
    place.column += block * S::kColumns;
    place.columns = limited(place.columns - block * S::kColumns, S::kColumns);  // the last block may have none
    if (is_first) rings.write(number, place);
    __syncwarp();
    ++number;
  }
  if (is_first) rings.write(number, Place{});
}

// Begins to copy a stage: the terms of a tile from number k on. Blocks of a cluster take boxes of its rows in turn.
template <typename S>
__device__ __forceinline__ void copy_stage(const Rings<S>& rings, unsigned copy, const Place& place, int64_t k,
                                           int block, const TensorMap& left, const TensorMap& right) {
  using Stage = typename S::Stage;
  const Stage stage = rings.factors.tile(copy);
  const unsigned full = rings.factors.full(copy);
  const int row = static_cast<int>(place.row), column = static_cast<int>(place.column);
  const int group = static_cast<int>(place.group), term = static_cast<int>(place.first + k);
  const int boxes = (place.rows + S::kLeftBox - 1) / S::kLeftBox;
  rings.factors.wait_for_room(copy);
  mbarrier_arrive_expect_tx(full, boxes * S::kLeftBoxBytes + Stage::Right::kBytes);
  for (int box = block; box < boxes; box += S::kCluster) {
    const unsigned to = stage.left().address + box * S::kLeftBoxBytes;
    const int vector = row + box * S::kLeftBox;
    const int x0 = S::kKind == Kind::kWeights ? vector : term, x1 = S::kKind == Kind::kWeights ? term : vector;
    tma_load_5d_multicast(to, full, left, x0, x1, 0, 0, 0, (1 << S::kCluster) - 1);
  }
  if constexpr (S::kKind == Kind::kTransposedRows) {
    tma_load_5d(stage.right().address, full, right, term, column, group, 0, 0);
  } else {
    const int matrix = S::kKind == Kind::kRows ? group : 0;
    for (int box = 0; box < Stage::Right::kBoxes; ++box)
      tma_load_5d(stage.right().box(box).address, full, right, column + 64 * box, term, matrix, 0, 0);
  }
}

// Copies the factors of the tiles. One warp calls this.
template <typename S>
__device__ __forceinline__ void copy_tiles(const TensorMap& left, const TensorMap& right, const Rings<S>& rings,
                                           int block) {
  const bool is_first = threadIdx.x % 32 == 0;
  unsigned copies = 0;
  for (unsigned number = 0;; ++number) {
    const Place place = rings.read(number);
    if (place.rows == 0) return;
    if (is_first)
      for (int64_t k = 0; k < place.deep; k += S::kDeep) copy_stage(rings, copies++, place, k, block, left, right);
    __syncwarp();
  }
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

template <int kColumns>
using Sums = float[kColumns / 8][4];

// Begins the products of a stage for 64 rows of the tile, as one group; they are added to the sums if `adds`.
template <typename S>
__device__ __forceinline__ void begin_products(Sums<S::kColumns>& sums, const typename S::Stage& stage, int part,
                                               bool adds) {
  const auto left = stage.left();
  const auto right = stage.right();
#pragma unroll
  for (int step = 0; step < S::kDeep / 16; ++step) {
    const int adds_now = step > 0 || adds;
    if constexpr (S::kKind == Kind::kWeights) {
      wgmma_m64n128k16<1, 1>(sums, left.box(part).transposed_rows(step), right.transposed_rows(step), adds_now);
    } else if constexpr (S::kKind == Kind::kRows) {
      wgmma_k16<1>(sums, left.rows(64 * part).columns(step), right.transposed_rows(step), adds_now);
    } else {
      wgmma_k16<0>(sums, left.rows(64 * part).columns(step), right.columns(step), adds_now);
    }
  }
  wgmma_commit_group();
}

// Stores a warp's 16 rows of sums, from a row of the tile on. They go through shared memory, so that half of a warp
// stores a whole row. TMA would keep these stores behind the copies of the next stages.
template <typename S, typename Products>
__device__ __forceinline__ void store_rows(const Products& p, Sums<S::kColumns>& sums, const Place& place, int row,
                                           const Rings<S>& rings) {
  const int lane = threadIdx.x % 32;
  if (p.has_first(place)) {
#pragma unroll
    for (int n = 0; n < S::kColumns / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float first = p.first_of(place, 8 * n + lane % 4 * 2 + j);
        sums[n][j] += first, sums[n][2 + j] += first;
      }
  }
  const auto own = rings.results.tile(threadIdx.x / 32 % (4 * S::kConsumers));
  const unsigned to = own.pack(lane % 16, lane / 16);
  __syncwarp();  // the warp has loaded what was there before
#pragma unroll
  for (int n = 0; n < S::kColumns / 8; n += 2) {
    const uint32_t words[] = {product::pair_of(sums[n][0], sums[n][1]), product::pair_of(sums[n][2], sums[n][3]),
                              product::pair_of(sums[n + 1][0], sums[n + 1][1]),
                              product::pair_of(sums[n + 1][2], sums[n + 1][3])};
    stmatrix_x4(words, (to ^ n % 8 * 16) + n / 8 * own.kBoxBytes);
  }
  __syncwarp();
  const int pack = lane % 16;
  Half* const first = p.to(place) + 8 * pack;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + lane / 16;
    const Pack<Half, 8> values = load<8>(
        reinterpret_cast<const Half*>(rings.memory[product::SharedTile<1, 64>{own.box(pack / 8).pack(r, pack % 8)}]));
    if (row + r < place.rows && 8 * pack < place.columns) store_at_once(first + (row + r) * p.columns, values);
  }
}

// Computes kCount times 64 rows of a tile. A warpgroup calls this; `consumer` is its number.
template <typename S, int kCount, typename Products>
__device__ __forceinline__ void compute_tile(const Products& p, Sums<S::kColumns> (&sums)[S::kParts],
                                             const Place& place, int consumer, unsigned& copies,
                                             const Rings<S>& rings) {
  for (int64_t k = 0; k < place.deep; k += S::kDeep, ++copies) {
    rings.factors.wait(copies);
    const typename S::Stage stage = rings.factors.tile(copies);
    if (S::kKind == Kind::kWeights && place.deep - k < S::kDeep) clear_terms(rings, stage, place.deep - k);
    if constexpr (kCount > 0) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kCount; ++i) begin_products<S>(sums[i], stage, consumer + i * S::kConsumers, k > 0);
      wgmma_wait_group<kCount>();
      if (k > 0) rings.release(copies - 1);
    } else {
      rings.release(copies);
    }
  }
  if constexpr (kCount > 0) {
    const int row = 64 * consumer + threadIdx.x / 32 % 4 * 16;
    const auto store = [&](int i) {
      wgmma_fence_operand(sums[i]);
      store_rows<S>(p, sums[i], place, row + i * 64 * S::kConsumers, rings);
    };
    if constexpr (kCount == 2) wgmma_wait_group<1>(), store(0);  // while the last products are computed
    wgmma_wait_group<0>();
    if (place.deep > 0) rings.release(copies - 1);
    store(kCount - 1);
  }
}

// Computes the tiles. A warpgroup calls this; `consumer` is its number.
template <typename S, typename Products>
__device__ __forceinline__ void compute_tiles(const Products& p, int consumer, const Rings<S>& rings) {
  Sums<S::kColumns> sums[S::kParts];
  unsigned copies = 0;
  for (unsigned number = 0;; ++number) {
    const Place place = rings.read(number);
    if (place.rows == 0) break;
    if (place.deep == 0) {
#pragma unroll
      for (int i = 0; i < S::kParts; ++i)
#pragma unroll
        for (int n = 0; n < S::kColumns / 8; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][n][j] = 0;
    }
    const int count = (place.rows + 63) / 64 - consumer;  // one more than the number of the last part, in turn
    if (count > S::kConsumers) {
      compute_tile<S, S::kParts>(p, sums, place, consumer, copies, rings);
    } else if (count > 0) {
      compute_tile<S, 1>(p, sums, place, consumer, copies, rings);
    } else {
      compute_tile<S, 0>(p, sums, place, consumer, copies, rings);
    }
  }
}

template <typename S, typename Products>
__device__ __forceinline__ void multiply_by_wgmma(const Products& p, const TensorMap& left, const TensorMap& right) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings<S> rings(shared);
  if (threadIdx.x == 0) rings.init();
  __syncthreads();
  cluster_arrive_wait();  // before a block writes to another one
  const int block = static_cast<int>(cluster_ctarank());
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x < 32) {
      copy_tiles<S>(left, right, rings, block);
    } else if (threadIdx.x < 64) {
      plan_tiles<S>(p, rings, block);
    }
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    compute_tiles<S>(p, consumer, rings);
  }
  __syncwarp();
  cluster_arrive_wait();  // a block may write to another one until then
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
  const int64_t tiles = most_tiles<S::kRows, S::kTileColumns>(p);
  if (product::wgmma_blocks<S>(kernel, tiles) == 0) return false;
  [[maybe_unused]] static FactOfGpu<> fact;
  const Grid one = Grid(S::kCluster).in_clusters(S::kCluster);
  const int64_t at_once = fact.get([&] { return clusters_at_once(kernel, one, S::kThreads, S::kBytes); });
  if (at_once == 0) return false;
  Grid grid = one;
  grid.x *= std::min(tiles, at_once);
  if (S::kKind != Kind::kWeights) grid = grid.programmatic();
  launch(call, kernel, grid, S::kThreads, S::kBytes, p, left, right);
  return true;
}

template <int kRows>
bool multiply_rows(Call& call, const RowProducts<Half>& p) {
  using S = WgmmaShape<Kind::kRows, kRows>;
  TensorMap left, right;
  const int64_t matrix = p.deep * p.columns;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, S::kDeep}, {p.groups.rows, p.deep, S::kLeftBox}};
  const TensorMap::Dimension of_weight[] = {
      {p.columns, 1, 64}, {p.deep, p.columns, S::kDeep}, {p.groups.count, matrix, 1}};
  const TensorMap::Dimension transposed[] = {
      {p.deep, 1, S::kDeep}, {p.columns, p.deep, S::kColumns}, {p.groups.count, matrix, 1}};
  if (!left.encode(p.x, of_x) || !right.encode(p.weight, p.is_transposed ? transposed : of_weight)) return false;
  return p.is_transposed ? launch_wgmma<WgmmaShape<Kind::kTransposedRows, kRows>>(call, p, left, right)
                         : launch_wgmma<S>(call, p, left, right);
}

// TMA counts in 32 bits.
inline bool fits_tma(std::initializer_list<int64_t> sizes) { return std::max(sizes) <= INT32_MAX / 2; }

// Return false, and launch nothing, if the GPU lacks the instructions or TMA cannot read the tensors.
inline bool multiply_by_wgmma(Call& call, const RowProducts<Half>& p) {
  if (p.groups.count == 0 || p.deep == 0 || !fits_tma({p.groups.count, p.groups.rows, p.deep, p.columns}) ||
      !has_packs(p.x, p.deep) || !has_packs(p.weight, p.columns) || !has_packs(p.out, p.columns))
    return false;
  // Tiles of fewer rows leave room for more stages of the weight.
  const bool has_few_rows = p.groups.rows <= kTileRows * p.groups.count;
  return has_few_rows ? multiply_rows<kTileRows>(call, p) : multiply_rows<2 * kTileRows>(call, p);
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
