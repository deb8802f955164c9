// Which part of a result a block of a GPU computes, found on the GPU, since the host does not know how large groups
// are.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

#include "../common/launch.h"

namespace msops::grouped_matmul {

// Tiles of a result are as many as `down` times `across`. Blocks that run at once take neighbours, and so read the same
// rows and columns, which the L2 cache then has: they go down through kAtOnce columns of tiles before the next ones.
struct TileOrder {
  static constexpr int64_t kAtOnce = 8;
  int64_t down, across;

  MSOPS_BOTH int64_t count() const { return down * across; }
  __device__ __forceinline__ void find(int64_t number, int64_t& row, int64_t& column) const {
    const int64_t first = number / (down * kAtOnce) * kAtOnce, rest = number - first * down;
    const int64_t wide = across - first < kAtOnce ? across - first : kAtOnce;
    row = rest / wide, column = first + rest % wide;
  }
};

MSOPS_BOTH int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }
__device__ __forceinline__ int limited(int64_t n, int most) { return n < most ? static_cast<int>(n) : most; }

// Return the order of a result's tiles of kTileRows rows.
template <int kColumns, typename T>
__device__ __forceinline__ TileOrder order_of(const RowProducts<T>& p) {
  return {p.groups.first_tile(p.groups.count + 1), parts(p.columns, kColumns)};
}
template <int kColumns, typename T>
MSOPS_BOTH TileOrder order_of(const WeightProducts<T>& p) {
  return {p.groups.count * parts(p.height, kTileRows), parts(p.columns, kColumns)};
}

// Return how many tiles there are at most, whatever the sizes of groups are.
template <int kColumns, typename T>
int64_t most_tiles(const RowProducts<T>& p) {
  return (p.groups.rows / kTileRows + p.groups.count + 1) * parts(p.columns, kColumns);
}
template <int kColumns, typename T>
int64_t most_tiles(const WeightProducts<T>& p) {
  return order_of<kColumns>(p).count();
}

// Returns the last group that begins with this tile or before. All lanes of a warp call this: each looks at one of 32
// groups, until one is left.
__device__ __forceinline__ int64_t group_of(const Groups& groups, int64_t tile) {
  int64_t group = 0;
  for (int64_t left = groups.count + 1; left > 1;) {  // groups that may be it
    const int64_t apart = parts(left, 32), other = group + threadIdx.x % 32 * apart;
    const bool is_before = other < group + left && groups.first_tile(other) <= tile;
    const int64_t chosen = (__popc(__ballot_sync(~0u, is_before)) - 1) * apart;
    left = apart < left - chosen ? apart : left - chosen;
    group += chosen;
  }
  return group;
}

// Return the place of a tile, which has no rows if there are fewer tiles. All lanes of a warp call these.
template <int kColumns, typename T>
__device__ __forceinline__ Place find_place(const RowProducts<T>& p, int64_t number) {
  const TileOrder order = order_of<kColumns>(p);
  if (number >= order.count()) return {};
  int64_t tile, column;
  order.find(number, tile, column);
  const int64_t group = group_of(p.groups, tile);
  const int64_t row = (tile - p.groups.first_tile(group)) * kTileRows;
  column *= kColumns;
  return {group,
          p.groups.begin(group) + row,
          column,
          limited(p.groups.size(group) - row, kTileRows),
          limited(p.columns - column, kColumns),
          0,
          group < p.groups.count ? p.deep : 0};
}
template <int kColumns, typename T>
__device__ __forceinline__ Place find_place(const WeightProducts<T>& p, int64_t number) {
  int64_t tile, column;
  order_of<kColumns>(p).find(number, tile, column);
  const int64_t down = parts(p.height, kTileRows), group = tile / down, row = tile % down * kTileRows;
  column *= kColumns;
  return {group,
          row,
          column,
          limited(p.height - row, kTileRows),
          limited(p.columns - column, kColumns),
          p.groups.begin(group),
          p.groups.size(group)};
}

// Writes the bounds of groups (see Groups). A negative size counts as 0, and groups end at the last row. One block adds
// up as many sizes as it has threads at a time.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bounds_kernel(Groups groups, Integers sizes, int64_t* bounds) {
  __shared__ int64_t sums[kThreads];
  const int thread = threadIdx.x;
  const auto within = [&](int64_t row) { return row < 0 ? 0 : row < groups.rows ? row : groups.rows; };
  // Adds the numbers of the threads before to `begin`, and those of all threads to `next`, which they have in common.
  const auto scan = [&](int64_t number, int64_t& begin, int64_t& next) {
    sums[thread] = number;
    __syncthreads();
    for (int apart = 1; apart < kThreads; apart *= 2) {
      const int64_t other = thread >= apart ? sums[thread - apart] : 0;
      __syncthreads();
      sums[thread] += other;
      __syncthreads();
    }
    begin = next + (thread > 0 ? sums[thread - 1] : 0);
    next += sums[kThreads - 1];
    __syncthreads();
  };
  int64_t next_row = 0, next_tile = 0;
  for (int64_t first = 0; first < groups.count + 2; first += kThreads) {
    const int64_t group = first + thread;
    const int64_t size = group < groups.count ? within(sizes[group]) : group == groups.count ? groups.rows : 0;
    int64_t row, tile;
    scan(size, row, next_row);
    scan(parts(within(row + size) - within(row), kTileRows), tile, next_tile);
    if (group < groups.count + 2) bounds[group] = within(row), bounds[groups.count + 2 + group] = tile;
    next_row = within(next_row);
  }
}

}  // namespace msops::grouped_matmul

#endif
