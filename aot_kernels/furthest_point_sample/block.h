// Sampling on a GPU, for clouds whose points and distances fit into the registers of a block or, from sm_90 on, of a
// cluster's blocks. A step takes one barrier of a block: its warps leave their furthest points in shared memory, and
// each warp finds the furthest of these. A cluster's blocks send theirs, with the coordinates, to the shared memory of
// all blocks, each of which waits for as many bytes as are sent to it in a step.
#pragma once

#include "../common/gpu/cluster.h"
#include "../common/gpu/mbarrier.h"
#include "../common/parallel.h"
#include "clouds.h"

namespace msops::points {

constexpr int kMostThreads = 1024, kMostBlocks = 16;

// Points of a thread: their coordinates and distances take 32 registers.
template <typename C>
constexpr int kPoints = 32 / sizeof(C);

// redux.sync is an instruction of sm_80 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kReduces = true;
__device__ __forceinline__ uint32_t reduce_max(uint32_t mine) { return __reduce_max_sync(~0u, mine); }
#else
constexpr bool kReduces = false;
__device__ __forceinline__ uint32_t reduce_max(uint32_t mine) { return mine; }
#endif

// Returns the furthest candidate of a warp, to all lanes.
template <typename C>
__device__ __forceinline__ Candidate<C> furthest_of_warp(Candidate<C> mine) {
  if constexpr (kReduces && sizeof(C) == 4) {
    // The bits of numbers of at least 0 are in the numbers' order.
    const uint32_t bits = bits_of(mine.distance), most = reduce_max(bits);
    return {float_of(most), static_cast<int32_t>(~reduce_max(bits == most ? ~static_cast<uint32_t>(mine.index) : 0))};
  } else {
    for (int distance = 16; distance > 0; distance /= 2) {
      const Candidate<C> other{__shfl_xor_sync(~0u, mine.distance, distance),
                               __shfl_xor_sync(~0u, mine.index, distance)};
      if (other.is_further(mine)) mine = other;
    }
    return mine;
  }
}

// Sent is what a block sends: its candidate, and where that point is.
template <typename C>
struct Sent {
  C distance;
  Point<C> point;
  int32_t index;

  static constexpr int kWords = (4 * sizeof(C) + 4) / 4;
};

template <bool kClustered, typename Task>
__global__ void __launch_bounds__(kMostThreads) block_kernel(const Task sampling) {
  using C = typename Task::C;
  if (kClustered && !has_instructions_of(90)) return;
  extern __shared__ uint4 shared_points[];
  __shared__ C distance_of_warp[2][32];
  __shared__ int32_t index_of_warp[2][32];
  __shared__ Sent<C> sent[2][kMostBlocks];
  __shared__ uint64_t barriers[2];
  const int blocks = kClustered ? static_cast<int>(cluster_nctarank()) : 1;
  const int rank = kClustered ? static_cast<int>(cluster_ctarank()) : 0;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t cloud = blockIdx.x / blocks;
  const int slice = threads * kPoints<C>, first = rank * slice;  // points of a block, and their first one
  const int length = static_cast<int>(sampling.length(cloud));
  C* const x = reinterpret_cast<C*>(shared_points);  // (3, slice)
  int32_t* const out = sampling.of_cloud(cloud);

  // Load: a thread has points `threads` apart.
  Point<C> points[kPoints<C>];
  C distances[kPoints<C>];
#pragma unroll
  for (int k = 0; k < kPoints<C>; ++k) {
    const int i = k * threads + thread;
    const bool inside = first + i < length;
    points[k] = inside ? sampling.point(cloud, first + i) : Point<C>{};
    distances[k] = inside ? first_distance(points[k]) : C(-1);
    x[i] = points[k].x;
    x[slice + i] = points[k].y;
    x[2 * slice + i] = points[k].z;
  }
  Point<C> taken = length > 0 ? sampling.point(cloud, sampling.start(cloud)) : Point<C>{};
  const auto arrived = [&](int round) { return shared_address(&barriers[round % 2]); };
  const int bytes = blocks * Sent<C>::kWords * 4;
  if (kClustered) {
    if (thread == 0) {
      for (int i = 0; i < 2; ++i) mbarrier_init(arrived(i), 1);
      fence_mbarrier_init();
      for (int i = 0; i < 2; ++i) mbarrier_arrive_expect_tx(arrived(i), bytes);
    }
    cluster_arrive_wait();
  }
  __syncthreads();
  if (rank == 0 && thread == 0) out[0] = sampling.start(cloud);
  if (length == 0) {
    for (int64_t s = rank * threads + thread; s < sampling.samples; s += blocks * threads) out[s] = 0;
    return;
  }

  for (int64_t s = 1; s < sampling.samples; ++s) {
    const int turn = static_cast<int>(s % 2), round = static_cast<int>((s - 1) % 8192);  // as ints
    // Update the distances.
    Candidate<C> best{-1, INT32_MAX};
#pragma unroll
    for (int k = 0; k < kPoints<C>; ++k) {
      const C distance = squared_distance(points[k], taken);
      distances[k] = distance < distances[k] ? distance : distances[k];
      if (distances[k] > best.distance) best = {distances[k], first + k * threads + thread};
    }
    if (best.distance < 0) best = {0, INT32_MAX};  // the thread has no points
    // Reduce over the block.
    best = furthest_of_warp(best);
    if (lane == 0) {
      distance_of_warp[turn][thread / 32] = best.distance;
      index_of_warp[turn][thread / 32] = best.index;
    }
    __syncthreads();
    if (!kClustered || thread < 32) {
      const bool is_warp = lane < threads / 32;
      best = furthest_of_warp(
          Candidate<C>{is_warp ? distance_of_warp[turn][lane] : C(0), is_warp ? index_of_warp[turn][lane] : INT32_MAX});
      const int i = best.index == INT32_MAX ? 0 : best.index - first;
      taken = {x[i], x[slice + i], x[2 * slice + i]};
    }
    // Exchange the candidates of the cluster's blocks.
    if (kClustered) {
      if (thread < 32) {
        const Sent<C> mine{best.distance, taken, best.index};
        uint32_t words[Sent<C>::kWords];
        memcpy(words, &mine, sizeof words);
        const float* const to = reinterpret_cast<const float*>(&sent[turn][rank]);
        if (lane < blocks)
#pragma unroll
          for (int w = 0; w < Sent<C>::kWords; ++w) st_async(float_of(words[w]), to + w, arrived(round), lane);
      }
      mbarrier_wait(arrived(round), round / 2);
      if (thread == 0) mbarrier_arrive_expect_tx(arrived(round), bytes);  // for the round after the next one
      const Sent<C>& of_lane = sent[turn][lane % blocks];
      best = furthest_of_warp(Candidate<C>{of_lane.distance, of_lane.index});
      taken = sent[turn][best.index / slice].point;
    }
    if (rank == 0 && thread == 0) out[s] = best.index;
  }
}

// Returns how many threads a block needs for its points.
template <typename C>
int threads_for(int64_t points) {
  const int64_t threads = (points - 1) / kPoints<C> + 1;
  return static_cast<int>((threads + 31) / 32 * 32);
}

template <typename C>
int64_t bytes_of_slice(int threads) {
  return int64_t{3} * threads * kPoints<C> * sizeof(C);
}

template <typename Task>
void sample_in_blocks(Call& call, const Task& sampling) {
  using C = typename Task::C;
  const int threads = threads_for<C>(sampling.size);
  launch(call, block_kernel<false, Task>, sampling.clouds, threads, bytes_of_slice<C>(threads), sampling);
}

#if CUDART_VERSION >= 12010  // the first version that knows st.async
// Samples if a cluster has room for a cloud; returns whether it did. Blocks of 512 threads are enough up to 16 of them.
template <typename Task>
bool sample_in_clusters(Call& call, const Task& sampling) {
  using C = typename Task::C;
  const auto kernel = block_kernel<true, Task>;
  if (sampling.size > int64_t{kMostBlocks} * kMostThreads * kPoints<C> || !is_compiled_for(90, kernel)) return false;
  unsigned blocks = 2;
  while (blocks < kMostBlocks && sampling.size > int64_t{blocks} * kMostThreads / 2 * kPoints<C>) blocks *= 2;
  const int threads = threads_for<C>((sampling.size - 1) / blocks + 1);
  const int64_t bytes = bytes_of_slice<C>(threads);
  if (sampling.clouds > INT32_MAX / blocks) return false;
  const Grid grid = Grid(sampling.clouds * blocks).in_clusters(blocks);
  if (clusters_at_once(kernel, grid, threads, bytes) == 0) return false;
  launch(call, kernel, grid, threads, bytes, sampling);
  return true;
}
#else
template <typename Task>
bool sample_in_clusters(Call&, const Task&) {
  return false;
}
#endif

}  // namespace msops::points
