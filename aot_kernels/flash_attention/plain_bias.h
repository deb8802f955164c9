// The gradient of a bias on any GPU. A block owns a tile of it, and adds up dx of all samples, heads, queries and keys
// that share these elements, in order.
#pragma once

#include "plain_backward.h"

#ifdef __CUDACC__

namespace msops::flash_attention::plain {

// Adds up the tile's rows where all queries share an element, and its columns where all keys do. What rows and columns
// other than the first then hold does not matter.
template <typename S, typename C>
__device__ __forceinline__ void add_shared(C (&sums)[4][4], bool of_queries, bool of_keys, Shared<C, S>& shared,
                                           const ThreadPlace<S>& place) {
  if (!of_queries && !of_keys) return;
  const int at = static_cast<int>(threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) shared.tile[(place.y + r) * S::kPitch + place.x + c] = sums[r][c];
  __syncthreads();
  if (of_queries && at < S::kTile)
    for (int r = 1; r < S::kTile; ++r) shared.tile[at] += shared.tile[r * S::kPitch + at];
  __syncthreads();
  if (of_keys && at < S::kTile)
    for (int c = 1; c < S::kTile; ++c) shared.tile[at * S::kPitch] += shared.tile[at * S::kPitch + c];
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[r][c] = shared.tile[(place.y + r) * S::kPitch + place.x + c];
}

template <typename T>
__global__ void __launch_bounds__(ShapeOf<T>::kThreads)
    plain_backward_bias(const ExtendedAttention<T> a, const AttentionGradient<T> g, const BiasGradient<T> to,
                        int64_t query_tiles, int64_t key_tiles, int64_t count) {
  using C = Compute<T>;
  using S = ShapeOf<T>;
  using Bias = BiasGradient<T>;
  __shared__ Shared<C, S> shared;
  const ThreadPlace<S> place;
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int64_t j0 = item % key_tiles * S::kTile, i0 = item / key_tiles % query_tiles * S::kTile;
    const int64_t head = item / key_tiles / query_tiles % to.heads, sample = item / key_tiles / query_tiles / to.heads;
    const Span samples = Bias::sharing(to.batch, a.batch, sample), heads = Bias::sharing(to.heads, a.heads, head);
    const Span all_queries = Bias::sharing(to.queries, a.queries, i0, S::kTile);
    const Span all_keys = Bias::sharing(to.keys, a.keys, j0, S::kTile);
    C sums[4][4] = {};
    for (int64_t b = samples.begin; b < samples.end; ++b) {
      const Sequence s = a.sequence(b);
      for (int64_t h = heads.begin; h < heads.end; ++h)
        for (int64_t i = all_queries.begin; i < all_queries.end; i += S::kTile) {
          const int rows = static_cast<int>(least(S::kTile, all_queries.end - i));
          const Span seen = a.keys_of(s, {i, i + rows});
          const int64_t kv_head = h / a.group(), end = least(all_keys.end, seen.end);
          const RowLoads<T, S> q_rows(
              [&](int r) { return row_or_null(r < rows, a.q, a.of_q.offset(b, h, s.first_query + i + r)); });
          const RowLoads<T, S> dout_rows(
              [&](int r) { return row_or_null(r < rows, g.dout, a.of_out.offset(b, h, s.first_query + i + r)); });
          for (int64_t j = all_keys.begin; j < end; j += S::kTile) {
            const int n = static_cast<int>(least(S::kTile, end - j));
            if (j + n <= seen.begin) continue;
            const RowLoads<T, S> k_rows(
                [&](int r) { return row_or_null(r < n, a.k, a.of_k.offset(b, kv_head, s.first_key + j + r)); });
            const RowLoads<T, S> v_rows(
                [&](int r) { return row_or_null(r < n, a.v, a.of_v.offset(b, kv_head, s.first_key + j + r)); });
            Scores<ExtendedAttention<T>, true> scores;
            scores.compute(a, g, s, b, h, i, rows, j, n, q_rows, k_rows, dout_rows, v_rows, shared, place);
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
              for (int c = 0; c < 4; ++c) sums[r][c] += scores.dz[r][c];
          }
        }
    }
    add_shared<S>(sums, to.queries != a.queries, to.keys != a.keys, shared, place);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t i = i0 + place.y + r, j = j0 + place.x + c;
        if (i < to.queries && j < to.keys) to.store(sample, head, i, j, sums[r][c]);
      }
  }
}

// Computes the gradient of the bias from delta.
template <typename T>
void launch_bias_backward(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g,
                          const BiasGradient<T>& to) {
  using S = ShapeOf<T>;
  const int64_t query_tiles = parts_of(to.queries, S::kTile), key_tiles = parts_of(to.keys, S::kTile);
  const int64_t count = to.batch * to.heads * query_tiles * key_tiles;
  launch(call, plain_backward_bias<T>, least(count, INT32_MAX), S::kThreads, 0, a, g, to, query_tiles, key_tiles,
         count);
}

}  // namespace msops::flash_attention::plain

#endif
