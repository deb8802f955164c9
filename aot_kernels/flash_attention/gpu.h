// Chooses the kernels of attention on a GPU:
//
//   case                         kernel                                    why
//   float16, sm_80 and later     mma.h, which has a table of its own       tensor cores multiply float16
//   float32, rows up to 64       plain.h, tiles of 64 x 64, one slice      sums of 64 columns stay in registers
//   float32, longer rows         plain.h, tiles of 64 x 64, two slices     128 columns share the logits
//   an ExtendedAttention         plain.h, float32 as if rows were long     the others have no code for it
//   float64                      plain.h, tiles of 32 x 32                 twice the shared memory for each number
//   float16 elsewhere            plain.h, tiles of 64 x 64, one slice      sm_70, sm_75, rows above 256: mma.h refuses
//
// All of them give equal calls equal bits: a block owns what it writes, and adds in order.
#pragma once

#include "mma.h"
#include "plain_bias.h"
#include "plain_forward.h"

namespace msops::flash_attention {

template <typename T>
void forward_on_gpu(Call& call, const ExtendedAttention<T>& extended) {
  constexpr int kSlices = std::is_same<T, float>::value ? 2 : 1;
  if (!call.ok()) return;
  if (extended.is_extended()) return plain::launch_forward<kSlices>(call, extended);
  const Attention<T>& a = extended;
  if constexpr (std::is_same<T, Half>::value) {
    if (forward_on_tensor_cores(call, a)) return;
  }
  if constexpr (std::is_same<T, float>::value) {
    if (a.value_width > 64) return plain::launch_forward<2>(call, a);
  }
  plain::launch_forward<1>(call, a);
}

template <typename T>
void backward_on_gpu(Call& call, const ExtendedAttention<T>& extended, const AttentionGradient<T>& g) {
  constexpr int kSlices = std::is_same<T, float>::value ? 2 : 1;
  if (!call.ok()) return;
  const Attention<T>& a = extended;
  launch_delta(call, a, g);
  if (extended.is_extended()) return plain::launch_backward<kSlices>(call, extended, g);
  if constexpr (std::is_same<T, Half>::value) {
    if (backward_on_tensor_cores(call, a, g)) return;
  }
  if constexpr (std::is_same<T, float>::value) {
    if (most(a.width, a.value_width) > 64) return plain::launch_backward<2>(call, a, g);
  }
  plain::launch_backward<1>(call, a, g);
}

template <typename T>
void bias_backward_on_gpu(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g,
                          const BiasGradient<T>& to) {
  if (!call.ok()) return;
  launch_delta<T>(call, a, g);
  plain::launch_bias_backward(call, a, g, to);
}

}  // namespace msops::flash_attention
