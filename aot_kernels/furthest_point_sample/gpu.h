// Sampling on a GPU, of clouds of any size.
#pragma once

#include "../common/gpu/counter.h"
#include "block.h"

namespace msops::points {

constexpr int kGridThreads = 512, kGridBlocks = 512;  // kGridBlocks: the most of a launch

// Groups of blocks take clouds in turn. Distances are in memory, which the second-level cache holds up to some millions
// of points. After each step the blocks of a group wait until all have left their candidates.
template <typename C>
struct GridPlan {
  int groups, blocks;    // blocks: of a group
  C* distances;          // (clouds, size)
  unsigned* left;        // (groups): how many candidates were left, over all steps
  uint32_t* candidates;  // (groups, 2, blocks, kWords)
  static constexpr int kWords = sizeof(C) / 4 + 1;
};
static_assert(kGridBlocks * (2 * GridPlan<double>::kWords + 1) <= kExchange, "the exchange holds all candidates");

// Returns the furthest candidate of a block, to the first warp.
template <typename C>
__device__ __forceinline__ Candidate<C> furthest_of_block(Candidate<C> mine) {
  __shared__ C distances[kGridThreads / 32];
  __shared__ int32_t indices[kGridThreads / 32];
  const int lane = threadIdx.x % 32;
  mine = furthest_of_warp(mine);
  if (lane == 0) {
    distances[threadIdx.x / 32] = mine.distance;
    indices[threadIdx.x / 32] = mine.index;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return mine;
  const bool is_warp = lane < kGridThreads / 32;
  return furthest_of_warp(Candidate<C>{is_warp ? distances[lane] : C(0), is_warp ? indices[lane] : INT32_MAX});
}

template <typename Task>
__global__ void __launch_bounds__(kGridThreads)
    grid_kernel(const Task sampling, const GridPlan<typename Task::C> plan) {
  using C = typename Task::C;
  constexpr int kWords = GridPlan<C>::kWords;
  __shared__ int32_t next;
  const int group = static_cast<int>(blockIdx.x) / plan.blocks, rank = static_cast<int>(blockIdx.x) % plan.blocks;
  const int lane = threadIdx.x % 32;
  unsigned steps = 0;
  for (int64_t cloud = group; cloud < sampling.clouds; cloud += plan.groups) {
    const int64_t length = sampling.length(cloud), end = part_begin<int64_t>(length, rank + 1, plan.blocks);
    C* const distances = plan.distances + cloud * sampling.size;
    int32_t* const out = sampling.of_cloud(cloud);
    int32_t taken = sampling.start(cloud);
    if (rank == 0 && threadIdx.x == 0) out[0] = taken;
    for (int64_t s = 1; s < sampling.samples; ++s) {
      // Update the distances of the block's points.
      const Point<C> point = length > 0 ? sampling.point(cloud, taken) : Point<C>{};
      Candidate<C> best{0, INT32_MAX};
      for (int64_t i = part_begin<int64_t>(length, rank, plan.blocks) + threadIdx.x; i < end; i += kGridThreads) {
        const Point<C> here = sampling.point(cloud, i);
        const C before = s == 1 ? first_distance(here) : distances[i], distance = squared_distance(here, point);
        const Candidate<C> mine{distance < before ? distance : before, static_cast<int32_t>(i)};
        if (s == 1 || distance < before) distances[i] = mine.distance;
        if (mine.is_further(best)) best = mine;
      }
      best = furthest_of_block(best);
      // Leave the block's candidate, and wait for those of the others.
      uint32_t* const candidates = plan.candidates + (group * 2 + steps % 2) * plan.blocks * kWords;
      ++steps;
      if (threadIdx.x == 0) {
        uint32_t words[kWords];
        memcpy(words, &best.distance, sizeof(C));
        words[kWords - 1] = static_cast<uint32_t>(best.index);
        for (int w = 0; w < kWords; ++w) __stcg(candidates + rank * kWords + w, words[w]);
        red_release_add(plan.left + group);
        while (static_cast<int32_t>(ld_acquire(plan.left + group) - steps * static_cast<unsigned>(plan.blocks)) < 0) {
        }
      }
      if (threadIdx.x < 32) {
        __syncwarp();
        best = {0, INT32_MAX};
        for (int block = lane; block < plan.blocks; block += 32) {
          uint32_t words[kWords];
          for (int w = 0; w < kWords; ++w) words[w] = __ldcg(candidates + block * kWords + w);
          Candidate<C> other{0, static_cast<int32_t>(words[kWords - 1])};
          memcpy(&other.distance, words, sizeof(C));
          if (other.is_further(best)) best = other;
        }
        best = furthest_of_warp(best);
        if (lane == 0) {
          next = best.index == INT32_MAX ? 0 : best.index;
          if (rank == 0) out[s] = next;
        }
      }
      __syncthreads();
      taken = next;
    }
  }
}

template <typename Task>
void sample_in_grid(Call& call, const Task& sampling, typename Task::C* distances, int32_t* exchange) {
  const Gpu gpu;
  const auto kernel = grid_kernel<Task>;
  const int64_t at_once = std::max(1, std::min(kGridBlocks, blocks_at_once(gpu, kernel, kGridThreads, 0)));
  const int64_t wanted = (sampling.size - 1) / kGridThreads + 1;
  GridPlan<typename Task::C> plan;
  plan.groups = static_cast<int>(std::min(at_once, sampling.clouds));
  plan.blocks = gpu.cooperative ? static_cast<int>(std::min(wanted, at_once / plan.groups)) : 1;
  plan.distances = distances;
  plan.left = reinterpret_cast<unsigned*>(exchange);
  plan.candidates = reinterpret_cast<uint32_t*>(exchange) + plan.groups;
  cudaMemsetAsync(plan.left, 0, plan.groups * sizeof(unsigned), call.stream());
  const Grid grid(plan.groups * plan.blocks);
  launch(call, kernel, gpu.cooperative ? grid.cooperative() : grid, kGridThreads, 0, sampling, plan);
}

// Chooses a kernel, for float32 (half as many points for float64):
//
//   points of a cloud      kernel                  why
//   up to 8192             a block                 a step waits for the block's own warps only
//   up to 131072           a cluster, from sm_90   registers hold the cloud; blocks exchange candidates directly
//   more, or older GPUs    the grid                all the GPU's memory bandwidth
template <typename Task>
void launch_sampling(Call& call, const Task& sampling, typename Task::C* distances, int32_t* exchange) {
  if (!call.ok() || sampling.clouds == 0) return;
  if (sampling.size <= int64_t{kMostThreads} * kPoints<typename Task::C>) return sample_in_blocks(call, sampling);
  if (!sample_in_clusters(call, sampling)) sample_in_grid(call, sampling, distances, exchange);
}

}  // namespace msops::points
