// Adds what the splits of the keys have summed (see Attention::splits), in an order that the number of splits gives.
#pragma once

#include "../common/launch.h"
#include "../common/sum.h"
#include "problem.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

constexpr int kCombineWarps = 4, kCombineThreads = 32 * kCombineWarps;

// `parts` warps of a block, 1 or all, take a row of up to 32 kColumns elements. Each adds every `parts`-th split, and
// the first one adds their sums.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const Attention<T> a, int64_t rows, int parts) {
  using C = Compute<T>;
  __shared__ C shared[kCombineWarps][kColumns][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % parts,
            rows_of_block = kCombineWarps / parts;
  const int splits = static_cast<int>(a.splits), width = static_cast<int>(a.value_width);
  for (int64_t row = int64_t{blockIdx.x} * rows_of_block + warp / parts; row < rows;
       row += int64_t{gridDim.x} * rows_of_block) {
    const int64_t i = row % a.queries, h = row / a.queries % a.heads, b = row / a.queries / a.heads;
    if (i >= a.sequence(b).queries) continue;
    C max = -INFINITY;
    for (int split = lane; split < splits; split += 32) {
      const C of_split = *a.partial_stats(split, b, h, i);
      max = max > of_split ? max : of_split;
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const C other = __shfl_xor_sync(~0u, max, apart);
      max = max > other ? max : other;
    }
    const C base = max == -INFINITY ? 0 : max;
    const C* const sums = a.partial_sums(0, b, h, i);
    const int64_t stride = a.partial_sums(1, b, h, i) - sums;
    C sum = 0, out[kColumns] = {};
    for (int first = 0; first < splits; first += 32) {
      C share = 0;
      if (first + lane < splits) {
        const C* const stats = a.partial_stats(first + lane, b, h, i);
        share = exp(stats[0] - base);
        sum += stats[1] * share;
      }
      const int here = splits - first < 32 ? splits - first : 32;
#pragma unroll 4
      for (int k = part; k < here; k += parts) {
        const C of_split = __shfl_sync(~0u, share, k);
        const C* const from = sums + (first + k) * stride;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = lane + 32 * c;
          // What a split without keys holds is not read.
          out[c] += of_split * (of_split != 0 && column < width ? from[column] : C(0));
        }
      }
    }
    sum = team_sum<32>(sum);
    if (parts > 1) {
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) shared[warp][c][lane] = out[c];
      __syncthreads();
      if (part > 0) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        for (int other = 1; other < kCombineWarps; ++other) out[c] += shared[other][c][lane];
    }
    T* const to = a.out + a.of_out.offset(b, h, i);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (lane + 32 * c < width) to[lane + 32 * c] = T(sum == 0 ? 0 : out[c] / sum);
    if (lane == 0) a.lse[a.of_lse.offset(b, h, i)] = max + log(sum);
  }
}

template <typename T>
void launch_combine(Call& call, const Attention<T>& a) {
  const int64_t rows = a.batch * a.heads * a.queries;
  const int parts = a.splits > 8 ? kCombineWarps : 1, rows_of_block = kCombineWarps / parts;
  const int64_t blocks = least(parts_of(rows, rows_of_block), INT32_MAX);
  const auto kernel = a.value_width <= 256 ? combine_kernel<T, 8> : combine_kernel<T, 16>;
  launch(call, kernel, blocks, kCombineThreads, 0, a, rows, parts);
}

}  // namespace msops::flash_attention

#endif
