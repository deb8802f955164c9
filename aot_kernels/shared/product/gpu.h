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
#include "plain.h"

namespace msops::product {

// P is Product<T>, or has other weights.
template <typename T, typename P = Product<T>>
__global__ void __launch_bounds__(kPlainThreads) product_kernel(P p) {
  const int64_t across = (p.m + kPlainSide - 1) / kPlainSide;
  multiply_plainly<Compute<T>>(
      blockIdx.x / across * kPlainSide, p.n, blockIdx.x % across * kPlainSide, p.m, p.deep, true,
      [&](int64_t i, int64_t k) { return p.numbers.at(i, k, p.n, p.deep); },
      [&](int64_t j, int64_t k) { return p.weights.at(j, k, p.m, p.deep); },
      [&](int64_t i, int64_t j, Compute<T> sum) { p.store(i, j, sum); });
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
  launch(call, product_kernel<T>, plain_tiles(p.n, p.m), kPlainThreads, 0, p);
}

}  // namespace msops::product

#endif
