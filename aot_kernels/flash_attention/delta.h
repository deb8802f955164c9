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

constexpr int kDeltaThreads = 256, kDeltaLanes = 8;  // kDeltaLanes threads share a row
constexpr int kDeltaRows = kDeltaThreads / kDeltaLanes;

// Where `aligned`, rows are packs of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const Attention<T> a, const AttentionGradient<T> g, int64_t rows, bool aligned) {
  using C = Compute<T>;
  constexpr int kWide = kPackWidth<T>;
  const int lane = threadIdx.x % kDeltaLanes;
  for (int64_t first = int64_t{blockIdx.x} * kDeltaRows; first < rows; first += int64_t{gridDim.x} * kDeltaRows) {
    const int64_t row = first + threadIdx.x / kDeltaLanes, i = row % a.queries;
    const int64_t h = row / a.queries % a.heads, b = least(row / a.queries / a.heads, a.batch - 1);
    const Sequence s = a.sequence(b);
    const bool inside = row < rows && i < s.queries;
    const int64_t offset = a.of_out.offset(b, h, s.first_query + i);
    C sum = 0;
    if (inside && aligned) {
      for (int64_t column = lane * kWide; column < a.value_width; column += kDeltaLanes * kWide) {
        const auto out = load<kWide>(a.out + offset + column), dout = load<kWide>(g.dout + offset + column);
#pragma unroll
        for (int j = 0; j < kWide; ++j) sum += C(out.values[j]) * C(dout.values[j]);
      }
    } else if (inside) {
      for (int64_t column = lane; column < a.value_width; column += kDeltaLanes)
        sum += C(a.out[offset + column]) * C(g.dout[offset + column]);
    }
    sum = team_sum<kDeltaLanes>(sum);
    const int64_t to = a.of_lse.offset(b, h, s.first_query + i);
    if (inside && lane == 0) g.delta[to] = sum - (g.dlse ? g.dlse[to] : C(0));
  }
}

// Returns whether rows at these strides begin at multiples of 16 bytes and have a whole number of packs.
template <typename T>
bool rows_are_aligned(const T* data, const Strides& strides, int64_t width) {
  return is_aligned<kPackWidth<T>>(data) && (strides.batch | strides.head | strides.row | width) % kPackWidth<T> == 0;
}

// Returns, as bits, which of q, k, v and out have aligned rows.
template <typename T>
int aligned_rows(const Attention<T>& a, const AttentionGradient<T>& g = {}) {
  const auto aligned = [](const T* data, const T* gradient, const Strides& strides, int64_t width) {
    return rows_are_aligned(data, strides, width) && rows_are_aligned(gradient, strides, width);
  };
  return aligned(a.q, g.dq, a.of_q, a.width) | aligned(a.k, g.dk, a.of_k, a.width) << 1 |
         aligned(a.v, g.dv, a.of_v, a.value_width) << 2 | aligned(a.out, g.dout, a.of_out, a.value_width) << 3;
}

template <typename T>
void launch_delta(Call& call, const Attention<T>& a, const AttentionGradient<T>& g) {
  const int64_t rows = a.batch * a.heads * a.queries;
  const bool aligned = rows_are_aligned(a.out, a.of_out, a.value_width) && is_aligned<kPackWidth<T>>(g.dout);
  const int64_t blocks = least(parts_of(rows, kDeltaRows), INT32_MAX);
  launch(call, delta_kernel<T>, blocks, kDeltaThreads, 0, a, g, rows, aligned);
}

}  // namespace msops::flash_attention

#endif
