// Products of matrices on a GPU:
//
//   case                         kernel           why
//   cuBLAS is in the process     its own          tensor cores
//   else                         product_kernel   any GPU, any dtype
#pragma once

#ifdef __CUDACC__

#include "../../common/gpu/cublas.h"
#include "../../common/launch.h"

namespace msops::product {

// out (n, m) = numbers (n, deep) times weights (m, deep), or out plus that. A block takes a tile of 64 x 64.
template <typename T>
__global__ void __launch_bounds__(256)
    product_kernel(int64_t n, int64_t m, int64_t deep, const T* numbers, const T* weights, T* out, bool adds) {
  using C = Compute<T>;
  constexpr int kTile = 64, kDeep = 16, kEach = 4;  // each thread has 4 x 4 sums
  __shared__ C x[kDeep][kTile + 1], w[kDeep][kTile + 1];
  const int64_t row = int64_t{blockIdx.y} * kTile, column = int64_t{blockIdx.x} * kTile;
  const int r = threadIdx.x / 16, c = threadIdx.x % 16;
  C sums[kEach][kEach] = {};
  for (int64_t k = 0; k < deep; k += kDeep) {
    for (int i = threadIdx.x; i < kTile * kDeep; i += 256) {
      const int at = i / kDeep, d = i % kDeep;
      x[d][at] = row + at < n && k + d < deep ? C(numbers[(row + at) * deep + k + d]) : C(0);
      w[d][at] = column + at < m && k + d < deep ? C(weights[(column + at) * deep + k + d]) : C(0);
    }
    __syncthreads();
    for (int d = 0; d < kDeep; ++d)
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) sums[i][j] += x[d][r + 16 * i] * w[d][c + 16 * j];
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) {
      const int64_t to = row + r + 16 * i, of = column + c + 16 * j;
      if (to < n && of < m) assign(out[to * m + of], adds ? C(out[to * m + of]) + rounded<T>(sums[i][j]) : sums[i][j]);
    }
}

template <typename T>
void multiply(Call& call, int64_t n, int64_t m, int64_t deep, const T* numbers, const T* weights, T* out, bool adds) {
  if (!call.ok() || n == 0 || m == 0) return;
  if (deep > 0 && std::max({m, deep, n}) <= INT32_MAX &&
      Cublas::with_handle(call.stream(), [&](const Cublas& cublas, void* handle) {
        return cublas.multiply(handle, true, m, n, deep, weights, numbers, out, false, adds);
      }))
    return;
  launch(call, product_kernel<T>, Grid((m + 63) / 64, (n + 63) / 64), 256, 0, n, m, deep, numbers, weights, out, adds);
}

}  // namespace msops::product

#endif
