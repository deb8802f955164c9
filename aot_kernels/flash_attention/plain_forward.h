// The forward pass on any GPU. A block has a tile of queries and a slice of the values' columns.
#pragma once

#include "combine.h"
#include "plain.h"

#ifdef __CUDACC__

namespace msops::flash_attention::plain {

// Where there are few queries, a tile holds all heads that read the same keys.
template <typename T, typename S>
struct QueryTiles {
  bool together;
  int64_t units, tiles;  // heads, or heads of keys; tiles of each

  explicit QueryTiles(const Attention<T>& a)
      : together(a.queries * a.group() <= S::kTile),
        units(together ? a.kv_heads : a.heads),
        tiles(together ? 1 : parts_of(a.queries, S::kTile)) {}

  __device__ int64_t rows(const Attention<T>& a, const Sequence& s) const {
    return together ? s.queries * a.group() : s.queries;
  }
  __device__ int64_t head(const Attention<T>& a, const Sequence& s, int64_t unit, int64_t row) const {
    return together ? unit * a.group() + row / s.queries : unit;
  }
  __device__ int64_t query(const Sequence& s, int64_t row) const { return together ? row % s.queries : row; }
};

// A block's tile has kSlices x kTile columns of values. A is Attention<T> or ExtendedAttention<T>.
template <typename A, int kSlices, typename T = typename A::Element>
__global__ void __launch_bounds__(ShapeOf<T>::kThreads)
    plain_forward(const A a, QueryTiles<T, ShapeOf<T>> tiles, int64_t slices, int64_t count) {
  using C = Compute<T>;
  using S = ShapeOf<T>;
  __shared__ Shared<C, S> shared;
  const ThreadPlace<S> place;
  const int width = static_cast<int>(a.width), value_width = static_cast<int>(a.value_width);
  const int row = threadIdx.x % S::kTile, part = threadIdx.x / S::kTile;  // a thread's part of the softmax
  constexpr int kPart = S::kTile / S::kParts;                             // keys
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    // Slices of one tile are neighbours; the last tiles, which are the longest if attention is causal, come first.
    const int first_column = static_cast<int>(item % slices) * kSlices * S::kTile;
    const int64_t split = item / slices % a.splits, outer = item / slices / a.splits;
    const int64_t units = a.batch * tiles.units, tile = tiles.tiles - 1 - outer / units;
    const int64_t unit = outer % units % tiles.units, b = outer % units / tiles.units;
    const Sequence s = a.sequence(b);
    const int64_t first = tile * S::kTile, rows = least(S::kTile, tiles.rows(a, s) - first);
    if (rows <= 0) continue;
    const int64_t kv_head = tiles.together ? unit : unit / a.group();
    const auto head_of = [&](int64_t r) { return tiles.head(a, s, unit, first + r); };
    const auto query_of = [&](int64_t r) { return tiles.query(s, first + r); };
    const Span queries = tiles.together ? Span{0, s.queries} : Span{first, first + rows};
    const Span seen = a.keys_of(s, queries), keys = a.splits > 1 ? a.part(seen, split) : seen;
    const RowLoads<T, S> q_rows([&](int r) {
      if (r >= rows) return static_cast<const T*>(nullptr);
      return a.q + a.of_q.offset(b, head_of(r), s.first_query + query_of(r));
    });
    const Logit<A> logit{a, s, b};
    const int64_t row_head = row < rows ? head_of(row) : 0, row_query = row < rows ? query_of(row) : 0;
    C out[kSlices][4][4] = {}, max = -INFINITY, sum = 0;
    for (int64_t j = keys.begin; j < keys.end; j += S::kTile) {
      const int n = static_cast<int>(least(S::kTile, keys.end - j));
      const bool sees_all = n == S::kTile && a.sees_all(s, queries, {j, j + n});
      // Multiply queries and keys.
      C x[4][4];
      const RowLoads<T, S> k_rows(
          [&](int r) { return row_or_null(r < n, a.k, a.of_k.offset(b, kv_head, s.first_key + j + r)); });
      multiply_rows<S>(x, q_rows, k_rows, width, shared, place);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) shared.tile[(place.x + c) * S::kPitch + place.y + r] = x[r][c];
      __syncthreads();
      // Update the maxima and sums of rows, and turn products into logits and weights.
      C most_of_part = C(-INFINITY);
#pragma unroll 2
      for (int key = part * kPart; key < (part + 1) * kPart; ++key) {
        C& value = shared.tile[key * S::kPitch + row];
        const bool inside = row < rows && key < n;
        value = inside ? logit(logit.of_product(value), row_head, row_query, j + key, sees_all) : C(-INFINITY);
        most_of_part = value > most_of_part ? value : most_of_part;
      }
      shared.maxima[part * S::kTile + row] = most_of_part;
      __syncthreads();
      C new_max = max;
#pragma unroll
      for (int other = 0; other < S::kParts; ++other) {
        const C value = shared.maxima[other * S::kTile + row];
        new_max = value > new_max ? value : new_max;
      }
      const C shift = new_max == C(-INFINITY) ? C(0) : new_max, factor = exponential(max - shift);
      max = new_max, sum *= factor;
      if (part == 0) shared.factors[row] = factor;
      Dropout<A> dropout(a, b, row_head, row_query);
#pragma unroll 4
      for (int key = part * kPart; key < (part + 1) * kPart; ++key) {
        C& value = shared.tile[key * S::kPitch + row];
        value = exponential(value - shift);
        sum += value;
        if constexpr (A::kIsExtended) value *= dropout(j + key);
      }
      // Multiply weights and values.
      const RowLoads<T, S> v_rows(
          [&](int r) { return row_or_null(r < n, a.v, a.of_v.offset(b, kv_head, s.first_key + j + r)); });
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        v_rows.store(shared.rows, first_column + slice * S::kTile, value_width);
        __syncthreads();
        C factors[4];
        load_four(factors, shared.factors + place.y);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) out[slice][r][c] *= factors[r];
        multiply<S>(out[slice], shared.tile, shared.rows, place, S::kTile);
        __syncthreads();
      }
    }
    // Add the sums of the parts of rows, and store.
    shared.maxima[part * S::kTile + row] = sum;
    __syncthreads();
    C total = 0;
#pragma unroll
    for (int other = 0; other < S::kParts; ++other) total += shared.maxima[other * S::kTile + row];
    if (part == 0) shared.factors[row] = a.splits > 1 ? C(1) : total == 0 ? C(0) : 1 / total;
    if (part == 0 && first_column == 0 && row < rows) {
      if (a.splits > 1) {
        C* const stats = a.partial_stats(split, b, head_of(row), query_of(row));
        stats[0] = max, stats[1] = total;
      } else {
        a.lse[a.of_lse.offset(b, head_of(row), s.first_query + query_of(row))] = max + log(total);
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = place.y + r;
      if (i >= rows) continue;
      const int64_t h = head_of(i), query = query_of(i);
      T* const to = a.out + a.of_out.offset(b, h, s.first_query + query);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = first_column + slice * S::kTile + place.x + c;
          const C value = out[slice][r][c] * shared.factors[i];
          if (column >= value_width) continue;
          if (a.splits > 1)
            a.partial_sums(split, b, h, query)[column] = value;
          else
            to[column] = T(value);
        }
    }
    __syncthreads();
  }
}

template <int kSlices, typename A>
void launch_forward(Call& call, const A& a) {
  using T = typename A::Element;
  using S = ShapeOf<T>;
  const QueryTiles<T, S> tiles(a);
  const int64_t slices = most(1, parts_of(a.value_width, kSlices * S::kTile));
  const int64_t count = a.batch * tiles.units * tiles.tiles * a.splits * slices;
  if (count == 0) return;
  launch(call, plain_forward<A, kSlices>, least(count, INT32_MAX), S::kThreads, 0, a, tiles, slices, count);
  if (a.splits > 1) launch_combine(call, a);
}

}  // namespace msops::flash_attention::plain

#endif
