// Products on any GPU, in any dtype. Some tokens are multiplied at once.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

#include "../common/launch.h"
#include "../common/pack.h"
#include "../common/sum.h"

namespace msops::gguf_matmul {

constexpr int kAtOnce = 4, kPlainWarps = 8;
constexpr int64_t kMostPlain = 8;  // tokens of float32, for which tensor cores would not pay

// Returns four neighbours, of which each is aligned, or all are.
template <typename T>
__device__ __forceinline__ Pack<T, 4> load_four(const T* from, bool has_packs) {
  if (has_packs) return load<4>(from);
  return {from[0], from[1], from[2], from[3]};
}

// A warp takes a row of the weight: its lanes read neighbouring codes, four lanes those of 32 numbers.
template <typename F, typename T>
__global__ void __launch_bounds__(32 * kPlainWarps) row_kernel(const __grid_constant__ Products<T> p, bool has_packs) {
  using C = Compute<T>;
  const int64_t across = (p.columns() + kPlainWarps - 1) / kPlainWarps;
  const int64_t row = blockIdx.x % across * kPlainWarps + threadIdx.x / 32, token = blockIdx.x / across * kAtOnce;
  const int lane = threadIdx.x % 32;
  if (row >= p.columns()) return;
  C sums[kAtOnce] = {};
  for (int64_t k = lane / 4 * 32; k < p.deep(); k += 256) {
    const uint8_t* const block = p.weight.template block<F>(row, k);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half * 16 + lane % 4 * 4;
      float numbers[4];
      gguf::unpack_four<F>(block, static_cast<int>(k % F::kNumbers) + at, numbers);
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        if (token + t >= p.tokens) break;
        const Pack<T, 4> x = load_four(p.x + (token + t) * p.deep() + k + at, has_packs);
        C four(0);  // a sum of sums has smaller errors
#pragma unroll
        for (int i = 0; i < 4; ++i) four += C(numbers[i]) * C(x.values[i]);
        sums[t] += four;
      }
    }
  }
  team_sum(sums, 32);
  for (int t = 0; t < kAtOnce; ++t)
    if (lane == 0 && token + t < p.tokens) assign(p.out[(token + t) * p.columns() + row], sums[t] + p.bias[row]);
}

template <typename F, typename T>
void multiply_plainly(Call& call, const Products<T>& p) {
  const int64_t across = (p.columns() + kPlainWarps - 1) / kPlainWarps;
  const bool has_packs = reinterpret_cast<uintptr_t>(p.x) % alignof(Pack<T, 4>) == 0;
  launch(call, row_kernel<F, T>, across * ((p.tokens + kAtOnce - 1) / kAtOnce), 32 * kPlainWarps, 0, p, has_packs);
}

// A thread takes four columns, over all of the weight's rows.
template <typename F, typename T>
__global__ void __launch_bounds__(128) column_kernel(const __grid_constant__ Gradients<T> p) {
  using C = Compute<T>;
  const int64_t across = (p.columns() / 4 + 127) / 128;
  const int64_t column = (blockIdx.x % across * 128 + threadIdx.x) * 4, token = blockIdx.x / across * kAtOnce;
  if (column >= p.columns()) return;
  C sums[kAtOnce][4] = {};
#pragma unroll 2
  for (int64_t m = 0; m < p.deep(); ++m) {
    float numbers[4];
    gguf::unpack_four<F>(p.weight.template block<F>(m, column), static_cast<int>(column % F::kNumbers), numbers);
#pragma unroll
    for (int t = 0; t < kAtOnce; ++t) {
      if (token + t >= p.tokens) break;
      const C factor(p.x[(token + t) * p.deep() + m]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] += factor * C(numbers[i]);
    }
  }
  for (int t = 0; t < kAtOnce && token + t < p.tokens; ++t)
    for (int i = 0; i < 4; ++i) assign(p.out[(token + t) * p.columns() + column + i], sums[t][i]);
}

template <typename F, typename T>
void multiply_plainly(Call& call, const Gradients<T>& p) {
  const int64_t across = (p.columns() / 4 + 127) / 128;
  launch(call, column_kernel<F, T>, across * ((p.tokens + kAtOnce - 1) / kAtOnce), 128, 0, p);
}

}  // namespace msops::gguf_matmul

#endif
