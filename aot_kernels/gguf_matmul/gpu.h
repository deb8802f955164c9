// Chooses the kernel of a product on a GPU.
#pragma once

#include "few.h"
#include "plain.h"
#include "tiles.h"
#include "wgmma.h"

#ifdef __CUDACC__

namespace msops::gguf_matmul {

// Returns whether few.h is best: for up to 8 tokens, and for a few times 8, where wgmma would leave multiprocessors
// idle.
inline bool is_for_few(const Products<Half>& p) {
  return p.tokens <= 8 || (p.tokens <= 32 && p.columns() < 64 * Gpu().multiprocessors);
}

template <typename F, typename T>
void multiply_on_gpu(Call& call, const Products<T>& p) {
  if constexpr (std::is_same<T, Half>::value) {
    if (is_for_few(p) && multiply_few<F>(call, p)) return;
    if (multiply_by_wgmma<F>(call, p)) return;
    if (p.tokens <= kMostFew && multiply_few<F>(call, p)) return;
  }
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
