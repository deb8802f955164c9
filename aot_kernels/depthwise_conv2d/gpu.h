// The first kernel of a list that takes a depthwise convolution computes it on the GPU.
#pragma once

#include <array>

#include "large.h"
#include "mma.h"
#include "planes.h"
#include "small.h"
#include "staged.h"

#ifdef __CUDACC__

namespace msops::depthwise {

// Returns whether it took the convolution; otherwise it does nothing. `largest` bounds the indices of elements.
template <typename T>
using ForwardKernel = bool (*)(Call&, const Convolution&, int64_t largest, const T* x, const T* weight, const T* bias,
                               T* out);

// Returns how many rows of `partial` it wrote, at most `rows`. Returns 0, and does nothing, if it does not take the
// convolution.
template <typename T>
using BackwardKernel = int64_t (*)(Call&, const Convolution&, int64_t largest, const T* x, const T* weight,
                                   const T* dout, T* dx, float* partial, int64_t rows);

// All kernels except the last need multiplier 1 and dilation 1. The last one, in depthwise_conv2d.cu, takes all
// convolutions, and is the only one for float64.
//
//   case                                             kernels   why
//   images of 7 x 7 or 14 x 14, 3 x 3, padding 1     planes    whole images in shared memory: rows cross cache lines
//   float16, 3, 5 or 7 rows, up to 9 or 18 columns   mma       tensor cores
//   float32, 3, 5 or 7, stride 1, odd widths         staged    a warp moves neighbouring elements by shared memory
//   3, 5 or 7, stride 1 or 2                         small     results and taps in registers
//   stride 1                                         large     tiles of 64 x 64 results for taps of any number
//   else                                             Forward   a thread for each result
template <typename T>
constexpr auto forward_kernels() {
  if constexpr (std::is_same<T, Half>::value) {
    return std::array<ForwardKernel<T>, 4>{planes::forward<T>, mma::forward, small::forward<T>, large::forward<T>};
  } else {
    return std::array<ForwardKernel<T>, 4>{planes::forward<T>, staged::forward, small::forward<T>, large::forward<T>};
  }
}

// The list for gradients lacks `planes`, which has none.
template <typename T>
constexpr auto backward_kernels() {
  if constexpr (std::is_same<T, Half>::value) {
    return std::array<BackwardKernel<T>, 3>{mma::backward, small::backward<T>, large::backward<T>};
  } else {
    return std::array<BackwardKernel<T>, 3>{staged::backward, small::backward<T>, large::backward<T>};
  }
}

}  // namespace msops::depthwise

#endif
