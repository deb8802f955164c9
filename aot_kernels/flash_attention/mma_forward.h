// The forward pass on tensor cores for sm_80 and later.
//
// A block takes a tile of queries of one head. A warp owns 16 or 32 of them: it computes their products with a tile of
// keys, takes them through the online softmax in registers, and multiplies them by the values. Tiles of keys and values
// come by cp.async in turn into a ring of stages; while one is used, the next are on their way.
#pragma once

#include "mma_terms.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

template <typename Element_, int kWidth_>
struct ForwardShape {
  using Element = Element_;
  static constexpr bool kIsHalf = std::is_same<Element, Half>::value;
  static constexpr int kWidth = kWidth_, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kM = kWidth <= 128 ? 2 : 1;  // matrices of 16 queries that a warp has
  static constexpr int kQueries = 16 * kM * kWarps, kKeys = kIsHalf ? 64 : 32;
  static constexpr int kStages = kIsHalf && kWidth <= 128 ? 3 : 2, kBlocks = kWidth <= 64 ? 3 : 2;
  static constexpr int kBytes = (kQueries + kStages * kKeys) * kWidth * sizeof(Element);
};

// A is an Attention or ExtendedAttention of S::Element.
template <typename S, typename A>
__global__ void __launch_bounds__(S::kThreads, kBlocksOf<S, A>)
    mma_forward(const A a, const Order order, int64_t count, int aligned) {
  if (!has_instructions_of(80)) return;
  using Element = typename S::Element;
  using T = Tile<Element, S::kWidth>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* const q_tile = reinterpret_cast<Element*>(shared);  // (kQueries, kWidth)
  Element* const stages = q_tile + S::kQueries * S::kWidth;    // (kStages, kKeys, kWidth)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = a.width, value_width = a.value_width;
  const Logits logits(a);
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const auto item = QueryItem::find(a, order, number, S::kQueries);
    if (item.empty()) continue;
    const int begin = item.begin, end = item.end;
    const auto q = rows_of_q(a, item, width, aligned);
    const auto k = rows_of_k(a, item, width, aligned);
    const auto v = rows_of_v(a, item, value_width, aligned);

    // Copies number 2 t are tile t of the keys, copies 2 t + 1 of the values.
    const int tiles = (end - begin + S::kKeys - 1) / S::kKeys;
    const auto stage = [&](int copy) { return stages + copy % S::kStages * (S::kKeys * S::kWidth); };
    const auto begin_copy = [&](int copy, const auto& rows) {
      if (copy < 2 * tiles)
        T::template load<S::kKeys, S::kThreads>(stage(copy), rows, begin + copy / 2 * S::kKeys, end, threadIdx.x);
      cp_async_commit();
    };
    const auto wait_for_copy = [&](int copy, const auto& next_rows) {
      cp_async_wait<S::kStages - 2>();
      __syncthreads();
      begin_copy(copy + S::kStages - 1, next_rows);
      return stage(copy);
    };
    const auto& after_keys = S::kStages % 2 ? k : v;
    const auto& after_values = S::kStages % 2 ? v : k;
    __syncthreads();
    T::template load<S::kQueries, S::kThreads>(q_tile, q, item.i0, item.i1, threadIdx.x);
    begin_copy(0, k);
    if constexpr (S::kStages > 2) begin_copy(1, v);

    const int i0 = item.i0 + warp * (16 * S::kM), i1 = std::min(i0 + 16 * S::kM, item.i1);
    const unsigned q_address = T::left(q_tile, warp * (16 * S::kM));
    const Seen<Element> seen(a, item.s, item.b, item.h, end);
    const Terms<A> terms(a, seen);
    const auto query = [&](int m, int half) { return QueryOfRow{item.h, i0 + 16 * m + 8 * half + lane / 4}; };
    OnlineSoftmax<S::kM> softmax;
    float out[S::kM][S::kWidth / 8][4];
    clear(out);
    for (int t = 0; t < tiles; ++t) {
      float x[S::kM][S::kKeys / 8][4], shrink[S::kM][2];
      uint32_t p[S::kM][S::kKeys / T::kStep][4];
      const int j0 = begin + t * S::kKeys;
      clear(x);
      const Element* const k_tile = wait_for_copy(2 * t, after_keys);
      T::multiply_rows(x, q_address, T::right(k_tile), width);
      logits.apply(x);
      terms.add(x, j0, query);
      if (!seen.all(i0, i1, j0, j0 + S::kKeys)) seen.hide(x, i0, j0);
      if (softmax.template advance<A::kIsExtended>(x, shrink, logits.factor * kLog2E<float>))
        softmax.scale(out, shrink);
      terms.drop(x, j0, query);
      operand(p, x);
      const Element* const v_tile = wait_for_copy(2 * t + 1, after_values);
      T::multiply(out, p, T::transposed(v_tile), value_width);
    }
    cp_async_wait<0>();
    if (tiles == 0) __syncthreads();
    softmax.finish();

    const auto to = rows_of(a.out, a.of_out, item.query(a.of_out, 0), value_width, aligned & kAlignedOut);
    store_rows<S::kWidth>(out, q_tile + warp * (16 * S::kM) * S::kWidth, to, i0, i1, 0, [&](int m, int half) {
      return softmax.sum[m][half] == 0 ? 0 : kept_of(a) / softmax.sum[m][half];
    });
    unrolled<S::kM, 2>([&](int m, int half) {
      const int i = i0 + 16 * m + 8 * half + lane / 4;
      const float lse = softmax.lse(m, half, logits.factor);
      if (lane % 4 == 0 && i < i1) a.lse[item.query(a.of_lse, i)] = lse;
    });
  }
}

}  // namespace msops::flash_attention

#endif
