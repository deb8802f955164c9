// The search of nearest points on a GPU: a warp takes a query, or a thread does if it looks for three points.
#pragma once

#include "cells_gpu.h"
#include "nearest.h"
#include "three_nearest_gpu.h"

namespace msops::points {

// WarpNearest holds the 32 nearest of the points that a warp's lanes offer, in order: lane 0 has the nearest one.
template <typename C>
class WarpNearest {
 public:
  // Only points after `floor` are held, and `most` of them matter.
  __device__ WarpNearest(int most, const Neighbour<C>& floor) : most_(most), floor_(floor) {}

  __device__ const Neighbour<C>& mine() const { return mine_; }
  __device__ Neighbour<C> of_lane(int lane) const { return from_lane(mine_, lane); }
  __device__ Neighbour<C> furthest() const { return of_lane(most_ - 1); }
  __device__ bool is_full() const { return furthest().index != INT32_MAX; }

  // Each lane offers a point if it is `inside`.
  __device__ void offer(const Neighbour<C>& found, bool inside) {
    const unsigned lane = threadIdx.x % 32;
    const Neighbour<C> limit = furthest();
    unsigned wanted = __ballot_sync(~0u, inside && floor_.is_nearer(found) && found.is_nearer(limit));
    while (wanted) {
      const int from = __ffs(static_cast<int>(wanted)) - 1;
      const Neighbour<C> next = from_lane(found, from);
      const int place = __popc(__ballot_sync(~0u, mine_.is_nearer(next)));
      const Neighbour<C> before = from_lane(mine_, static_cast<int>(lane) - 1);
      if (static_cast<int>(lane) > place) mine_ = before;
      if (static_cast<int>(lane) == place) mine_ = next;
      wanted &= wanted - 1;
      const Neighbour<C> closer = furthest();
      wanted &= __ballot_sync(~0u, found.is_nearer(closer));
    }
  }

 private:
  static __device__ Neighbour<C> from_lane(const Neighbour<C>& value, int lane) {
    return {__shfl_sync(~0u, value.distance, lane), __shfl_sync(~0u, value.index, lane)};
  }

  int most_;
  Neighbour<C> floor_, mine_{kInfinity<C>, INT32_MAX};  // INT32_MAX: none yet
};

// Visits the cells around the query as NearestOnCpu does.
template <typename Task, typename C, typename Query>
__device__ __forceinline__ void search(const Task& all, const Cells<C>& cells, int64_t cloud, const Query& query,
                                       WarpNearest<C>& nearest) {
  CellBox done = no_cells(), next = cells_around(cells.lattice, query, 1);
  bool is_last = false;
  for (int32_t steps = 1;;) {
    warp_for_box(cells, next, done, [&](int64_t i, bool inside) {
      C distance = inside ? or_infinite(squared_distance(cells[i], query)) : C(0);
      if constexpr (Task::kAny)
        if (inside) distance = or_infinite(all.whole(distance, cloud, cells.order[i], query));
      nearest.offer({distance, inside ? cells.order[i] : 0}, inside);
    });
    if (is_last || next.covers(cells.lattice.counts)) return;
    done = next;
    if (nearest.is_full()) {
      next = cells_within(cells.lattice, query, nearest.furthest().distance);
      if (done.has(next)) return;
      is_last = true;
    } else {
      next = cells_around(cells.lattice, query, steps *= 2);
    }
  }
}

// More than 32 points are found 32 at a time: each pass searches those after the last one of the pass before.
template <bool kSorted, typename Task>
__global__ void __launch_bounds__(kSearchThreads)
    nearest_kernel(const Task all, const typename Task::Clouds clouds, const int64_t first_query) {
  using C = typename Task::C;
  const int lane = threadIdx.x % 32;
  const int64_t i = first_query + blockIdx.x * int64_t{kSearchThreads / 32} + threadIdx.x / 32;
  if (i >= all.clouds * all.number) return;
  const int64_t cloud = i / all.number, number = all.found(i);
  const auto query = all.query(i);
  Neighbour<C> last{-1, 0};
  for (int64_t first = 0; first < number; first += 32) {
    const int most = static_cast<int>(min(int64_t{32}, number - first));
    WarpNearest<C> nearest(most, last);
    if constexpr (kSorted) {
      search(all, clouds[cloud], cloud, query, nearest);
    } else {
      for (int64_t base = 0; base < all.length(cloud); base += 32) {
        const int64_t j = base + lane;
        const bool inside = j < all.length(cloud);
        C distance = inside ? or_infinite(squared_distance(clouds.point(cloud, j), query)) : C(0);
        if constexpr (Task::kAny)
          if (inside) distance = or_infinite(all.whole(distance, cloud, j, query));
        nearest.offer({distance, static_cast<int32_t>(j)}, inside);
      }
    }
    if (lane < most) all.write(i, first + lane, nearest.mine());
    last = nearest.furthest();
  }
  if constexpr (Task::kAny)
    for (int64_t s = number + lane; s < all.k; s += 32) all.write_missing(i, s);
}

//   k      points and queries of a cloud  points           why
//   3*     up to 1024 points              all              they are in shared memory, and 8 lanes share them
//   3*     to about 12,000, 256 or more   near the query   each block sorts its cloud in shared memory
//   other  2048 and 32, or more           near the query   sorting costs a few launches
//          fewer                          all              a warp computes 32 distances at once, from the caches
//
// * of a Nearest: an AnyNearest takes the kernels of the other k, compiled for it.
template <typename Task>
void find_on_gpu(Call& call, const Task& all, const typename Task::Clouds& cells) {
  if (!call.ok() || all.clouds * all.number == 0) return;
  if constexpr (!Task::kAny)
    if (all.k == 3 && find_three_on_gpu(call, all)) return;
  search_on_gpu(call, nearest_kernel<true, Task>, nearest_kernel<false, Task>, all, cells);
}

}  // namespace msops::points
