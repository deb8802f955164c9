// Which part of a result a block of a GPU computes, found on the GPU, since the host does not know how large groups
// are.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

#include "../common/gpu/griddepcontrol.h"
#include "../common/launch.h"

namespace msops::grouped_matmul {

// Tiles of a group's result are as many as `down` times `across`. Blocks that run at once take neighbours, and so read
// the same rows and columns, which the L2 cache then has: they go down through kAtOnce columns of tiles before the next
// ones.
struct TileOrder {
  static constexpr int64_t kAtOnce = 8;
  int64_t down, across;

  __device__ __forceinline__ void find(int64_t number, int64_t& row, int64_t& column) const {
    const int64_t first = number / (down * kAtOnce) * kAtOnce, rest = number - first * down;
    const int64_t wide = across - first < kAtOnce ? across - first : kAtOnce;
    row = rest / wide, column = first + rest % wide;
  }
};

MSOPS_BOTH int64_t parts(int64_t n, int64_t of) { return (n + of - 1) / of; }
__device__ __forceinline__ int limited(int64_t n, int most) { return n < most ? static_cast<int>(n) : most; }

// Return how many tiles a result has.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ int64_t tiles_of(const RowProducts<T>& p) {
  return p.groups.template first_tile<kRows>(p.groups.count + 1) * parts(p.columns, kColumns);
}
template <int kRows, int kColumns, typename T>
MSOPS_BOTH int64_t tiles_of(const WeightProducts<T>& p) {
  return p.groups.count * parts(p.height, kRows) * parts(p.columns, kColumns);
}

// Return how many tiles there are at most, whatever the sizes of groups are.
template <int kRows, int kColumns, typename T>
int64_t most_tiles(const RowProducts<T>& p) {
  return (p.groups.rows / kRows + p.groups.count + 1) * parts(p.columns, kColumns);
}
template <int kRows, int kColumns, typename T>
int64_t most_tiles(const WeightProducts<T>& p) {
  return tiles_of<kRows, kColumns>(p);
}

// Returns the last group whose tiles, down its rows, begin with this one or before. All lanes of a warp call this: each
// looks at one of 32 groups, until one is left.
template <int kRows>
__device__ __forceinline__ int64_t group_of(const Groups& groups, int64_t tile) {
  int64_t group = 0;
  for (int64_t left = groups.count + 1; left > 1;) {  // groups that may be it
    const int64_t apart = parts(left, 32), other = group + threadIdx.x % 32 * apart;
    const bool is_before = other < group + left && groups.template first_tile<kRows>(other) <= tile;
    const int64_t chosen = (__popc(__ballot_sync(~0u, is_before)) - 1) * apart;
    left = apart < left - chosen ? apart : left - chosen;
    group += chosen;
  }
  return group;
}

// Return the place of a tile, which has no rows if there are fewer tiles. All tiles of a group come before those of the
// next one. All lanes of a warp call these.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ Place find_place(const RowProducts<T>& p, int64_t number) {
  if (number >= tiles_of<kRows, kColumns>(p)) return {};
  const Groups& groups = p.groups;
  const int64_t across = parts(p.columns, kColumns), group = group_of<kRows>(groups, number / across);
  const int64_t first = groups.template first_tile<kRows>(group);
  int64_t row, column;
  TileOrder{groups.template first_tile<kRows>(group + 1) - first, across}.find(number - first * across, row, column);
  row *= kRows, column *= kColumns;
  return {group,
          groups.begin(group) + row,
          column,
          limited(groups.size(group) - row, kRows),
          limited(p.columns - column, kColumns),
          0,
          group < groups.count ? p.deep : 0};
}
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ Place find_place(const WeightProducts<T>& p, int64_t number) {
  const TileOrder order{parts(p.height, kRows), parts(p.columns, kColumns)};
  const int64_t of_group = order.down * order.across, group = number / of_group;
  int64_t row, column;
  order.find(number - group * of_group, row, column);
  row *= kRows, column *= kColumns;
  return {group,
          row,
          column,
          limited(p.height - row, kRows),
          limited(p.columns - column, kColumns),
          p.groups.begin(group),
          p.groups.size(group)};
}

// Writes the bounds of groups (see Groups). A negative size counts as 0, and groups end at the last row. One block adds
// up as many sizes as it has threads at a time.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bounds_kernel(Groups groups, Integers sizes, int64_t* bounds) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t sums[kWarps];
  griddepcontrol_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto within = [&](int64_t row) { return row < 0 ? 0 : row < groups.rows ? row : groups.rows; };
  // Adds the numbers of the threads before to `begin`, and those of all threads to `next`, which they have in common.
  const auto scan = [&](int64_t number, int64_t& begin, int64_t& next) {
    int64_t sum = number;
    for (int apart = 1; apart < 32; apart *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, apart);
      if (lane >= apart) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    begin = next + sum - number;
    for (int i = 0; i < kWarps; ++i) next += sums[i], begin += i < warp ? sums[i] : 0;
    __syncthreads();
  };
  int64_t next_row = 0, next_tile = 0, next_large = 0;
  for (int64_t first = 0; first < groups.count + 2; first += kThreads) {
    const int64_t group = first + threadIdx.x;
    const int64_t size = group < groups.count ? within(sizes[group]) : group == groups.count ? groups.rows : 0;
    int64_t row, tile, large;
    scan(size, row, next_row);
    const int64_t inside = within(row + size) - within(row);
    scan(parts(inside, kTileRows), tile, next_tile);
    scan(parts(inside, 2 * kTileRows), large, next_large);
    if (group < groups.count + 2) {
      int64_t* const to = bounds + group;
      to[0] = within(row), to[groups.count + 2] = tile, to[2 * (groups.count + 2)] = large;
    }
    next_row = within(next_row);
  }
}

}  // namespace msops::grouped_matmul

#endif
