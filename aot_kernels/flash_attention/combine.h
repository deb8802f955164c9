// Adds what the splits of the keys have summed (see Attention::splits), in order of the splits.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

constexpr int kCombineThreads = 128;

// A warp takes a row.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const Attention<T> a, int64_t rows) {
  using C = Compute<T>;
  const int lane = threadIdx.x % 32;
  for (int64_t row = (int64_t{blockIdx.x} * kCombineThreads + threadIdx.x) / 32; row < rows;
       row += int64_t{gridDim.x} * (kCombineThreads / 32)) {
    const int64_t i = row % a.queries, h = row / a.queries % a.heads, b = row / a.queries / a.heads;
    const Sequence s = a.sequence(b);
    if (i >= s.queries) continue;
    C max = -INFINITY, sum = 0;
    for (int64_t split = lane; split < a.splits; split += 32) {
      const C of_split = *a.partial_stats(split, b, h, i);
      max = max > of_split ? max : of_split;
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const C other = __shfl_xor_sync(~0u, max, apart);
      max = max > other ? max : other;
    }
    const C base = max == -INFINITY ? 0 : max;
    for (int64_t split = 0; split < a.splits; ++split) {
      const C* const stats = a.partial_stats(split, b, h, i);
      sum += stats[1] * exp(stats[0] - base);
    }
    for (int64_t column = lane; column < a.value_width; column += 32) {
      C out = 0;
      for (int64_t split = 0; split < a.splits; ++split) {
        const C share = exp(*a.partial_stats(split, b, h, i) - base);
        // What a split without keys holds is not read.
        if (share != 0) out += share * a.partial_sums(split, b, h, i)[column];
      }
      a.out[a.of_out.offset(b, h, s.first_query + i) + column] = T(sum == 0 ? 0 : out / sum);
    }
    if (lane == 0) a.lse[a.of_lse.offset(b, h, s.first_query + i)] = max + log(sum);
  }
}

template <typename T>
void launch_combine(cudaStream_t stream, const Attention<T>& a) {
  constexpr int kRows = kCombineThreads / 32;
  const int64_t rows = a.batch * a.heads * a.queries;
  if (rows == 0) return;
  const int64_t blocks = least((rows - 1) / kRows + 1, INT32_MAX);
  combine_kernel<T><<<static_cast<unsigned>(blocks), kCombineThreads, 0, stream>>>(a, rows);
}

}  // namespace msops::flash_attention

#endif
