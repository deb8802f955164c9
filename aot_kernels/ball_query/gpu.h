// The search of balls on a GPU: a warp takes a query.
#pragma once

#include "../shared/point_cloud/cells_gpu.h"
#include "balls.h"

namespace msops::points {

constexpr int kHits = 256;  // points in a ball that a warp keeps in shared memory

// Returns how many points of the ball there are in the cells around it, and puts them into `hits`, in any order, as far
// as these have room.
template <typename T>
__device__ __forceinline__ int64_t collect(const Balls<T>& balls, const Cells<Compute<T>>& cells, const CellBox& box,
                                           const Point<Compute<T>>& query, int32_t* hits) {
  const unsigned lane = threadIdx.x % 32;
  int64_t found = 0;
  warp_for_box(cells, box, no_cells(), [&](int64_t i, bool inside) {
    const bool is_hit = inside && balls.has(squared_distance(cells[inside ? i : 0], query));
    const unsigned of_warp = __ballot_sync(~0u, is_hit);
    const int64_t place = found + __popc(of_warp & ((1u << lane) - 1));
    if (is_hit && place < kHits) hits[place] = cells.order[i];
    found += __popc(of_warp);
  });
  __syncwarp();
  return found;
}

// Writes the first indices of some hits in order, and returns the first one. A lane counts the hits below its own.
__device__ __forceinline__ int32_t write_first(const int32_t* hits, int found, int64_t samples, int32_t* out) {
  int32_t first = INT32_MAX;
  for (int i = threadIdx.x % 32; i < found; i += 32) {
    const int32_t mine = hits[i];
    int place = 0;
    for (int j = 0; j < found; ++j) place += hits[j] < mine;
    if (place < samples) out[place] = mine;
    if (mine < first) first = mine;
  }
  return extreme_of_warp<true>(first);
}

template <bool kSorted, typename Task, typename T>
__global__ void __launch_bounds__(kSearchThreads)
    ball_kernel(const Task balls, const CellsOfClouds<T> clouds, const int64_t first_query) {
  using C = Compute<T>;
  __shared__ int32_t of_warps[kSearchThreads / 32][kHits];
  const unsigned lane = threadIdx.x % 32;
  const int64_t i = first_query + blockIdx.x * int64_t{kSearchThreads / 32} + threadIdx.x / 32;
  if (i >= balls.clouds * balls.number) return;
  const int64_t cloud = i / balls.number, samples = balls.samples;
  const Point<C> query = point_at(balls.queries, i);
  int32_t* const out = balls.indices + i * samples;
  if constexpr (Task::kRagged)
    if (!balls.has_query(i)) {
      for (int64_t s = lane; s < samples; s += 32) out[s] = 0;
      if (lane == 0) balls.counts[i] = 0;
      return;
    }
  int64_t found = kHits + 1;
  int32_t fill = 0;
  if constexpr (kSorted) {
    const Cells<C> cells = clouds[cloud];
    const CellBox box = cells_within(cells.lattice, query, balls.outer);
    int64_t visited = 0;
    for (int64_t row = lane; row < box.rows(); row += 32) visited += points_of_row(cells, box, row);
    visited = team_sum<32>(visited);
    if (balls.takes_cells(visited)) {
      int32_t* const hits = of_warps[threadIdx.x / 32];
      found = collect(balls, cells, box, query, hits);
      if (found <= kHits) fill = write_first(hits, static_cast<int>(found), samples, out);
    }
  }
  if (found > kHits) {
    // Visit the points in their order.
    found = 0;
    const int64_t length = balls.length(cloud);
    for (int64_t base = 0; base < length && found < samples; base += 32) {
      const int64_t j = base + lane;
      const bool is_hit = j < length && balls.has(squared_distance(clouds.point(cloud, j), query));
      const unsigned of_warp = __ballot_sync(~0u, is_hit);
      const int64_t place = found + __popc(of_warp & ((1u << lane) - 1));
      if (is_hit && place < samples) out[place] = static_cast<int32_t>(j);
      if (found == 0 && of_warp) fill = static_cast<int32_t>(base) + __ffs(static_cast<int>(of_warp)) - 1;
      found += __popc(of_warp);
    }
  }
  found = min(found, samples);
  for (int64_t s = found + lane; s < samples; s += 32) out[s] = found > 0 ? fill : 0;
  if (lane == 0) balls.counts[i] = static_cast<int32_t>(found);
}

//   points and queries       points                   why
//   2048 and 32, or more     near the query           sorting costs a few launches
//   fewer                    all, from the caches     a warp computes 32 distances at once
//
// Either way, a query whose ball has many points visits them in their order until it has enough.
template <typename Task, typename T>
void launch_balls(Call& call, const Task& balls, const CellsOfClouds<T>& cells) {
  if (!call.ok() || balls.clouds * balls.number == 0) return;
  if (!pays_to_sort_on_gpu(balls.size, balls.number))
    return launch_search(call, ball_kernel<false, Task, T>, balls, cells);
  sort_on_gpu(call, cells);
  launch_search(call, ball_kernel<true, Task, T>, balls, cells);
}

}  // namespace msops::points
