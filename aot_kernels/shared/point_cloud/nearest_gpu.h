// The search of nearest points on a GPU: a warp takes a query, or a thread does if it looks for three points.
#pragma once

#include "../../common/sum.h"
#include "all_points_gpu.h"
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

  // Each lane offers a point if it is `inside`. Many are sorted and merged with those held, and few are inserted.
  __device__ void offer(const Neighbour<C>& found, bool inside) {
    constexpr int kFew = 8;
    const unsigned lane = threadIdx.x % 32;
    const Neighbour<C> limit = furthest();
    unsigned wanted = __ballot_sync(~0u, inside && is_before(floor_, found) && is_before(found, limit));
    if (__popc(wanted) > kFew) {
      const Neighbour<C> sorted = sort_team<32>(wanted >> lane & 1 ? found : Neighbour<C>{kInfinity<C>, INT32_MAX});
      const Neighbour<C> other = from_partner(sorted, 31);
      mine_ = merge_halves<32>(is_before(other, mine_) ? other : mine_);
      return;
    }
    while (wanted) {
      const int from = __ffs(static_cast<int>(wanted)) - 1;
      const Neighbour<C> next = from_lane(found, from);
      const int place = __popc(__ballot_sync(~0u, is_before(mine_, next)));
      const Neighbour<C> before = from_lane(mine_, static_cast<int>(lane) - 1);
      if (static_cast<int>(lane) > place) mine_ = before;
      if (static_cast<int>(lane) == place) mine_ = next;
      wanted &= wanted - 1;
      const Neighbour<C> closer = furthest();
      wanted &= __ballot_sync(~0u, is_before(found, closer));
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
template <typename Task>
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
    search(all, clouds[cloud], cloud, query, nearest);
    if (lane < most) all.write(i, first + lane, nearest.mine());
    last = nearest.furthest();
  }
  if constexpr (Task::kAny)
    for (int64_t s = number + lane; s < all.k; s += 32) all.write_missing(i, s);
}

// A block takes a part of a cloud's queries, and a warp one of them at a time. The points pass through shared memory,
// once if they fit there. Points that pass the bound are gathered in `taken`, 32 at a time, and offered together.
template <typename Task, typename C = typename Task::C>
__global__ void __launch_bounds__(kAllThreads, Task::kAny ? 2 : kAllBlocks<C>)
    nearest_of_all_kernel(const Task all, const typename Task::Clouds clouds, const int64_t parts) {
  constexpr int kWarps = kAllThreads / 32;
  static_assert(kEntries == 32 * kHeld, "a warp holds the distances of all entries");
  __shared__ Entry<C> entries[kEntries];
  __shared__ Neighbour<C> taken_by[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Neighbour<C>* const taken = taken_by[warp];
  const int64_t cloud = blockIdx.x / parts, part = blockIdx.x % parts, end = part_begin(all.number, part + 1, parts);
  const int64_t length = all.length(cloud), most_found = min(all.k, length);
  const auto fill = [&](int64_t base, int count) {
    __syncthreads();
    fill_entries(entries, base, count, [&](int64_t n) { return clouds.point(cloud, n); });
    __syncthreads();
  };
  if (0 < length && length <= kEntries) fill(0, static_cast<int>(length));
  for (int64_t turn = part_begin(all.number, part, parts); turn < end; turn += kWarps) {
    // All warps meet at barriers: those without a query repeat the last one.
    const bool writes = turn + warp < end;
    const int64_t i = cloud * all.number + (writes ? turn + warp : end - 1), number = all.found(i);
    const auto query = all.query(i);
    Neighbour<C> last{-1, 0};
    for (int64_t first = 0; first < most_found; first += 32) {
      const int most = static_cast<int>(max(int64_t{1}, min(int64_t{32}, number - first)));
      WarpNearest<C> nearest(most, last);
      C least = kInfinity<C>;
      for (int64_t base = 0; base < length; base += kEntries) {
        const int count = static_cast<int>(min(int64_t{kEntries}, length - base));
        if (length > kEntries) fill(base, count);
        const auto distance_of = [&](int n) {
          C distance = squared_distance(entries[n].point(), query);
          if constexpr (Task::kAny)
            if (n < count) distance = all.whole(distance, cloud, base + n, query);
          return distance;
        };
        // The points of the passes before would make the bound too small. In the first pass, all are after `last`.
        const auto distance_after_last = [&](int n) {
          const C distance = distance_of(n);
          return is_before(last, {or_infinite(distance), static_cast<int32_t>(base) + n}) ? distance : kInfinity<C>;
        };
        uint32_t near = Task::kAny || first > 0 ? near_points<32>(count, most, least, distance_after_last)
                                                : near_points<32>(count, most, least, distance_of);
        int ahead = warp_prefix_sum(__popc(near));  // of the warp's near points, up to this lane's last one
        const int total = __shfl_sync(~0u, ahead, 31);
        ahead -= __popc(near);
        for (int taken_end = 32; taken_end < total + 32; taken_end += 32) {
          for (; near && ahead < taken_end; near &= near - 1, ++ahead) {
            const int n = (__ffs(static_cast<int>(near)) - 1) * 32 + lane;
            taken[ahead % 32] = {or_infinite(distance_of(n)), entries[n].index};
          }
          __syncwarp();
          nearest.offer(taken[lane], taken_end - 32 + lane < total);
          __syncwarp();
        }
      }
      if (writes && first + lane < number) all.write(i, first + lane, nearest.mine());
      last = nearest.furthest();
    }
    if constexpr (Task::kAny)
      for (int64_t s = number + lane; writes && s < all.k; s += 32) all.write_missing(i, s);
  }
}

//   k      points and queries of a cloud  points           why
//   3*     up to 1024 points              all              they are in shared memory, and 8 lanes share a query
//   3*     to about 12,000, 256 or more   near the query   each block sorts its cloud in shared memory
//   other  2048 and 32, or more           near the query   sorting costs a few launches
//          fewer                          all              they pass through shared memory, and a warp takes a query
//
// * of a Nearest: an AnyNearest takes the kernels of the other k, compiled for it.
template <typename Task>
void find_on_gpu(Call& call, const Task& all, const typename Task::Clouds& cells) {
  if (!call.ok() || all.clouds * all.number == 0) return;
  if constexpr (!Task::kAny)
    if (all.k == 3 && find_three_on_gpu(call, all)) return;
  if (pays_to_sort_on_gpu(all.size, all.number)) {
    sort_on_gpu(call, cells);
    return launch_search(call, nearest_kernel<Task>, all, cells);
  }
  // About four blocks of a multiprocessor run at once.
  const int64_t most = std::max<int64_t>(1, 4 * Gpu().multiprocessors / all.clouds), warps = kAllThreads / 32;
  const int64_t parts = std::min(most, (all.number + warps - 1) / warps);
  launch(call, nearest_of_all_kernel<Task>, all.clouds * parts, kAllThreads, 0, all, cells, parts);
}

}  // namespace msops::points
