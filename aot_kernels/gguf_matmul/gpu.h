// Chooses the kernel of a product on a GPU.
#pragma once

#include "few.h"
#include "plain.h"
#include "tiles.h"

#ifdef __CUDACC__

namespace msops::gguf_matmul {

template <typename F, typename T>
void multiply_on_gpu(Call& call, const Products<T>& p) {
  if constexpr (std::is_same<T, Half>::value)
    if (p.tokens <= kMostFew && multiply_few<F>(call, p)) return;
  if constexpr (!std::is_same<T, double>::value)
    if (p.tokens > kMostPlain && multiply_tiles<F, false>(call, p)) return;
  multiply_plainly<F>(call, p);
}

template <typename F, typename T>
void multiply_on_gpu(Call& call, const Gradients<T>& p) {
  if constexpr (!std::is_same<T, double>::value)
    if (multiply_tiles<F, true>(call, p)) return;
  multiply_plainly<F>(call, p);
}

}  // namespace msops::gguf_matmul

#endif
