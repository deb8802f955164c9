// Which part of a result a block of a GPU computes, found on the GPU, since the host does not know how large groups
// are.
//
// Row r of group e belongs to the tile r / kRows + e of kRows rows. So groups share no tile, and the tiles of group e
// begin with offsets[e] / kRows + e: some tiles are left without rows, but no array of tiles is needed. The rows after
// the last group are as those of one more group.
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

template <int kRows, int kColumns, typename T>
MSOPS_BOTH TileOrder order_of(const RowProducts<T>& p) {
  return {p.rows / kRows + p.groups + 1, parts(p.columns, kColumns)};
}
template <int kRows, int kColumns, typename T>
MSOPS_BOTH TileOrder order_of(const WeightProducts<T>& p) {
  return {p.groups * parts(p.height, kRows), parts(p.columns, kColumns)};
}

// Returns the place of a tile, which may have no rows. All lanes of a warp call this: each looks at one of 32 groups,
// until one group is left.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ Place find_place(const RowProducts<T>& p, int64_t number) {
  int64_t tile, column, group = 0;
  order_of<kRows, kColumns>(p).find(number, tile, column);
  const auto begin = [&](int64_t e) { return p.offsets[e] / kRows + e; };
  for (int64_t left = p.groups + 1; left > 1;) {  // groups that may have the tile
    const int64_t apart = parts(left, 32), at = group + threadIdx.x % 32 * apart;
    const bool is_before = at < group + left && begin(at) <= tile;
    const int64_t chosen = (__popc(__ballot_sync(~0u, is_before)) - 1) * apart;
    left = apart < left - chosen ? apart : left - chosen;
    group += chosen;
  }
  const int64_t row = p.offsets[group] + (tile - begin(group)) * kRows;
  const int64_t end = group < p.groups ? p.offsets[group + 1] : p.rows;
  column *= kColumns;
  return {group,
          row,
          column,
          limited(end - row, kRows),
          limited(p.columns - column, kColumns),
          0,
          group < p.groups ? p.deep : 0};
}

template <int kRows, int kColumns, typename T>
__device__ __forceinline__ Place find_place(const WeightProducts<T>& p, int64_t number) {
  int64_t tile, column;
  order_of<kRows, kColumns>(p).find(number, tile, column);
  const int64_t down = parts(p.height, kRows), group = tile / down, row = tile % down * kRows, first = p.offsets[group];
  column *= kColumns;
  return {group,
          row,
          column,
          limited(p.height - row, kRows),
          limited(p.columns - column, kColumns),
          first,
          p.offsets[group + 1] - first};
}

// Writes where groups begin, and where the last one ends. A negative size counts as 0, and groups end at `rows`. One
// block adds up as many sizes as it has threads at a time.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(int64_t groups, int64_t rows, Integers sizes, int64_t* offsets) {
  __shared__ int64_t sums[kThreads];
  const int thread = threadIdx.x;
  const auto within = [&](int64_t n) { return n < 0 ? 0 : n < rows ? n : rows; };
  int64_t before = 0;
  if (thread == 0) offsets[0] = 0;
  for (int64_t first = 0; first < groups; first += kThreads) {
    const int64_t group = first + thread;
    sums[thread] = group < groups ? within(sizes[group]) : 0;
    __syncthreads();
    for (int apart = 1; apart < kThreads; apart *= 2) {
      const int64_t other = thread >= apart ? sums[thread - apart] : 0;
      __syncthreads();
      sums[thread] = within(sums[thread] + other);
      __syncthreads();
    }
    if (group < groups) offsets[group + 1] = within(before + sums[thread]);
    before = within(before + sums[kThreads - 1]);
    __syncthreads();
  }
}

}  // namespace msops::grouped_matmul

#endif
