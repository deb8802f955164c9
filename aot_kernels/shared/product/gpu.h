// Products of matrices on a GPU:
//
//   case                         kernel           why
//   cuBLAS is in the process     its own          tensor cores
//   else                         product_kernel   any GPU, any dtype
#pragma once

#ifdef __CUDACC__

#include "../../common/gpu/cublas.h"
#include "../../common/launch.h"
#include "matrix.h"

namespace msops::product {

// A block takes a tile of 64 x 64. The blocks have one dimension, since a second one would have 65535 at most.
template <typename T>
__global__ void __launch_bounds__(256) product_kernel(Product<T> p) {
  using C = Compute<T>;
  constexpr int kTile = 64, kDeep = 16, kEach = 4;  // each thread has 4 x 4 sums
  __shared__ C x[kDeep][kTile + 1], w[kDeep][kTile + 1];
  const int64_t across = (p.m + kTile - 1) / kTile;  // tiles
  const int64_t row = blockIdx.x / across * kTile, column = blockIdx.x % across * kTile;
  const int r = threadIdx.x / 16, c = threadIdx.x % 16;
  C sums[kEach][kEach] = {};
  for (int64_t k = 0; k < p.deep; k += kDeep) {
    for (int i = threadIdx.x; i < kTile * kDeep; i += 256) {
      const int at = i / kDeep, d = i % kDeep;
      x[d][at] = row + at < p.n && k + d < p.deep ? p.numbers.at(row + at, k + d, p.n, p.deep) : C(0);
      w[d][at] = column + at < p.m && k + d < p.deep ? p.weights.at(column + at, k + d, p.m, p.deep) : C(0);
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
      if (to < p.n && of < p.m) p.store(to, of, sums[i][j]);
    }
}

template <typename T>
void multiply(Call& call, const Product<T>& p) {
  if (!call.ok() || p.n == 0 || p.m == 0) return;
  if (p.deep > 0 && std::max({p.m, p.deep, p.n}) <= INT32_MAX &&
      Cublas::with_handle(call.stream(), [&](const Cublas& cublas, void* handle) {
        return cublas.multiply(handle, !p.weights.is_transposed, p.m, p.n, p.deep, p.weights.data, p.numbers.data,
                               p.out, false, p.adds, p.numbers.is_transposed, p.scale);
      }))
    return;
  launch(call, product_kernel<T>, (p.m + 63) / 64 * ((p.n + 63) / 64), 256, 0, p);
}

}  // namespace msops::product

#endif
