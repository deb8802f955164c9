// Chooses the kernel of a product on a GPU.
#pragma once

#include "mma.h"
#include "plain.h"
#include "wgmma.h"

#ifdef __CUDACC__

namespace msops::grouped_matmul {

template <typename T, template <typename> class Products>
void multiply_on_gpu(Call& call, const Products<T>& p) {
  if constexpr (std::is_same<T, Half>::value)
    if (multiply_by_wgmma(call, p)) return;
  if constexpr (!std::is_same<T, double>::value)
    if (multiply_by_mma(call, p)) return;
  multiply_plainly(call, p);
}

}  // namespace msops::grouped_matmul

#endif
