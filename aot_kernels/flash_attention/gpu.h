// Chooses the kernels of attention on a GPU:
//
//   case                         kernel                                    why
//   float16, float32             mma.h, which has a table of its own       tensor cores multiply float16 and TF32
//   float32, rows up to 64       plain.h, tiles of 64 x 64, one slice      sums of 64 columns stay in registers
//   float32, other               plain.h, tiles of 64 x 64, two slices     128 columns share the logits
//   float64                      plain.h, tiles of 32 x 32                 twice the shared memory for each number
//   float16                      plain.h, tiles of 64 x 64, one slice      other kernels are seldom asked for
//
// Rows of float16 that are no packs of 16 bytes are copied to rows that are, where that pays (padding.h).
//
// Plain kernels take what mma.h refuses: all on sm_70 and sm_75, wide rows, and of float32 few queries and a bias's
// gradient.
//
// The plain kernels of float16 and float64 are compiled for an ExtendedAttention alone, since compiling them takes
// long, those of float32 also for an Attention.
//
// All of them give equal calls equal bits: a block owns what it writes, and adds in order.
#pragma once

#include "mma.h"
#include "packed.h"
#include "padding.h"
#include "plain_bias.h"
#include "plain_forward.h"
#include "plain_rest.h"

namespace msops::flash_attention {

// Calls f(a, Constant<slices>{}) for the problem and the slices of columns that a plain kernel is compiled for.
template <typename T, typename F>
void with_plain_kernel(const ExtendedAttention<T>& a, int64_t width, const F& f) {
  if constexpr (std::is_same<T, float>::value) {
    const Attention<T>& simple = a;
    if (!a.is_extended()) return width > 64 ? f(simple, Constant<2>{}) : f(simple, Constant<1>{});
    f(a, Constant<2>{});
  } else {
    f(a, Constant<1>{});
  }
}

template <typename T>
void forward_as_it_is(Call& call, const ExtendedAttention<T>& a, [[maybe_unused]] uint32_t* mask_words) {
  fill_results(call, a);
  if constexpr (!std::is_same<T, double>::value) {
    const Attention<T>& simple = a;
    if (a.is_extended() ? forward_on_tensor_cores(call, a, mask_words)
                        : forward_on_tensor_cores(call, simple, mask_words))
      return;
  }
  with_plain_kernel(a, a.value_width,
                    [&](const auto& of_kind, auto slices) { plain::launch_forward<slices>(call, of_kind); });
}

// Delta is computed before.
template <typename T>
void backward_as_it_is(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g,
                       [[maybe_unused]] uint32_t* mask_words) {
  fill_gradients(call, a, g);
  if constexpr (!std::is_same<T, double>::value) {
    const Attention<T>& simple = a;
    if (a.is_extended() ? backward_on_tensor_cores(call, a, g, mask_words)
                        : backward_on_tensor_cores(call, simple, g, mask_words))
      return;
  }
  with_plain_kernel(a, most(a.width, a.value_width),
                    [&](const auto& of_kind, auto slices) { plain::launch_backward<slices>(call, of_kind, g); });
}

// `padded` is scratch for the copies of Padding, and `mask_words` for MaskBits.
template <typename T>
void forward_on_gpu(Call& call, const ExtendedAttention<T>& a, const Padding<T>& padding, T* padded,
                    uint32_t* mask_words) {
  if (!call.ok()) return;
  padding.forward(call, a, padded,
                  [&](const ExtendedAttention<T>& problem) { forward_as_it_is(call, problem, mask_words); });
}

template <typename T>
void backward_on_gpu(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g,
                     const Padding<T>& padding, T* padded, uint32_t* mask_words) {
  if (!call.ok()) return;
  launch_delta<T>(call, a, g);
  plain::launch_rest(call, a, g);
  padding.backward(call, a, g, padded, [&](const ExtendedAttention<T>& problem, const AttentionGradient<T>& gradient) {
    backward_as_it_is(call, problem, gradient, mask_words);
  });
}

template <typename T>
void bias_backward_on_gpu(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g,
                          const BiasGradient<T>& to) {
  if (!call.ok()) return;
  launch_delta<T>(call, a, g);
  plain::launch_rest(call, a, g);
  if constexpr (std::is_same<T, Half>::value) {
    if (bias_backward_on_tensor_cores(call, a, g, to)) return;
  }
  plain::launch_bias_backward(call, a, g, to);
}

}  // namespace msops::flash_attention
