// The gradient on any GPU, by two kernels that both compute the logits: one owns keys and adds over queries in order,
// the other owns queries.
#pragma once

#include "plain.h"

#ifdef __CUDACC__

namespace msops::flash_attention::plain {

// Scores are a thread's weights w_ij (p_ij without dropout), and dz_ij, for queries place.y + r and keys place.x + c of
// a tile. Where `kOfLogits`, dz are dx.
template <typename A, bool kOfLogits = false>
struct Scores {
  using T = typename A::Element;
  using S = ShapeOf<T>;
  using C = Compute<T>;
  C p[4][4], dz[4][4];

  // The tile has `rows` queries of head h from query i on, and n keys from key j on.
  __device__ __forceinline__ void compute(const A& a, const AttentionGradient<T>& g, const Sequence& s, int64_t b,
                                          int64_t h, int64_t i, int rows, int64_t j, int n, const RowLoads<T, S>& q,
                                          const RowLoads<T, S>& k, const RowLoads<T, S>& dout, const RowLoads<T, S>& v,
                                          Shared<C, S>& shared, const ThreadPlace<S>& place) {
    multiply_rows<S>(p, q, k, static_cast<int>(a.width), shared, place);
    multiply_rows<S>(dz, dout, v, static_cast<int>(a.value_width), shared, place);
    const bool sees_all = rows == S::kTile && n == S::kTile && a.sees_all(s, {i, i + rows}, {j, j + n});
    const Logit<A> logit{a, s, b};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool inside = place.y + r < rows;
      const int64_t query = i + place.y + r, at = a.of_lse.offset(b, h, s.first_query + query);
      const C lse = inside ? a.lse[at] : C(-INFINITY), delta = inside ? g.delta[at] : C(0);
      const C rest = inside ? rest_at<A>(g, at) : C(0);
      Dropout<A> dropout(a, b, h, query);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        C weight = 0, of_logit = 0;
        if (lse > C(-INFINITY) && place.x + c < n) {
          const C y = logit.of_product(p[r][c]), x = logit(y, h, query, j + place.x + c, sees_all);
          if (x > C(-INFINITY)) {
            const C kept = dropout(j + place.x + c);
            weight = exponential(x - lse - rest);
            of_logit = weight * (dz[r][c] * kept - delta);
            if constexpr (!kOfLogits) of_logit *= logit.slope(y);
            weight *= kept;
          }
        }
        p[r][c] = weight, dz[r][c] = of_logit;
      }
    }
  }
};

// Stores a thread's sums, whose rows are those of a tensor, from row `first` on.
template <typename S, typename T, typename C, typename F>
__device__ __forceinline__ void store_sums(const C (&sums)[4][4], const ThreadPlace<S>& place, int column, int width,
                                           const F& row) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    T* const to = row(place.y + r);
    if (to == nullptr) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (column + place.x + c < width) to[column + place.x + c] = T(sums[r][c]);
  }
}

// A block owns a tile of keys of one head, and kSlices x kTile columns of dk and dv.
template <typename A, int kSlices, typename T = typename A::Element>
__global__ void __launch_bounds__(ShapeOf<T>::kThreads)
    plain_backward_keys(const A a, const AttentionGradient<T> g, int64_t slices, int64_t count) {
  using C = Compute<T>;
  using S = ShapeOf<T>;
  __shared__ Shared<C, S> shared;
  const ThreadPlace<S> place;
  const int width = static_cast<int>(a.width), value_width = static_cast<int>(a.value_width);
  const int64_t heads = a.batch * a.kv_heads;
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int first_column = static_cast<int>(item % slices) * kSlices * S::kTile;
    const int64_t outer = item / slices, kv_head = outer % heads % a.kv_heads, b = outer % heads / a.kv_heads;
    const Sequence s = a.sequence(b);
    const int64_t j = outer / heads * S::kTile, end = a.is_packed() ? s.keys : a.keys;
    if (j >= end) continue;
    const int n = static_cast<int>(most(0, least(S::kTile, s.keys - j)));
    const RowLoads<T, S> k_rows(
        [&](int r) { return row_or_null(r < n, a.k, a.of_k.offset(b, kv_head, s.first_key + j + r)); });
    const RowLoads<T, S> v_rows(
        [&](int r) { return row_or_null(r < n, a.v, a.of_v.offset(b, kv_head, s.first_key + j + r)); });
    C dk[kSlices][4][4] = {}, dv[kSlices][4][4] = {};
    const Span queries = n > 0 ? a.queries_of(s, {j, j + n}) : Span{0, 0};
    for (int64_t h = kv_head * a.group(); h < (kv_head + 1) * a.group(); ++h)
      for (int64_t i = queries.begin; i < queries.end; i += S::kTile) {
        const int rows = static_cast<int>(least(S::kTile, queries.end - i));
        const RowLoads<T, S> q_rows(
            [&](int r) { return row_or_null(r < rows, a.q, a.of_q.offset(b, h, s.first_query + i + r)); });
        const RowLoads<T, S> dout_rows(
            [&](int r) { return row_or_null(r < rows, g.dout, a.of_out.offset(b, h, s.first_query + i + r)); });
        Scores<A> scores;
        scores.compute(a, g, s, b, h, i, rows, j, n, q_rows, k_rows, dout_rows, v_rows, shared, place);
        const auto add = [&](const C(&factors)[4][4], const RowLoads<T, S>& x, int of_x, C(&sums)[kSlices][4][4]) {
#pragma unroll
          for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) shared.tile[(place.y + r) * S::kPitch + place.x + c] = factors[r][c];
          __syncthreads();
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice) {
            x.store(shared.rows, first_column + slice * S::kTile, of_x);
            __syncthreads();
            multiply<S>(sums[slice], shared.tile, shared.rows, place, S::kTile);
            __syncthreads();
          }
        };
        add(scores.p, dout_rows, value_width, dv);
        add(scores.dz, q_rows, width, dk);
      }
    const auto row_of = [&](T* data, const Strides& strides, int r) {
      return j + r < end ? data + strides.offset(b, kv_head, s.first_key + j + r) : nullptr;
    };
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int column = first_column + slice * S::kTile;
      store_sums<S, T>(dk[slice], place, column, width, [&](int r) { return row_of(g.dk, a.of_k, r); });
      store_sums<S, T>(dv[slice], place, column, value_width, [&](int r) { return row_of(g.dv, a.of_v, r); });
    }
  }
}

// A block owns a tile of queries of one head, and kSlices x kTile columns of dq.
template <typename A, int kSlices, typename T = typename A::Element>
__global__ void __launch_bounds__(ShapeOf<T>::kThreads)
    plain_backward_queries(const A a, const AttentionGradient<T> g, int64_t slices, int64_t count) {
  using C = Compute<T>;
  using S = ShapeOf<T>;
  __shared__ Shared<C, S> shared;
  const ThreadPlace<S> place;
  const int width = static_cast<int>(a.width);
  const int64_t heads = a.batch * a.heads, tiles = (a.queries + S::kTile - 1) / S::kTile;
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int first_column = static_cast<int>(item % slices) * kSlices * S::kTile;
    const int64_t outer = item / slices, h = outer % heads % a.heads, b = outer % heads / a.heads;
    const Sequence s = a.sequence(b);
    const int64_t i = (tiles - 1 - outer / heads) * S::kTile, kv_head = h / a.group();
    const int rows = static_cast<int>(least(S::kTile, s.queries - i));
    if (rows <= 0) continue;
    const RowLoads<T, S> q_rows(
        [&](int r) { return row_or_null(r < rows, a.q, a.of_q.offset(b, h, s.first_query + i + r)); });
    const RowLoads<T, S> dout_rows(
        [&](int r) { return row_or_null(r < rows, g.dout, a.of_out.offset(b, h, s.first_query + i + r)); });
    C dq[kSlices][4][4] = {};
    const Span keys = a.keys_of(s, {i, i + rows});
    for (int64_t j = keys.begin; j < keys.end; j += S::kTile) {
      const int n = static_cast<int>(least(S::kTile, keys.end - j));
      const RowLoads<T, S> k_rows(
          [&](int r) { return row_or_null(r < n, a.k, a.of_k.offset(b, kv_head, s.first_key + j + r)); });
      const RowLoads<T, S> v_rows(
          [&](int r) { return row_or_null(r < n, a.v, a.of_v.offset(b, kv_head, s.first_key + j + r)); });
      Scores<A> scores;
      scores.compute(a, g, s, b, h, i, rows, j, n, q_rows, k_rows, dout_rows, v_rows, shared, place);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) shared.tile[(place.x + c) * S::kPitch + place.y + r] = scores.dz[r][c];
      __syncthreads();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        k_rows.store(shared.rows, first_column + slice * S::kTile, width);
        __syncthreads();
        multiply<S>(dq[slice], shared.tile, shared.rows, place, S::kTile);
        __syncthreads();
      }
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
      store_sums<S, T>(dq[slice], place, first_column + slice * S::kTile, width,
                       [&](int r) { return r < rows ? g.dq + a.of_q.offset(b, h, s.first_query + i + r) : nullptr; });
  }
}

// Computes dq, dk and dv from delta.
template <int kSlices, typename A>
void launch_backward(Call& call, const A& a, const AttentionGradient<typename A::Element>& g) {
  using S = ShapeOf<typename A::Element>;
  const auto slices_of = [](int64_t width) { return most(1, parts_of(width, kSlices * S::kTile)); };
  const auto launch = [&](auto kernel, int64_t slices, int64_t count) {
    msops::launch(call, kernel, least(count, INT32_MAX), S::kThreads, 0, a, g, slices, count);
  };
  const int64_t of_keys = slices_of(most(a.width, a.value_width)), of_queries = slices_of(a.width);
  launch(plain_backward_keys<A, kSlices>, of_keys, a.batch * a.kv_heads * parts_of(a.keys, S::kTile) * of_keys);
  launch(plain_backward_queries<A, kSlices>, of_queries,
         a.batch * a.heads * parts_of(a.queries, S::kTile) * of_queries);
}

}  // namespace msops::flash_attention::plain

#endif
