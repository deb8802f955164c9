// This time loop is for float32, also as TF32, on GPUs from sm_90 on. A launch for each round computes the sums of
// tiles of samples and units by tensor cores, and advances the units. The tensor memory accelerator (TMA) brings the
// factors to shared memory, and the blocks of a cluster share the sums of a tile.
#pragma once

#include <cmath>

#include "../common/gpu/cluster.h"
#include "../common/gpu/griddepcontrol.h"
#include "../common/gpu/mbarrier.h"
#include "../common/gpu/tma.h"
#include "steps.h"
#include "tile_sums.h"

namespace msops::lltm {

#if CUDART_VERSION >= 12000  // the first version that knows TMA and wgmma

// Stages finds a block's stages by their number; they take the places in shared memory by turns.
template <typename Tile>
struct Stages {
  unsigned memory;
  int count;

  __device__ __forceinline__ unsigned samples(int i) const { return memory + i % Tile::kStages * Tile::kStageBytes; }
  __device__ __forceinline__ unsigned weights(int i) const { return samples(i) + Tile::kSampleBytes; }
  __device__ __forceinline__ unsigned full(int i) const {
    return memory + Tile::kStages * Tile::kStageBytes + i % Tile::kStages * 16;
  }
  __device__ __forceinline__ unsigned empty(int i) const { return full(i) + 8; }

  // All lanes of the warps that compute sums call these.
  __device__ __forceinline__ void wait(int i) const { mbarrier_wait(full(i), i / Tile::kStages); }
  __device__ __forceinline__ void release(int i) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(i));
  }
};

// The blocks of a cluster share one tile; each has a part of the products' length.
template <typename Tile, typename Loop>
__device__ __forceinline__ void run_tile(const TensorMap& published, const TensorMap& weights,
                                         const Round<4, Loop>& round) {
  constexpr int kDepth = Tile::kDepth, kStages = Tile::kStages, kWorkers = 32 * Tile::kWarps;
  extern __shared__ unsigned char memory[];
  unsigned char* const aligned = memory + (-shared_address(memory) & 1023);

  const int first_unit = blockIdx.x * Tile::kUnits, first_sample = blockIdx.y * Tile::kSamples;
  const int part = blockIdx.z, parts = gridDim.z;
  const int boxes = static_cast<int>((round.loop.hidden + kDepth - 1) / kDepth);  // of a segment
  const int begin = part_begin(Loop::kSegments * boxes, part, parts);
  const int count = part_begin(Loop::kSegments * boxes, part + 1, parts) - begin;
  const Stages<Tile> stages{shared_address(aligned), count};
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(stages.full(i), 1);
      mbarrier_init(stages.empty(i), Tile::kWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_launch_dependents();

  typename Tile::Sums tile_sums;
  if (warp == Tile::kWarps) {
    if (threadIdx.x % 32 == 0) {
      const auto copy_weights = [&](int i) {
        const int segment = (begin + i) / boxes, k = (begin + i) % boxes * kDepth;
        mbarrier_arrive_expect_tx(stages.full(i), Tile::kStageBytes);
        for (int box = 0; box < Tile::kUnits / 32; ++box) {
          const unsigned to = stages.weights(i) + box * Tile::kBoxBytes;
          const int unit = first_unit + box * 32;
          if (Tile::kForward)
            tma_load_5d(to, stages.full(i), weights, k, unit, 0, 0, 0);
          else
            tma_load_5d(to, stages.full(i), weights, unit, 0, 0, k / 8, segment);
        }
      };
      const auto copy_samples = [&](int i) {
        const int segment = (begin + i) / boxes, k = (begin + i) % boxes * kDepth;
        tma_load_5d(stages.samples(i), stages.full(i), published, k, first_sample, segment, 0, 0);
      };
      const int ahead = min(count, kStages);
      for (int i = 0; i < ahead; ++i) copy_weights(i);
      griddepcontrol_wait();
      for (int i = 0; i < ahead; ++i) copy_samples(i);
      for (int i = kStages; i < count; ++i) {
        mbarrier_wait(stages.empty(i), i / kStages - 1);
        copy_weights(i);
        copy_samples(i);
      }
    }
    __syncwarp();
  } else {
    tile_sums.add_all(stages);
  }
  __syncthreads();
  if (warp < Tile::kWarps) tile_sums.store_to(reinterpret_cast<float*>(aligned));
  griddepcontrol_wait();

  // Each block has some of the tile's samples. It reads what they need besides the sums before it waits for the sums.
  const float* const sums = reinterpret_cast<const float*>(aligned);
  const int first_row = part_begin(Tile::kSamples, part, parts);
  constexpr int kPacks = Tile::kUnits / 4, kAtOnce = 2;
  const int packs = (part_begin(Tile::kSamples, part + 1, parts) - first_row) * kPacks;
  typename Round<4, Loop>::Before before[kAtOnce];
  const auto for_packs = [&](int first, const auto& f) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kWorkers + threadIdx.x;
      const int row = first_row + i / kPacks, column = i % kPacks * 4;
      const int64_t sample = first_sample + row, unit = first_unit + column;
      if (warp < Tile::kWarps && i < packs && sample < round.loop.batch && unit < round.loop.hidden)
        f(before[j], row, column, sample, unit);
    }
  };
  for (int first = 0; first < packs; first += kAtOnce * kWorkers) {
    for_packs(first,
              [&](auto& of_pack, int, int, int64_t sample, int64_t unit) { of_pack = round.before(sample, unit); });
    if (first == 0) {
      __syncwarp();
      cluster_arrive_wait();
    }
    for_packs(first, [&](const auto& of_pack, int row, int column, int64_t sample, int64_t unit) {
      float of_units[Loop::kTiles][4] = {};
      const float* const at = sums + row * Tile::kPitch + column / 32 * Tile::kBoxColumns + column % 32;
      for (int other = 0; other < parts; ++other) {
        Pack<float, 4> packs[Loop::kTiles];
        for (int tile = 0; tile < Loop::kTiles; ++tile) packs[tile] = ld_shared_cluster(at + tile * 32, other);
        for (int tile = 0; tile < Loop::kTiles; ++tile)
          for (int j = 0; j < 4; ++j) of_units[tile][j] += packs[tile].values[j];
      }
      round.finish(of_pack, sample, unit, of_units);
    });
  }
  __syncwarp();
  cluster_arrive_wait();  // the other blocks have read this block's sums
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename Tile, typename Loop>
__global__ void __launch_bounds__(Tile::kHasCode ? Tile::kThreads : 1, 1)
    tile_kernel(const __grid_constant__ TensorMap published, const __grid_constant__ TensorMap weights,
                const __grid_constant__ Round<4, Loop> round) {
  if constexpr (Tile::kHasCode) run_tile<Tile>(published, weights, round);
}

// TileLaunch says how the blocks are launched for all rounds.
template <typename Tile, typename Loop>
class TileLaunch {
 public:
  int64_t waves = 0;       // of clusters that run at once; 0: it can't be launched
  double cost = INFINITY;  // of a round, about in us on an H200

  // Takes as many parts of the products' length as are fastest.
  TileLaunch(const Loop& loop, const Gpu& gpu) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel_) != cudaSuccess) return;
    if (attributes.maxThreadsPerBlock < Tile::kThreads || Tile::kSharedBytes > gpu.shared_bytes) return;
    const int64_t tiles[] = {(loop.hidden - 1) / Tile::kUnits + 1, (loop.batch - 1) / Tile::kSamples + 1};
    if (tiles[0] > 65535 || tiles[1] > 65535) return;
    const double stages = static_cast<double>(Loop::kSegments * ((loop.hidden - 1) / Tile::kDepth + 1));
    for (int parts = 1; parts <= 8; ++parts) {
      const Grid grid = Grid(tiles[0], tiles[1], parts).in_clusters(dim3(1, 1, parts));
      const int clusters = clusters_at_once(kernel_, grid, Tile::kThreads, Tile::kSharedBytes);
      if (clusters == 0) continue;
      const int64_t of_parts = (tiles[0] * tiles[1] - 1) / clusters + 1;
      const double cost_of_parts = static_cast<double>(of_parts) * (0.5 * parts + Tile::kStageCost * stages / parts);
      if (cost_of_parts < cost) cost = cost_of_parts, waves = of_parts, grid_ = grid.programmatic();
    }
  }
  void operator()(Call& call, const TensorMap& published, const TensorMap& weights, const Round<4, Loop>& round) const {
    launch(call, kernel_, grid_, Tile::kThreads, Tile::kSharedBytes, published, weights, round);
  }

 private:
  static constexpr auto kernel_ = tile_kernel<Tile, Loop>;
  Grid grid_ = 0;
};

template <typename Tile, typename Loop>
bool run_in_tiles(Call& call, const Loop& loop, float* scratch, const TileLaunch<Tile, Loop>& launch_round) {
  constexpr int kSegments = Loop::kSegments, kDepth = Tile::kDepth;
  const int64_t units = loop.hidden, all = loop.batch * units;
  float* const published[2] = {scratch + 2 * all, scratch + (2 + kSegments) * all};
  TensorMap of_published[2], of_weights;
  bool encoded;
  if constexpr (Tile::kForward) {
    const TensorMap::Dimension unit_rows[] = {{units, 1, kDepth}, {units, units, 32}, {kGates, units * units, kGates}};
    encoded = of_weights.encode(loop.weight, unit_rows);
  } else {
    const TensorMap::Dimension rows[] = {
        {units, 1, 32}, {2, 4 * units, 2}, {4, units, 4}, {units / 8, 8 * units, 4}, {kGates, units * units, 1}};
    encoded = of_weights.encode(loop.weight, rows);
  }
  const TensorMap::Dimension samples[] = {
      {units, 1, kDepth}, {loop.batch, kSegments * units, Tile::kSamples}, {kSegments, units, 1}};
  for (int i = 0; i < 2; ++i) encoded &= of_published[i].encode(published[i], samples);
  if (!encoded) return false;

  Round<4, Loop> body{loop, -1, {scratch, scratch + all}, published[0], Tile::kProduct == Product::kTf32};
  run_round<true>(call, body, nullptr);
  for (body.round = 0; loop.steps > body.round && call.ok(); ++body.round) {
    body.published = published[(body.round + 1) % 2];
    launch_round(call, of_published[body.round % 2], of_weights, body);
  }
  return true;
}

// Runs the loop if the GPU and the alignment allow it and it is faster than cuBLAS on an H200; returns whether it did.
template <Product kProduct, typename Loop>
bool run_in_tiles(Call& call, const Loop& loop, float* scratch, const Gpu& gpu) {
  bool fits = loop.hidden % 8 == 0 && is_aligned<4>(loop.weight) && is_aligned<4>(scratch);
  loop.with_arrays([&](std::initializer_list<const float*> arrays) {
    for (const float* array : arrays) fits &= is_aligned<4>(array);
  });
  if (kProduct == Product::kFloat) {
    const bool narrow = loop.hidden <= 2048;
    fits &= Loop::kTiles != 1
                ? loop.batch >= (narrow ? 16 : 48)
                : loop.batch > 128 || (loop.batch >= 48 && narrow && loop.batch * loop.hidden <= 160 << 10);
  }
  if (!fits) return false;
  const TileLaunch<TileShape<kProduct, 128, Loop>, Loop> large(loop, gpu);
  const TileLaunch<TileShape<kProduct, 64, Loop>, Loop> small(loop, gpu);
  const auto run = [&](const auto& launch_round) {
    // TF32 runs in tiles only where all clusters run at once.
    if (launch_round.waves == 0 || (kProduct == Product::kTf32 && launch_round.waves > 1)) return false;
    return run_in_tiles(call, loop, scratch, launch_round);
  };
  return large.cost < small.cost ? run(large) : run(small);
}

#else
template <Product, typename Loop>
bool run_in_tiles(Call&, const Loop&, float*, const Gpu&) {
  return false;
}
#endif

}  // namespace msops::lltm
