// Chooses the kernel of a product on a GPU.
#pragma once

#include "few.h"
#include "plain.h"
#include "tiles.h"
#include "wgmma.h"

#ifdef __CUDACC__

namespace msops::weight_quant_matmul {

template <typename T>
void multiply_on_gpu(Call& call, const Products<T>& p) {
  if constexpr (std::is_same<T, Half>::value)
    if (multiply_few(call, p) || multiply_by_wgmma(call, p)) return;
  if (multiply_lines(call, p)) return;
  if constexpr (!std::is_same<T, double>::value)
    if (multiply_tiles(call, p)) return;
  multiply_plainly(call, p);
}

}  // namespace msops::weight_quant_matmul

#endif
