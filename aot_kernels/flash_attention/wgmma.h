// Launches the kernels for tensor cores of sm_90a.
#pragma once

#include "wgmma_backward.h"
#include "wgmma_forward.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

#include "../common/call.h"

namespace msops::flash_attention {

// TensorMaps describe the tensors to TMA, in boxes of some rows.
struct TensorMaps {
  TensorMap q, k, v, dout;

  // Returns false if TMA cannot read them. `dout` may be null.
  bool encode(const Attention<Half>& a, const Half* gradient, int queries, int keys) {
    const bool packed = a.is_packed();
    const int64_t batch = packed ? 1 : a.batch, i = packed ? a.query_rows : a.queries, j = packed ? a.key_rows : a.keys;
    return most(i, j) <= INT32_MAX / 2 && encode_rows(&q, a.q, a.of_q, a.width, i, a.heads, batch, queries) &&
           encode_rows(&k, a.k, a.of_k, a.width, j, a.kv_heads, batch, keys) &&
           encode_rows(&v, a.v, a.of_v, a.value_width, j, a.kv_heads, batch, keys) &&
           (!gradient || encode_rows(&dout, gradient, a.of_out, a.value_width, i, a.heads, batch, queries));
  }
};

// Each returns false, and launches nothing, if the GPU lacks the instructions or TMA cannot read the tensors.
// Where there is a mask, its bits have room at `words`.
template <int kWidth, bool kHasMask, bool kHasBias = false>
bool launch_wgmma_forward(Call& call, const Attention<Half>& a, uint32_t* words, const KeyBias& bias = {}) {
  using S = WgmmaShape<kWidth, kHasMask, false, kHasBias>;
  const Order order = order_of(a.batch * a.heads, parts_of(a.queries, S::kQueries),
                               2. * a.keys * (a.width + a.value_width) / a.group(), a.right >= 0);
  const auto kernel = wgmma_forward<S, DenseTensors>;
  const int64_t blocks = wgmma_blocks<S>(kernel, order.count());
  TensorMaps maps;
  if (blocks == 0 || !maps.encode(a, nullptr, S::kQueries, S::kKeys)) return false;
  // Blocks that are done take the next item, if items differ.
  const bool differ = order.last_first || a.left >= 0 || a.kv_lengths || a.is_packed();
  unsigned* tickets = nullptr;
  if (differ && order.count() > blocks && order.count() <= INT32_MAX) {
    tickets = reinterpret_cast<unsigned*>(a.partial);
    cudaMemsetAsync(tickets, 0, sizeof *tickets, call.stream());
  }
  const MaskBits mask = MaskBits::of(a, false, words);
  if (kHasMask) launch_pack_mask(call, a, mask, false);
  const DenseTensors tensors{a, maps.q, maps.k, maps.v, order, order.count(), tickets, mask, bias};
  launch(call, kernel, blocks, S::kThreads, S::kBytes, tensors);
  return true;
}

template <int kWidth, bool kHasMask, bool kHasBias = false>
bool launch_wgmma_backward(Call& call, const Attention<Half>& a, const AttentionGradient<Half>& g, uint32_t* words,
                           const KeyBias& bias = {}) {
  using S = WgmmaBackwardShape<kWidth, kHasMask, kHasBias>;
  const int64_t tiles = parts_of(a.queries, S::kQueries), rows = a.batch * a.heads * tiles;
  const double bytes = (4. * (a.width + a.value_width) + 4 * S::kWidth) * a.queries * a.group();
  const Order order = order_of(a.batch * a.kv_heads, parts_of(a.keys, S::kKeys), bytes, false);
  const int64_t blocks = wgmma_blocks<S>(wgmma_backward<S>, order.count());
  TensorMaps maps;
  if (!g.query_sums.numbers || blocks == 0 || most(order.count(), rows) > INT32_MAX / 2 ||
      !maps.encode(a, g.dout, S::kQueries, S::kKeys))
    return false;
  cudaMemsetAsync(g.query_sums.counters, 0, (g.query_sums.tiles + 1) * sizeof(unsigned), call.stream());
  const MaskBits mask = MaskBits::of(a, true, words);
  if (kHasMask) launch_pack_mask(call, a, mask, true);
  launch(call, wgmma_backward<S>, blocks, S::kThreads, S::kBytes, a, g, maps.q, maps.k, maps.v, maps.dout, g.query_sums,
         order, static_cast<unsigned>(order.count()), mask, bias);
  launch(call, store_query_sums<WgmmaBackwardShape<kWidth, false>>, rows, 256, 0, a, g, g.query_sums, tiles);
  return true;
}

}  // namespace msops::flash_attention

#endif
#endif
