// Launches the kernels for tensor cores, which take float16 and float32 on sm_80 and later:
//
//   float16, up to 16 queries of all heads that share keys, or more where the keys are split    mma_decode.h
//   other forward passes of aligned rows of float16, on sm_90a                                  wgmma_forward.h
//   other forward passes where the keys are not split                                          mma_forward.h
//   backward passes of aligned rows of float16 of up to 128 elements, on sm_90a                 wgmma_backward.h
//   other backward passes                                                                      mma_backward.h
//   gradients of a bias, float16                                                               mma_bias.h
//
// The kernels of sm_90a for calls with a mask read it as bits, which mask_bits.h packs; the others read it as it is.
// A kernel is compiled for rows of up to 64, 128 and, for float16, 256 elements; shorter ones are filled with zeros.
// For an ExtendedAttention there are fewer kernels, since they take long to compile: mma_decode.h for many rows of up
// to 128 elements, mma_forward.h, mma_backward.h and mma_bias.h; for float32 those for 128 elements alone. Where it has
// a KeyBias and nothing else, wgmma_forward.h and wgmma_backward.h take rows of up to 128 elements.
#pragma once

#include "combine.h"
#include "mma_bias.h"
#include "mma_decode.h"
#include "wgmma.h"

#ifdef __CUDACC__

#include "../common/call.h"

namespace msops::flash_attention {

// Calls f(Constant<width>{}) for the width that the kernels for these rows have, or returns false if there are none.
template <typename A, typename F>
bool with_kernel_width(const A& a, F&& f) {
  constexpr bool kIsHalf = std::is_same<typename A::Element, Half>::value;
  const int64_t width = most(a.width, a.value_width);
  if constexpr (kIsHalf || !A::kIsExtended) {
    if (width <= 64) return f(Constant<64>{});
  }
  if (width <= 128) return f(Constant<128>{});
  if constexpr (kIsHalf) return f(Constant<256>{});
  return false;
}

// Computes `out` and `lse`, or returns false and does nothing. `mask_words` are scratch for the mask's bits.
template <typename A>
bool forward_on_tensor_cores(Call& call, const A& a, [[maybe_unused]] uint32_t* mask_words) {
  using Element = typename A::Element;
  constexpr bool kIsHalf = std::is_same<Element, Half>::value;
  const int64_t rows = a.queries * a.group(), splits = most(1, a.splits);
  if (!fits_tensor_cores(a) || (!kIsHalf && (rows <= 16 || splits > 1))) return false;
  const int aligned = aligned_rows(a);
  return with_kernel_width(a, [&](auto width) {
    [[maybe_unused]] const auto decode = [&](auto shape) {
      using S = decltype(shape);
      if constexpr (S::kTeam == 1) {
        if (decode_in_clusters<S>(call, a, aligned)) return true;
      }
      const bool done = launch_decode<S>(call, a, aligned);
      if (done && splits > 1) launch_combine(call, a);
      return done;
    };
    if constexpr (kIsHalf && !A::kIsExtended) {
      if (has_few_aligned_rows(a, aligned)) return decode(DecodeShape<width, false>{});
    }
    if constexpr (kIsHalf && (!A::kIsExtended || width <= 128)) {
      if (rows <= 16 || splits > 1) return decode(DecodeShape<width, true>{});
    }
#if CUDART_VERSION >= 12000
    if constexpr (kIsHalf && !A::kIsExtended) {
      if (aligned == kAlignedAll && (a.mask ? launch_wgmma_forward<width, true>(call, a, mask_words)
                                            : launch_wgmma_forward<width, false>(call, a, nullptr)))
        return true;
    }
    if constexpr (kIsHalf && A::kIsExtended) {
      if constexpr (width <= 128) {
        if (aligned == kAlignedAll && KeyBias::is_all_of(a) &&
            launch_wgmma_forward<width, false, true>(call, a, nullptr, KeyBias::of(a)))
          return true;
      }
    }
#endif
    using S = ForwardShape<Element, width>;
    const double bytes = 1. * sizeof(Element) * a.keys * (a.width + a.value_width) / a.group();
    const Order order = order_of(a.batch * a.heads, parts_of(a.queries, S::kQueries), bytes, a.right >= 0);
    return launch_on_tensor_cores<S>(call, mma_forward<S, A>, order.count(), a, order, order.count(), aligned);
  });
}

// Computes dq, dk and dv from `delta`, or returns false and does nothing.
template <typename A>
bool backward_on_tensor_cores(Call& call, const A& a, const AttentionGradient<typename A::Element>& g,
                              [[maybe_unused]] uint32_t* mask_words) {
  using Element = typename A::Element;
  if (!fits_tensor_cores(a)) return false;
  const int aligned = aligned_rows(a, g);
  return with_kernel_width(a, [&](auto width) {
#if CUDART_VERSION >= 12000
    if constexpr (std::is_same<Element, Half>::value && width <= 128 && !A::kIsExtended) {
      if (aligned == kAlignedAll && (a.mask ? launch_wgmma_backward<width, true>(call, a, g, mask_words)
                                            : launch_wgmma_backward<width, false>(call, a, g, nullptr)))
        return true;
    }
    if constexpr (std::is_same<Element, Half>::value && A::kIsExtended) {
      if constexpr (width <= 128) {
        if (aligned == kAlignedAll && KeyBias::is_all_of(a) &&
            launch_wgmma_backward<width, false, true>(call, a, g, nullptr, KeyBias::of(a)))
          return true;
      }
    }
#endif
    using K = KeysShape<Element, width>;
    using Q = QueriesShape<Element, width>;
    if (Gpu().dynamic_bytes() < most(K::kBytes, Q::kBytes)) return false;
    const double wide = 1. * sizeof(Element) * (a.width + a.value_width);
    const Order keys = order_of(a.batch * a.kv_heads, parts_of(a.keys, K::kKeys), wide * a.queries * a.group(), false);
    const Order queries =
        order_of(a.batch * a.heads, parts_of(a.queries, Q::kQueries), wide * a.keys / a.group(), a.right >= 0);
    return launch_on_tensor_cores<K>(call, mma_backward_keys<K, A>, keys.count(), a, g, keys, keys.count(), aligned) &&
           launch_on_tensor_cores<Q>(call, mma_backward_queries<Q, A>, queries.count(), a, g, queries, queries.count(),
                                     aligned);
  });
}

// Computes the gradient of the bias from `delta`, or returns false and does nothing.
inline bool bias_backward_on_tensor_cores(Call& call, const ExtendedAttention<Half>& a,
                                          const AttentionGradient<Half>& g, const BiasGradient<Half>& to) {
  if (!fits_tensor_cores(a)) return false;
  return with_kernel_width(a, [&](auto width) {
    using S = BiasShape<width>;
    const int64_t query_tiles = parts_of(to.queries, S::kRows), key_tiles = parts_of(to.keys, S::kRows);
    const int64_t count = to.batch * to.heads * query_tiles * key_tiles;
    return launch_on_tensor_cores<S>(call, mma_backward_bias<S>, count, a, g, to, query_tiles, key_tiles, count,
                                     aligned_rows(a, g));
  });
}

}  // namespace msops::flash_attention

#endif
