// The other kernels, and the choice among all.
#pragma once

#include "mma.h"
#include "wgmma_few.h"

#ifdef __CUDACC__

#include "../common/gpu/dp4a.h"
#include "../common/sum.h"
#include "../shared/product/plain.h"

namespace msops::int8_matmul {

constexpr int kLineWarps = 8, kLineTokens = 4;
constexpr int64_t kMostOfLines = 16, kFewOfLines = 2;  // tokens, with and without the other kernels of sm_90a

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

__global__ void __launch_bounds__(product::kPlainThreads) plain_kernel(const __grid_constant__ Products p) {
  const int64_t down = (p.tokens + product::kPlainSide - 1) / product::kPlainSide;
  product::multiply_plainly<int32_t>(
      blockIdx.x % down * product::kPlainSide, p.tokens, blockIdx.x / down * product::kPlainSide, p.outputs, p.deep,
      p.by_terms, [&](int64_t token, int64_t k) { return p.x[token * p.deep + k]; },
      [&](int64_t output, int64_t k) { return p.weight_at(output, k); },
      [&](int64_t token, int64_t output, int32_t sum) { p.store(token, output, sum); });
}

inline void multiply_on_gpu(Call& call, const Products& p) {
  const bool has_lines = p.by_terms && p.x_has_packs(16) && p.weight_has_packs(16);
  const auto launch_lines = [&] {
    const Grid grid((p.outputs + kLineWarps - 1) / kLineWarps, (p.tokens + kLineTokens - 1) / kLineTokens);
    launch(call, line_kernel, grid, 32 * kLineWarps, 0, p);
  };
  if (has_lines && p.tokens <= kFewOfLines) return launch_lines();
  if (multiply_by_wgmma(call, p)) return;
  if (has_lines && p.tokens <= kMostOfLines) return launch_lines();
  if (p.by_terms ? launch_tiles<true>(call, p) : launch_tiles<false>(call, p)) return;
  launch(call, plain_kernel, product::plain_tiles(p.tokens, p.outputs), product::kPlainThreads, 0, p);
}

}  // namespace msops::int8_matmul

#endif
