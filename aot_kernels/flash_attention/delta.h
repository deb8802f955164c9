// delta_i = sum_c dout_ic out_ic - dlse_i, which the gradients of q and k need of each query.
//
// `out` is rounded to its dtype. In float16 nearly all of the error of dq comes from that where keys and values have
// means (flash_attention's docstring has figures). To be rid of it takes another output of the size of `out` from each
// forward pass, or two products of each tile before the gradient's five, and neither is free.
#pragma once

#include "../common/launch.h"
#include "../common/pack.h"
#include "../common/sum.h"
#include "problem.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

constexpr int kDeltaThreads = 128, kDeltaLanes = 8, kDeltaRows = 2;  // kDeltaLanes threads share kDeltaRows rows
constexpr int kDeltaApart = kDeltaThreads / kDeltaLanes;             // between a thread's rows
constexpr int kDeltaQueries = kDeltaApart * kDeltaRows;              // of a tile, which a block takes

// Each head has `tiles` tiles of queries, of which there are `count`. Packs of N elements tile the rows.
template <int N, typename T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const Attention<T> a, const AttentionGradient<T> g, int64_t tiles, int64_t count) {
  using C = Compute<T>;
  const int lane = threadIdx.x % kDeltaLanes;
  for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const bool is_small = count <= INT32_MAX;  // 32 bits are divided in fewer instructions
    const int64_t head = is_small ? static_cast<int>(tile) / static_cast<int>(tiles) : tile / tiles;
    const int64_t b = is_small ? static_cast<int>(head) / static_cast<int>(a.heads) : head / a.heads;
    const int64_t h = head - b * a.heads, first = (tile - head * tiles) * kDeltaQueries + threadIdx.x / kDeltaLanes;
    const Sequence s = a.sequence(b);
    const int64_t from = a.of_out.offset(b, h, s.first_query + first), apart = kDeltaApart * a.of_out.row;
    const auto inside = [&](int i) { return first + i * kDeltaApart < s.queries; };
    C sums[kDeltaRows] = {};
    for (int64_t column = lane * N; column < a.value_width; column += kDeltaLanes * N) {
      Pack<T, N> out[kDeltaRows], dout[kDeltaRows];
#pragma unroll
      for (int i = 0; i < kDeltaRows; ++i) {
        if (!inside(i)) continue;
        const int64_t at = from + i * apart + column;
        out[i] = load<N>(a.out + at), dout[i] = load<N>(g.dout + at);
      }
#pragma unroll
      for (int i = 0; i < kDeltaRows; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (inside(i)) sums[i] += C(out[i].values[j]) * C(dout[i].values[j]);
    }
#pragma unroll
    for (int i = 0; i < kDeltaRows; ++i) {
      const C sum = team_sum<kDeltaLanes>(sums[i]);
      const int64_t to = a.of_lse.offset(b, h, s.first_query + first + i * kDeltaApart);
      if (inside(i) && lane == 0) g.delta[to] = sum - (g.dlse ? g.dlse[to] : C(0));
    }
  }
}

// Returns whether rows at these strides begin at multiples of 16 bytes and have a whole number of packs.
template <typename T>
bool rows_are_aligned(const T* data, const Strides& strides, int64_t width) {
  return is_aligned<kPackWidth<T>>(data) && (strides.batch | strides.head | strides.row | width) % kPackWidth<T> == 0;
}

// Returns which of q, k, v and out have aligned rows, as bits of AlignedRows.
template <typename T>
int aligned_rows(const Attention<T>& a, const AttentionGradient<T>& g = {}) {
  const auto aligned = [](const T* data, const T* gradient, const Strides& strides, int64_t width) {
    return rows_are_aligned(data, strides, width) && rows_are_aligned(gradient, strides, width);
  };
  return kAlignedQ * aligned(a.q, g.dq, a.of_q, a.width) | kAlignedK * aligned(a.k, g.dk, a.of_k, a.width) |
         kAlignedV * aligned(a.v, g.dv, a.of_v, a.value_width) |
         kAlignedOut * aligned(a.out, g.dout, a.of_out, a.value_width);
}

// All strides of `out` are multiples of the rows' width, so that packs which tile one row tile all.
template <typename T>
void launch_delta(Call& call, const Attention<T>& a, const AttentionGradient<T>& g) {
  const int64_t tiles = parts_of(a.queries, kDeltaQueries), count = a.batch * a.heads * tiles;
  with_width<T>(false, a.value_width, {a.out, g.dout}, [&](auto width) {
    launch(call, delta_kernel<width, T>, least(count, INT32_MAX), kDeltaThreads, 0, a, g, tiles, count);
  });
}

}  // namespace msops::flash_attention

#endif
