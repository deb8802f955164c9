// The search of the three nearest points on a GPU, for clouds that fit shared memory: a team of lanes computes the
// distances of a query from all points of a small cloud, and a thread those from the near ones of a larger cloud, which
// each block sorts.
#pragma once

#include "../../common/sum.h"
#include "all_points_gpu.h"
#include "cells_gpu.h"
#include "nearest.h"

namespace msops::points {

constexpr int kThreeThreads = 512;

// SharedCloud is a cloud in shared memory, sorted into cells.
template <typename C>
struct SharedCloud {
  Entry<C>* entries;  // of the points, in the order of their cells
  uint16_t* ends;     // where each cell's points end
  int most;           // cells

  // Returns the bytes of a cloud without its cells, and how many cells fit `room` bytes beside them.
  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(sizeof(Entry<C>)); }
  static int64_t cells(int64_t size, int64_t room) {
    constexpr int64_t kOfPoint = 4;  // cells; most are empty where clouds are surfaces
    return std::min(kOfPoint * size, (room - bytes(size)) / static_cast<int64_t>(sizeof(uint16_t)) / 2 * 2);
  }
};

// Three holds the nearest points so far, in order.
template <typename C>
struct Three {
  Neighbour<C> nearest[3] = {{kInfinity<C>, INT32_MAX}, {kInfinity<C>, INT32_MAX}, {kInfinity<C>, INT32_MAX}};

  __device__ bool is_full() const { return nearest[2].index != INT32_MAX; }
  __device__ __forceinline__ void offer(const Neighbour<C>& found) {
    if (!is_before(found, nearest[2])) return;
    const bool is_second = is_before(found, nearest[1]), is_first = is_before(found, nearest[0]);
    nearest[2] = is_second ? nearest[1] : found;
    nearest[1] = is_first ? nearest[0] : is_second ? found : nearest[1];
    nearest[0] = is_first ? found : nearest[0];
  }
  __device__ __forceinline__ void remove_first() {
    nearest[0] = nearest[1], nearest[1] = nearest[2], nearest[2] = {kInfinity<C>, INT32_MAX};
  }
};

// Adds up `count` numbers of 16 bits, each to those before it. All threads of the block call this.
__device__ inline void add_up(uint16_t* numbers, int count, int* of_warps) {
  const int threads = kThreeThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = (count + threads - 1) / threads, first = static_cast<int>(threadIdx.x) * each;
  int sum = 0;
  for (int i = first; i < min(first + each, count); ++i) sum += numbers[i];
  int before = warp_prefix_sum(sum);
  if (lane == 31) of_warps[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += of_warps[w];
  for (int i = first; i < min(first + each, count); ++i) {
    before += numbers[i];
    numbers[i] = static_cast<uint16_t>(before);
  }
  __syncthreads();
}

// Adds 1 to a number of 16 bits, or subtracts 1, and returns the number before.
__device__ __forceinline__ int add_at(uint16_t* numbers, int i, bool subtract) {
  const uint32_t shift = i % 2 * 16, one = uint32_t{1} << shift;
  uint32_t* const word = reinterpret_cast<uint32_t*>(numbers) + i / 2;
  return atomicAdd(word, subtract ? 0u - one : one) >> shift & 0xffff;
}

// Sorts a cloud. The order of the points of a cell depends on the run; what searches find does not.
template <typename T, typename C = Compute<T>>
__device__ Lattice<C> sort_shared(const SharedCloud<C>& shared, const T* points, int size) {
  __shared__ C of_warps[6][kThreeThreads / 32];
  __shared__ int sums[kThreeThreads / 32];
  __shared__ Lattice<C> lattice;
  for (int cell = 2 * threadIdx.x; cell < shared.most; cell += 2 * kThreeThreads)
    *reinterpret_cast<uint32_t*>(shared.ends + cell) = 0;
  lattice_of_block<kThreeThreads>(
      size, [&](int64_t i) { return point_at(points, i); }, of_warps, shared.most, C(0), lattice);
  __syncthreads();
  const Lattice<C> cells = lattice;
  for (int i = threadIdx.x; i < size; i += kThreeThreads)
    add_at(shared.ends, static_cast<int>(cells.number_of(point_at(points, i))), false);
  __syncthreads();
  add_up(shared.ends, static_cast<int>(cells.size()), sums);
  // Places are taken from the end of a cell on, so that `ends` become begins.
  for (int i = threadIdx.x; i < size; i += kThreeThreads) {
    const Point<C> p = point_at(points, i);
    const int at = add_at(shared.ends, static_cast<int>(cells.number_of(p)), true) - 1;
    shared.entries[at] = {p.x, p.y, p.z, i};
  }
  __syncthreads();
  return cells;
}

// Offers the points of the cells of `box` without those of `done`.
template <typename C>
__device__ __forceinline__ void visit(const SharedCloud<C>& shared, const Lattice<C>& cells, int size,
                                      const Point<C>& query, const CellBox& box, const CellBox& done, Three<C>& three) {
  constexpr int kAtOnce = 4;  // points
  const int count = static_cast<int>(cells.size());
  for (int z = box.low[2]; z <= box.high[2]; ++z)
    for (int y = box.low[1]; y <= box.high[1]; ++y) {
      const int row = (z * cells.counts[1] + y) * cells.counts[0];
      const bool inside =
          done.low[1] <= y && y <= done.high[1] && done.low[2] <= z && z <= done.high[2] && done.low[0] <= done.high[0];
      // What is left of `done` comes first, then what is right of it.
      int from = box.low[0], to = inside ? min(box.high[0], done.low[0] - 1) : box.high[0];
      for (int side = 0; side < 2; ++side) {
        if (from <= to) {
          int i = shared.ends[row + from];  // which begin, after sort_shared
          const int end = row + to + 1 < count ? shared.ends[row + to + 1] : size;
          for (; i < end; i += kAtOnce) {
            Neighbour<C> found[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
              found[k] = shared.entries[min(i + k, end - 1)].from(query);
              if (i + k >= end) found[k].distance = kInfinity<C>, found[k].index = INT32_MAX;
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) three.offer(found[k]);
          }
        }
        if (!inside) break;
        from = max(box.low[0], done.high[0] + 1), to = box.high[0];
      }
    }
}

// Visits the query's cell if that has enough points, else the cells around it, twice as far each time; then all cells
// that may have points as near as the three.
template <typename C>
__device__ __forceinline__ Three<C> search_shared(const SharedCloud<C>& shared, const Lattice<C>& cells, int size,
                                                  const Point<C>& query) {
  Three<C> three;
  const int own = static_cast<int>(cells.number_of(query));
  const int end = own + 1 < static_cast<int>(cells.size()) ? shared.ends[own + 1] : size;
  int32_t steps = end - shared.ends[own] >= 3 ? 0 : 1;
  CellBox done = no_cells(), next = cells_around(cells, query, steps);
  for (bool is_last = false;;) {
    visit(shared, cells, size, query, next, done, three);
    if (is_last || next.covers(cells.counts)) return three;
    done = next;
    if (three.is_full()) {
      next = cells_within(cells, query, three.nearest[2].distance);
      if (done.has(next)) return three;
      is_last = true;
    } else {
      next = cells_around(cells, query, steps *= 2);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreeThreads)
    three_nearest_kernel(const Nearest<T> all, const int64_t parts, const int most) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char memory[];
  const int size = static_cast<int>(all.size);
  const int64_t cloud = blockIdx.x / parts, part = blockIdx.x % parts;
  Entry<C>* const entries = reinterpret_cast<Entry<C>*>(memory);
  const SharedCloud<C> shared{entries, reinterpret_cast<uint16_t*>(entries + size), most};
  const Lattice<C> cells = sort_shared(shared, all.points + cloud * all.size * 3, size);
  const int64_t end = part_begin(all.number, part + 1, parts);
  for (int64_t i = part_begin(all.number, part, parts) + threadIdx.x; i < end; i += kThreeThreads) {
    const int64_t query = cloud * all.number + i;
    const Three<C> three = search_shared(shared, cells, size, point_at(all.queries, query));
#pragma unroll
    for (int k = 0; k < 3; ++k) all.write(query, k, three.nearest[k]);
  }
}

constexpr int kTeamLanes = 8, kTeams = kAllThreads / kTeamLanes;

// A team of lanes takes a query, and its lanes share the points.
template <typename T, typename C = Compute<T>>
__global__ void __launch_bounds__(kAllThreads, kAllBlocks<C>)
    three_of_all_kernel(const Nearest<T> all, const int64_t blocks) {
  __shared__ Entry<C> entries[kEntries];
  const int size = static_cast<int>(all.size), lane = static_cast<int>(threadIdx.x) % kTeamLanes;
  const int64_t cloud = blockIdx.x / blocks;
  const int64_t i = blockIdx.x % blocks * kTeams + threadIdx.x / kTeamLanes, query = cloud * all.number + i;
  const Point<C> center = point_at(all.queries, i < all.number ? query : cloud * all.number);
  fill_entries(entries, 0, size, [&](int64_t n) { return point_at(all.points, cloud * all.size + n); });
  __syncthreads();
  Three<C> three;
  C least = kInfinity<C>;
  for (int base = 0; base < size; base += kHeld * kTeamLanes) {
    const Entry<C>* const from = entries + base;
    uint32_t near = near_points<kTeamLanes>(size - base, 3, least,
                                            [&](int n) { return squared_distance(from[n].point(), center); });
    for (; near; near &= near - 1)
      three.offer(from[(__ffs(static_cast<int>(near)) - 1) * kTeamLanes + lane].from(center));
  }
  // Each turn finds the first of what the lanes hold, and its lane gives it up. Lane k writes the k-th.
  Neighbour<C> mine;
  for (int k = 0; k < 3; ++k) {
    Neighbour<C> first = three.nearest[0];
#pragma unroll
    for (int distance = 1; distance < kTeamLanes; distance *= 2) {
      const Neighbour<C> other = from_partner(first, distance);
      if (is_before(other, first)) first = other;
    }
    if (three.nearest[0].index == first.index) three.remove_first();
    if (k == 0 || k == lane) mine = first;
  }
  if (lane < 3 && i < all.number) all.write(query, lane, mine);
}

// Finds the three nearest points where clouds fit shared memory and have queries enough. Returns whether they do.
template <typename T>
bool find_three_on_gpu(Call& call, const Nearest<T>& all) {
  using C = Compute<T>;
  constexpr int64_t kLeastQueries = 256, kMostPoints = UINT16_MAX;
  if (all.size <= kEntries) {
    const int64_t blocks = (all.number + kTeams - 1) / kTeams;
    launch(call, three_of_all_kernel<T>, all.clouds * blocks, kAllThreads, 0, all, blocks);
    return true;
  }
  const Gpu gpu;
  const int64_t most = SharedCloud<C>::cells(all.size, gpu.dynamic_bytes());
  if (all.size > kMostPoints || all.number < kLeastQueries || most < all.size) return false;
  const auto kernel = three_nearest_kernel<T>;
  const int64_t bytes = SharedCloud<C>::bytes(all.size) + most * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t slots = std::max(1, blocks_at_once(gpu, kernel, kThreeThreads, bytes));
  const int64_t parts = std::max<int64_t>(1, std::min(slots / all.clouds, (all.number - 1) / kThreeThreads + 1));
  launch(call, kernel, all.clouds * parts, kThreeThreads, bytes, all, parts, static_cast<int>(most));
  return true;
}

}  // namespace msops::points
