// How blocks of the kernels for tensor cores (see mma.h) store what they have summed.
#pragma once

#include "mma_tiles.h"

#ifdef __CUDACC__

namespace msops::paged {

// Stores what the columns from `first` on of a row have summed: sums[e], with the row's maximum and total.
template <typename P, int kN>
__device__ __forceinline__ void store_columns(const P& p, const Item& item, int64_t head, int64_t i, int first,
                                              float (&sums)[kN], float max, float total) {
  const int value_width = static_cast<int>(p.value_width);
  if constexpr (P::kHasCodes) {
#pragma unroll
    for (int e = 0; e < kN; ++e)
      if (first + e < value_width)
        sums[e] = (sums[e] - total * p.of_v.zero(item.head, first + e)) * p.of_v.scale(item.head, first + e);
  }
  if (p.has_results(item.s)) {
    const int64_t token = item.s.first + i;
    const float inverse = total == 0 ? 0 : __fdividef(1, total);
    Half* const to = p.out + (token * p.heads + head) * value_width + first;
#pragma unroll
    for (int e = 0; e < kN; ++e)
      if (first + e < value_width) to[e] = Half(sums[e] * inverse);
    if (first == 0) p.lse[head * p.tokens + token] = max + logf(total);
  } else {
    float* const to = p.partial_sums(item.part, item.s, item.b, i, head) + first;
#pragma unroll
    for (int e = 0; e < kN; ++e)
      if (first + e < value_width) to[e] = sums[e];
    if (first == 0) {
      float* const stats = p.partial_stats(item.part, item.s, item.b, i, head);
      stats[0] = max, stats[1] = total;
    }
  }
}

// Stores the sums of a block whose warps have rows, or columns, of their own.
template <typename S, typename P>
__device__ __forceinline__ void store_own_rows(const P& p, const Item& item, const RowFacts& facts,
                                               const flash::OnlineSoftmax<1>& softmax,
                                               const float (&out)[1][S::kValues / 8][4], int first_value,
                                               float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (facts.token[half] < 0) continue;
#pragma unroll
    for (int n = 0; n < S::kValues / 8; ++n) {
      const int first = first_value + 8 * n + threadIdx.x % 4 * 2;
      if (first >= p.value_width) break;
      float sums[2] = {out[0][n][2 * half], out[0][n][2 * half + 1]};
      store_columns(p, item, facts.head[half], facts.token[half], first, sums, softmax.max[0][half] * factor,
                    softmax.sum[0][half]);
    }
  }
}

// Adds what the warps of a block have summed of the same rows, and stores it. `shared` are their stages.
template <typename S, typename P>
__device__ __forceinline__ void store_merged_rows(const P& p, const Item& item, const flash::OnlineSoftmax<1>& softmax,
                                                  const float (&out)[1][S::kValues / 8][4], float* shared,
                                                  float factor) {
  constexpr int kTeamSums = S::kTeamBytes / 4, kQuads = S::kWidth / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 8 * half + lane / 4;
    if (!item.has(row)) continue;
    float* const to = shared + warp * kTeamSums + row * S::kRowSums;
#pragma unroll
    for (int n = 0; n < S::kWidth / 8; ++n)
      store(to + 8 * n + lane % 4 * 2, Pack<float, 2>{out[0][n][2 * half], out[0][n][2 * half + 1]});
    if (lane % 4 == 0) store(to + S::kWidth, Pack<float, 4>{softmax.max[0][half] * factor, softmax.sum[0][half], 0, 0});
  }
  __syncthreads();
  for (int place = threadIdx.x; place < S::kRows * kQuads; place += S::kThreads) {
    const int row = place / kQuads, first = place % kQuads * 4;
    if (!item.has(row)) break;
    if (first >= p.value_width) continue;
    flash::RowSums sums =
        flash::merged<S::kTeams>(S::kTeams, [&](int of_team, Pack<float, 4>& stats, Pack<float, 4>& columns) {
          const float* const from = shared + of_team * kTeamSums + row * S::kRowSums;
          stats = load<4>(from + S::kWidth), columns = load<4>(from + first);
        });
    store_columns(p, item, item.head_of(p, row), item.token_of(row), first, sums.total, sums.max, sums.sum);
  }
}

}  // namespace msops::paged

#endif
