// Products on any GPU, in any dtype: by rows of the weights for few tokens, else by tiles.
#pragma once

#include "codes.h"

#ifdef __CUDACC__

#include "../common/launch.h"
#include "../common/team.h"
#include "../shared/product/plain.h"

namespace msops::weight_quant_matmul {

constexpr int kLineWarps = 8, kLineTokens = 4, kLineCodes = 8;

// A warp computes an output for up to kLineTokens tokens. Each lane takes kLineCodes neighbouring codes at a time, by
// one load if they are `whole`: rows begin at multiples of as many bytes, and the codes have one scale.
template <typename T>
__global__ void __launch_bounds__(32 * kLineWarps) line_kernel(const __grid_constant__ Products<T> p, bool whole) {
  using C = Compute<T>;
  const Codes<T>& codes = p.weights;
  const int lane = threadIdx.x % 32;
  const int64_t output = static_cast<int64_t>(blockIdx.x) * kLineWarps + threadIdx.x / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.y) * kLineTokens;
  if (output >= p.outputs) return;
  C sums[kLineTokens] = {};
  for (int64_t k = lane * kLineCodes; k < p.deep; k += 32 * kLineCodes) {
    C weights[kLineCodes];
    if (whole) {
      const uint8_t* const from = codes.at(output, k);
      uint2 words = {0, 0};
      if (codes.bits == 8) {
        words = *reinterpret_cast<const uint2*>(from);
      } else {
        words.x = *reinterpret_cast<const uint32_t*>(from);
      }
      const int64_t place = codes.place(output, k);
      const C scale = codes.scale[place], zero = codes.zero[place];
#pragma unroll
      for (int j = 0; j < kLineCodes; ++j) {
        const uint32_t byte = (j < 4 ? words.x : words.y) >> 8 * (j % 4) & 255;
        weights[j] = (codes.number(codes.bits == 8 ? byte : words.x >> 4 * j & 15) - zero) * scale;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kLineCodes; ++j) weights[j] = k + j < p.deep ? codes.value(output, k + j) : C(0);
    }
#pragma unroll
    for (int t = 0; t < kLineTokens; ++t)
#pragma unroll
      for (int j = 0; j < kLineCodes; ++j)
        if (token + t < p.tokens && k + j < p.deep) sums[t] += weights[j] * C(p.x[(token + t) * p.deep + k + j]);
  }
  team_sum(sums, 32);
  if (lane == 0)
    for (int t = 0; t < kLineTokens; ++t)
      if (token + t < p.tokens) p.store(token + t, output, sums[t]);
}

template <typename T>
__global__ void __launch_bounds__(product::kPlainThreads) plain_kernel(const __grid_constant__ Products<T> p) {
  using C = Compute<T>;
  const int64_t down = (p.tokens + product::kPlainSide - 1) / product::kPlainSide;
  product::multiply_plainly<C>(
      blockIdx.x % down * product::kPlainSide, p.tokens, blockIdx.x / down * product::kPlainSide, p.outputs, p.deep,
      p.by_terms, [&](int64_t token, int64_t k) { return C(p.x[token * p.deep + k]); },
      [&](int64_t output, int64_t k) { return p.weight(output, k); },
      [&](int64_t token, int64_t output, C sum) { p.store(token, output, sum); });
}

template <typename T>
void multiply_plainly(Call& call, const Products<T>& p) {
  launch(call, plain_kernel<T>, product::plain_tiles(p.tokens, p.outputs), product::kPlainThreads, 0, p);
}

// Returns false, and launches nothing, if there are many tokens, or the terms do not lie close together.
template <typename T>
bool multiply_lines(Call& call, const Products<T>& p) {
  constexpr int64_t kMost = 16;
  if (p.tokens > kMost || !p.by_terms) return false;
  const Grid grid((p.outputs + kLineWarps - 1) / kLineWarps, (p.tokens + kLineTokens - 1) / kLineTokens);
  const Codes<T>& w = p.weights;
  const bool whole = p.deep % kLineCodes == 0 && w.have_rows_at(w.bits) && !w.groups_rows &&
                     (w.groups == 1 || w.group % kLineCodes == 0);
  return launch(call, line_kernel<T>, grid, 32 * kLineWarps, 0, p, whole), true;
}

}  // namespace msops::weight_quant_matmul

#endif
