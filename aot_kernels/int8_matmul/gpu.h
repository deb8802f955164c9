// The other kernels, and the choice among all.
#pragma once

#include "mma.h"

#ifdef __CUDACC__

#include "../common/gpu/dp4a.h"
#include "../common/sum.h"

namespace msops::int8_matmul {

constexpr int kLineWarps = 8, kLineTokens = 4;
constexpr int64_t kMostOfLines = 16;  // tokens

// A warp computes an output for up to kLineTokens tokens, by dp4a.
__global__ void __launch_bounds__(32 * kLineWarps) line_kernel(const __grid_constant__ Products p) {
  const int lane = threadIdx.x % 32;
  const int64_t output = static_cast<int64_t>(blockIdx.x) * kLineWarps + threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.y) * kLineTokens;
  if (output >= p.outputs) return;
  int32_t sums[kLineTokens] = {};
#pragma unroll 2
  for (int64_t k = 16 * lane; k < p.deep; k += 512) {
    uint32_t weights[4];
    ld_global_v4(weights, p.weight + output * p.deep + k);
#pragma unroll
    for (int t = 0; t < kLineTokens; ++t) {
      if (token + t >= p.tokens) break;
      const uint4 x = *reinterpret_cast<const uint4*>(p.x + (token + t) * p.deep + k);
      sums[t] = dp4a(weights[3], x.w, dp4a(weights[2], x.z, dp4a(weights[1], x.y, dp4a(weights[0], x.x, sums[t]))));
    }
  }
  team_sum(sums, 32);
#pragma unroll
  for (int t = 0; t < kLineTokens; ++t)
    if (lane == 0 && token + t < p.tokens) p.store(token + t, output, sums[t]);
}

// A block takes a tile of 64 x 64 sums. The blocks have one dimension, since a second one would have 65535 at most.
__global__ void __launch_bounds__(256) plain_kernel(const __grid_constant__ Products p) {
  constexpr int kTile = 64, kTerms = 16, kEach = 4;  // each thread has 4 x 4 sums
  __shared__ int32_t x[kTerms][kTile + 1], w[kTerms][kTile + 1];
  const int64_t down = (p.tokens + kTile - 1) / kTile;
  const int64_t token = blockIdx.x % down * kTile, output = blockIdx.x / down * kTile;
  const int r = threadIdx.x / 16, c = threadIdx.x % 16;
  int32_t sums[kEach][kEach] = {};
  for (int64_t k = 0; k < p.deep; k += kTerms) {
    for (int i = threadIdx.x; i < kTile * kTerms; i += 256) {
      const int at = i / kTerms, d = i % kTerms;
      x[d][at] = token + at < p.tokens && k + d < p.deep ? p.x[(token + at) * p.deep + k + d] : 0;
      const int j = p.by_terms ? at : i % kTile, e = p.by_terms ? d : i / kTile;
      w[e][j] = output + j < p.outputs && k + e < p.deep ? p.weight_at(output + j, k + e) : 0;
    }
    __syncthreads();
    for (int d = 0; d < kTerms; ++d)
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) sums[i][j] += x[d][r + 16 * i] * w[d][c + 16 * j];
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) {
      const int64_t at = token + r + 16 * i, to = output + c + 16 * j;
      if (at < p.tokens && to < p.outputs) p.store(at, to, sums[i][j]);
    }
}

inline void multiply_on_gpu(Call& call, const Products& p) {
  if (p.tokens <= kMostOfLines && p.by_terms && p.x_has_packs(16) && p.weight_has_packs(16)) {
    const Grid grid((p.outputs + kLineWarps - 1) / kLineWarps, (p.tokens + kLineTokens - 1) / kLineTokens);
    return launch(call, line_kernel, grid, 32 * kLineWarps, 0, p);
  }
  if (p.by_terms ? launch_tiles<true>(call, p) : launch_tiles<false>(call, p)) return;
  launch(call, plain_kernel, (p.tokens + 63) / 64 * ((p.outputs + 63) / 64), 256, 0, p);
}

}  // namespace msops::int8_matmul

#endif
