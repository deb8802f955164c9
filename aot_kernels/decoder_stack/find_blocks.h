// Finds the blocks of a cache that count on a GPU, where a table may lead nowhere.
#pragma once

#ifdef __CUDACC__

#include "../common/launch.h"
#include "stack.h"

namespace msops::decoder_stack {

constexpr int kFindThreads = 256;

// Writes which blocks a text's row of the table names, one after another, of those that its length needs and that
// exist, and how many rows count in them. So nothing sees rows whose block does not exist. A block takes a text.
template <typename T>
__global__ void __launch_bounds__(kFindThreads)
    find_blocks_kernel(const __grid_constant__ Stack<T> s, int32_t* tables, int32_t* counts) {
  constexpr int kWarps = kFindThreads / 32;
  __shared__ int of_warps[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t b = blockIdx.x, rows = s.cached(b), needed = (rows + s.block_size - 1) / s.block_size;
  const int64_t rounds = needed > 0 ? (needed + kFindThreads - 1) / kFindThreads : 1;
  int64_t found = 0;
  bool is_found = false;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t m = round * kFindThreads + threadIdx.x, block = m < needed ? s.tables[b * s.table_columns + m] : -1;
    is_found = 0 <= block && block < s.blocks;
    const unsigned of_warp = __ballot_sync(~0u, is_found);
    __syncthreads();  // others may still read the numbers of the round before
    if (lane == 0) of_warps[warp] = __popc(of_warp);
    __syncthreads();
    int64_t at = found + __popc(of_warp & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      at += w < warp ? of_warps[w] : 0;
      found += of_warps[w];
    }
    if (is_found) tables[b * s.table_columns + at] = static_cast<int32_t>(block);
  }
  // The last needed block may have rows that do not count.
  if (threadIdx.x == (needed > 0 ? (needed - 1) % kFindThreads : 0))
    counts[b] = static_cast<int32_t>(found * s.block_size - (is_found ? needed * s.block_size - rows : 0));
}

// Puts what it finds in the place of the stack's table and lengths.
template <typename T>
void find_blocks(Call& call, Stack<T>& s, int32_t* tables, int32_t* counts) {
  launch(call, find_blocks_kernel<T>, s.batch, kFindThreads, 0, s, tables, counts);
  s.tables.data = tables, s.lengths.data = counts;
  s.tables.are_long = s.lengths.are_long = false;
}

}  // namespace msops::decoder_stack

#endif
