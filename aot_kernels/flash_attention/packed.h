// Gives rows of packed tensors that are in no sequence their values, which no kernel of attention writes.
#pragma once

#include <cmath>

#include "../common/parallel.h"
#include "problem.h"

namespace msops::flash_attention {

// Index i is lane i % kLanes of a row. A row has `count` elements, `apart` from each other.
template <typename X>
struct FillRows {
  static constexpr int kLanes = 32;
  const int32_t* cu_seqlens;
  int64_t batch, longest, count, stride, apart;
  X* data;
  X value;

  template <typename Index>
  MSOPS_BOTH void operator()(Index index) const {
    const int64_t row = index / kLanes;
    if (in_sequence(row)) return;
    for (int64_t e = index % kLanes; e < count; e += kLanes) data[row * stride + e * apart] = value;
  }

  MSOPS_BOTH bool in_sequence(int64_t row) const {
    int64_t first = 0, end = batch;  // the last sequence that begins at or before the row is before `end`
    while (first < end) {
      const int64_t middle = (first + end) / 2;
      if (cu_seqlens[middle] <= row)
        first = middle + 1;
      else
        end = middle;
    }
    return first > 0 && row < cu_seqlens[first] && row - cu_seqlens[first - 1] < longest;
  }
};

template <typename X>
void fill(Call& call, const FillRows<X>& body, int64_t rows) {
  const int64_t indices = rows * FillRows<X>::kLanes;
  if (call.is_on_cpu()) return on_cpu(call, indices, body, 4);
  on_gpu_with<int64_t>(call, indices, body);
}

// Fills out with 0 and lse with -infinity.
template <typename T>
void fill_results(Call& call, const Attention<T>& a) {
  using C = Compute<T>;
  if (!a.is_packed()) return;
  const int64_t width = a.heads * a.value_width;
  fill(call, FillRows<T>{a.cu_seqlens_q, a.batch, a.queries, width, width, 1, a.out, T(0.0f)}, a.query_rows);
  fill(call, FillRows<C>{a.cu_seqlens_q, a.batch, a.queries, a.heads, 1, a.query_rows, a.lse, C(-HUGE_VAL)},
       a.query_rows);
}

// Fills the gradients with 0.
template <typename T>
void fill_gradients(Call& call, const Attention<T>& a, const AttentionGradient<T>& g) {
  if (!a.is_packed()) return;
  const int64_t q = a.heads * a.width, k = a.kv_heads * a.width, v = a.kv_heads * a.value_width;
  fill(call, FillRows<T>{a.cu_seqlens_q, a.batch, a.queries, q, q, 1, g.dq, T(0.0f)}, a.query_rows);
  fill(call, FillRows<T>{a.cu_seqlens_k, a.batch, a.keys, k, k, 1, g.dk, T(0.0f)}, a.key_rows);
  fill(call, FillRows<T>{a.cu_seqlens_k, a.batch, a.keys, v, v, 1, g.dv, T(0.0f)}, a.key_rows);
}

}  // namespace msops::flash_attention
