// Which rows a block of a GPU multiplies, found on the GPU, since the host does not know how large groups are.
//
// Row r and group e belong to the tile r / kRows + e of kRows rows. So groups share no tile, and the tiles of group e
// begin with offsets[e] / kRows + e: some tiles are left without rows, but no array of tiles is needed. The rows after
// the last group are as those of one more group.
#pragma once

#include <algorithm>

#include "problem.h"

#ifdef __CUDACC__

#include "../common/launch.h"

namespace msops::grouped_matmul {

// RowTile is the rows from `first` to `end` - 1 of a group; of group `groups` if they belong to none.
struct RowTile {
  int64_t group, first, end;
};

// Returns how many tiles of kRows rows there are, with those that have no rows.
template <int kRows>
int64_t row_tiles(int64_t groups, int64_t rows) {
  return rows / kRows + groups + 1;
}

// Finds a tile. All lanes of a warp call this: each looks at one of 32 groups, until one is left.
template <int kRows>
__device__ __forceinline__ RowTile find_tile(int64_t tile, int64_t groups, int64_t rows, const int64_t* offsets) {
  const auto begin = [&](int64_t group) { return offsets[group] / kRows + group; };
  int64_t group = 0;
  for (int64_t left = groups + 1; left > 1;) {  // groups that may have the tile
    const int64_t apart = (left + 31) / 32, at = group + threadIdx.x % 32 * apart;
    const bool is_before = at < group + left && begin(at) <= tile;
    const int64_t chosen = (__popc(__ballot_sync(~0u, is_before)) - 1) * apart;
    left = apart < left - chosen ? apart : left - chosen;
    group += chosen;
  }
  const int64_t first = offsets[group] + (tile - begin(group)) * kRows;
  const int64_t end = group < groups ? offsets[group + 1] : rows;
  return {group, first, first + kRows < end ? first + kRows : end};
}

// Writes where groups begin, and where the last one ends. A negative size counts as 0, and groups end at `rows`. One
// block adds up sizes, kThreads at a time.
constexpr int kOffsetThreads = 512;
inline __device__ int64_t limited(int64_t size, int64_t rows) { return size < 0 ? 0 : size < rows ? size : rows; }

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(int64_t groups, int64_t rows, Integers sizes, int64_t* offsets) {
  __shared__ int64_t sums[kThreads];
  const int thread = threadIdx.x;
  int64_t before = 0;
  for (int64_t first = 0; first < groups; first += kThreads) {
    const int64_t group = first + thread;
    sums[thread] = group < groups ? limited(sizes[group], rows) : 0;
    __syncthreads();
    for (int apart = 1; apart < kThreads; apart *= 2) {
      const int64_t other = thread >= apart ? sums[thread - apart] : 0;
      __syncthreads();
      sums[thread] = limited(sums[thread] + other, rows);
      __syncthreads();
    }
    if (group < groups) offsets[group + 1] = limited(before + sums[thread], rows);
    before = limited(before + sums[kThreads - 1], rows);
    __syncthreads();
  }
  if (thread == 0) offsets[0] = 0;
}

}  // namespace msops::grouped_matmul

#endif
