// Chooses the kernels of attention on a GPU:
//
//   case                         kernel                                    why
//   float16, sm_80 and later     mma.h, which has a table of its own       tensor cores multiply float16
//   float32, rows up to 64       plain.h, tiles of 64 x 64, one slice      sums of 64 columns stay in registers
//   float32, longer rows         plain.h, tiles of 64 x 64, two slices     128 columns share the logits
//   float64                      plain.h, tiles of 32 x 32                 twice the shared memory for each number
//   float16 elsewhere            plain.h, tiles of 64 x 64, one slice      sm_70, sm_75, rows above 256: mma.h refuses
//
// All of them give equal calls equal bits: a block owns what it writes, and adds in order.
#pragma once

#include "mma.h"
#include "plain_backward.h"
#include "plain_forward.h"

namespace msops::flash_attention {

template <typename T>
void forward_on_gpu(Call& call, const Attention<T>& a) {
  if (!call.ok()) return;
  if constexpr (std::is_same<T, Half>::value) {
    if (forward_on_tensor_cores(call, a)) return;
  }
  if constexpr (std::is_same<T, float>::value) {
    if (a.value_width > 64) return plain::launch_forward<T, 2>(call, a);
  }
  plain::launch_forward<T, 1>(call, a);
}

template <typename T>
void backward_on_gpu(Call& call, const Attention<T>& a, const AttentionGradient<T>& g) {
  if (!call.ok()) return;
  launch_delta(call, a, g);
  if constexpr (std::is_same<T, Half>::value) {
    if (backward_on_tensor_cores(call, a, g)) return;
  }
  if constexpr (std::is_same<T, float>::value) {
    if (most(a.width, a.value_width) > 64) return plain::launch_backward<T, 2>(call, a, g);
  }
  plain::launch_backward<T, 1>(call, a, g);
}

}  // namespace msops::flash_attention
