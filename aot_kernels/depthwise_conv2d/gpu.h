// Which kernel computes a depthwise convolution on the GPU: the first of a list that takes it.
#pragma once

#include <array>

#include "half.h"
#include "large.h"
#include "planes.h"
#include "small.h"
#include "staged.h"

#ifdef __CUDACC__

namespace msops::depthwise {

// Whether it took the convolution; else nothing is done. `largest` bounds the indices of elements.
template <typename T>
using ForwardKernel = bool (*)(Call&, const Shape&, int64_t largest, const T* x, const T* weight, const T* bias,
                               T* out);

// The number of rows of `partial` that it wrote, of at most `rows`; 0, and nothing done, if it did not take the
// convolution.
template <typename T>
using BackwardKernel = int64_t (*)(Call&, const Shape&, int64_t largest, const T* x, const T* weight, const T* dout,
                                   T* dx, float* partial, int64_t rows);

// All but the last need multiplier 1 and dilation 1; that, in depthwise_conv2d.cu, takes all convolutions, and is the
// only one for float64.
//
//   case                                             kernels   why
//   images of 7 x 7 or 14 x 14, 3 x 3, padding 1     planes    whole images in shared memory: rows cross cache lines
//   float16, 3, 5 or 7 rows, up to 9 or 18 columns   half      tensor cores
//   float32, 3, 5 or 7, stride 1, odd widths         staged    a warp's neighbours move neighbours by shared memory
//   3, 5 or 7, stride 1 or 2                         small     results and taps in registers
//   stride 1                                         large     tiles of 64 x 64 results for taps of any number
//   else                                             Forward   a thread for each result
template <typename T>
constexpr auto forward_kernels() {
  if constexpr (std::is_same<T, Half>::value) {
    return std::array<ForwardKernel<T>, 4>{planes::forward<T>, half::forward, small::forward<T>, large::forward<T>};
  } else {
    return std::array<ForwardKernel<T>, 4>{planes::forward<T>, staged::forward, small::forward<T>, large::forward<T>};
  }
}

// As above, without `planes`, which has no gradients.
template <typename T>
constexpr auto backward_kernels() {
  if constexpr (std::is_same<T, Half>::value) {
    return std::array<BackwardKernel<T>, 3>{half::backward, small::backward<T>, large::backward<T>};
  } else {
    return std::array<BackwardKernel<T>, 3>{staged::backward, small::backward<T>, large::backward<T>};
  }
}

}  // namespace msops::depthwise

#endif
