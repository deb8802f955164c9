// Sorts clouds into cells on a GPU, and lets a warp visit cells.
#pragma once

#include "../../common/scatter.h"
#include "../../common/sum.h"
#include "cells.h"

namespace msops::points {

constexpr int kBoxThreads = 1024;

// Returns the least or the greatest of the warp's numbers, to all lanes.
template <bool kLeast, typename C>
__device__ __forceinline__ C extreme_of_warp(C mine) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const C other = __shfl_xor_sync(~0u, mine, distance);
    if (kLeast ? other < mine : other > mine) mine = other;
  }
  return mine;
}

// Chooses the cells as Lattice::of does: the lanes of a warp try 32 lengths at once.
template <typename C>
__device__ __forceinline__ Lattice<C> lattice_of_warp(const C (&low)[3], const C (&high)[3], int64_t most, C least) {
  Lattice<C> all{{low[0], low[1], low[2]}, C(0), {1, 1, 1}};
  if (!Lattice<C>::is_divided(low, high)) return all;
  C length = Lattice<C>::least_length(low, high, most, least), growth = 1;
  const C shortest = length;
  for (int i = 0; i < 32; ++i) {
    if (i == static_cast<int>(threadIdx.x % 32)) length = shortest * growth;
    growth *= Lattice<C>::kGrowth;
  }
  for (;;) {
    const unsigned few = __ballot_sync(~0u, all.divide(high, length) <= static_cast<double>(most));
    if (few) {
      const int first = __ffs(static_cast<int>(few)) - 1;
      all.inverse = __shfl_sync(~0u, all.inverse, first);
      for (int axis = 0; axis < 3; ++axis) all.counts[axis] = __shfl_sync(~0u, all.counts[axis], first);
      return all;
    }
    length *= growth;
  }
}

// A block finds the lattice of the points at(i), i < length. It is there for all threads after a barrier.
template <int kThreads, typename C, typename At>
__device__ __forceinline__ void lattice_of_block(int64_t length, const At& at, C (&of_warps)[6][kThreads / 32],
                                                 int64_t most, C least, Lattice<C>& lattice) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  C low[3] = {kInfinity<C>, kInfinity<C>, kInfinity<C>}, high[3] = {-low[0], -low[1], -low[2]};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    const Point<C> p = at(i);
    if (is_finite(p)) grow(low, high, p);
  }
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    low[axis] = extreme_of_warp<true>(low[axis]);
    high[axis] = extreme_of_warp<false>(high[axis]);
    if (lane == 0) {
      of_warps[axis][warp] = low[axis];
      of_warps[3 + axis][warp] = high[axis];
    }
  }
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    low[axis] = extreme_of_warp<true>(of_warps[axis][lane % (kThreads / 32)]);
    high[axis] = extreme_of_warp<false>(of_warps[3 + axis][lane % (kThreads / 32)]);
  }
  const Lattice<C> chosen = lattice_of_warp(low, high, most, least);
  if (lane == 0) lattice = chosen;
}

// A block finds the lattice of a cloud, and sets the counts of its cells to 0.
template <typename Clouds>
__global__ void __launch_bounds__(kBoxThreads) lattice_kernel(const Clouds all) {
  using C = typename Clouds::C;
  __shared__ C of_warps[6][kBoxThreads / 32];
  const int64_t cloud = blockIdx.x;
  for (int64_t cell = threadIdx.x; cell < all.most; cell += kBoxThreads) all.ends[cloud * all.most + cell] = 0;
  lattice_of_block<kBoxThreads>(
      all.length(cloud), [&](int64_t i) { return all.point(cloud, i); }, of_warps, all.most, all.least,
      all.lattice(cloud));
}

// Counts a point in its cell or, if kPlaces, puts it where the cell's points are.
template <bool kPlaces, typename Clouds>
struct SortOnGpu {
  Clouds all;

  template <typename I>
  MSOPS_BOTH void operator()([[maybe_unused]] I i) const {
#ifdef __CUDA_ARCH__
    const int64_t cloud = i / all.size, point = i % all.size;
    if (point >= all.length(cloud)) return;
    const int64_t cell = all.lattice(cloud).number_of(all.point(cloud, point));
    const int32_t before = atomicAdd(all.ends + cloud * all.most + cell, 1);
    if (kPlaces) place(all, cloud, point, before);
#endif
  }
};

// Sorts clouds of at least kScanParts points. The order of a cell's points depends on the run; what searches find does
// not.
template <typename Clouds>
void sort_on_gpu(Call& call, const Clouds& all) {
  constexpr int64_t kScanParts = 64;
  if (all.clouds == 0) return;
  launch(call, lattice_kernel<Clouds>, all.clouds, kBoxThreads, 0, all);
  const int64_t points = all.clouds * all.size;
  on_gpu_with<int64_t>(call, points, SortOnGpu<false, Clouds>{all});
  Scan places{all.clouds, all.most, ScanOrder::kAlong};
  places.exclusive = true;
  places.parts = kScanParts;
  scan(call, places, PlacesOfCounts{all.most, all.ends}, all.order);  // `order` is not needed yet
  on_gpu_with<int64_t>(call, points, SortOnGpu<true, Clouds>{all});
}

constexpr int kSearchThreads = 128;

// Whether it pays to sort the clouds.
inline bool pays_to_sort_on_gpu(int64_t size, int64_t queries) { return size >= 2048 && queries >= 32; }

// Launches a kernel whose warps take a query of `task` each.
template <typename Task, typename Clouds>
void launch_search(Call& call, void (*kernel)(Task, Clouds, int64_t), const Task& task, const Clouds& cells) {
  constexpr int64_t kWarps = kSearchThreads / 32, kMost = int64_t{1} << 30;
  const int64_t queries = task.clouds * task.number;
  for (int64_t first = 0; first < queries && call.ok(); first += kMost * kWarps) {
    const int64_t blocks = std::min(kMost, (queries - first - 1) / kWarps + 1);
    launch(call, kernel, blocks, kSearchThreads, 0, task, cells, first);
  }
}

// Calls f(i, inside) for the sorted points of cells in `box` without those of `done`, 32 at a time, one for each lane
// that is `inside`. All lanes of a warp call this with the same boxes. Lanes find 32 rows' points at once, and share
// these evenly.
template <typename C, typename F>
__device__ __forceinline__ void warp_for_box(const Cells<C>& cells, const CellBox& box, const CellBox& done,
                                             const F& f) {
  const int lane = threadIdx.x % 32;
  const int64_t runs = 2 * box.rows();
  for (int64_t first = 0; first < runs; first += 32) {
    const int64_t mine = first + lane;
    int32_t from = 0, to = 0;
    if (mine < runs) cells.run(box, done, mine / 2, static_cast<int>(mine % 2), from, to);
    const int64_t end = warp_prefix_sum<int64_t>(to - from);  // of the run's points among those of the 32 runs
    const int64_t shift = from - (end - (to - from)), total = __shfl_sync(~0u, end, 31);
    for (int64_t base = 0; base < total; base += 32) {
      const int64_t point = base + lane;
      int run = 0;  // how many runs end before the point
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(~0u, end, run + step - 1) <= point) run += step;
      const int64_t i = point + __shfl_sync(~0u, shift, run);
      f(i, point < total);
    }
  }
}

}  // namespace msops::points
