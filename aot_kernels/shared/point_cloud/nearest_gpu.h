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
template <typename C>
__device__ __forceinline__ void search(const Cells<C>& cells, const Point<C>& query, WarpNearest<C>& nearest) {
  CellBox done = no_cells(), next = cells_around(cells.lattice, query, 1);
  bool is_last = false;
  for (int32_t steps = 1;;) {
    warp_for_box(cells, next, done, [&](int64_t i, bool inside) {
      const C distance = inside ? or_infinite(squared_distance(cells[i], query)) : C(0);
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
template <bool kSorted, typename T>
__global__ void __launch_bounds__(kSearchThreads)
    nearest_kernel(const Nearest<T> all, const CellsOfClouds<T> clouds, const int64_t first_query) {
  using C = Compute<T>;
  const int lane = threadIdx.x % 32;
  const int64_t i = first_query + blockIdx.x * int64_t{kSearchThreads / 32} + threadIdx.x / 32;
  if (i >= all.clouds * all.number) return;
  const int64_t cloud = i / all.number;
  const Point<C> query = point_at(all.queries, i);
  Neighbour<C> last{-1, 0};
  for (int64_t first = 0; first < all.k; first += 32) {
    const int most = static_cast<int>(min(int64_t{32}, all.k - first));
    WarpNearest<C> nearest(most, last);
    if constexpr (kSorted) {
      search(clouds[cloud], query, nearest);
    } else {
      for (int64_t base = 0; base < all.size; base += 32) {
        const int64_t j = base + lane;
        const bool inside = j < all.size;
        const C distance = inside ? or_infinite(squared_distance(clouds.point(cloud, j), query)) : C(0);
        nearest.offer({distance, static_cast<int32_t>(j)}, inside);
      }
    }
    if (lane < most) all.write(i, first + lane, nearest.mine());
    last = nearest.furthest();
  }
}

//   k      points and queries of a cloud  points           why
//   3      up to 1024 points              all              they are in shared memory, and 8 lanes share them
//   3      to about 12,000, 256 or more   near the query   each block sorts its cloud in shared memory
//   other  2048 and 32, or more           near the query   sorting costs a few launches
//          fewer                          all              a warp computes 32 distances at once, from the caches
template <typename T>
void find_on_gpu(Call& call, const Nearest<T>& all, const CellsOfClouds<T>& cells) {
  if (!call.ok() || all.clouds * all.number == 0) return;
  if (all.k == 3 && find_three_on_gpu(call, all)) return;
  search_on_gpu(call, nearest_kernel<true, T>, nearest_kernel<false, T>, all, cells);
}

}  // namespace msops::points
