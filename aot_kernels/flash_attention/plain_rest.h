// The rests of queries (see extended.h) on any GPU. A block takes a tile of queries, and is done at once where lse of
// all of them is near 0.
#pragma once

#include "plain.h"

#ifdef __CUDACC__

namespace msops::flash_attention::plain {

template <typename T>
__global__ void __launch_bounds__(ShapeOf<T>::kThreads)
    plain_rest(const ExtendedAttention<T> a, const AttentionGradient<T> g, int64_t tiles, int64_t count) {
  using C = Compute<T>;
  using S = ShapeOf<T>;
  __shared__ Shared<C, S> shared;
  const ThreadPlace<S> place;
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int64_t i = item % tiles * S::kTile, h = item / tiles % a.heads, b = item / tiles / a.heads;
    const Sequence s = a.sequence(b);
    const int rows = static_cast<int>(least(S::kTile, s.queries - i)), row = static_cast<int>(threadIdx.x);
    const auto place_of = [&](int r) { return a.of_lse.offset(b, h, s.first_query + i + r); };
    const bool is_far = row < rows && a.is_far(a.lse[place_of(row)]);
    if (row < rows) g.rest[place_of(row)] = 0;
    if (!__syncthreads_or(is_far)) continue;
    const int64_t kv_head = h / a.group();
    const Span keys = a.keys_of(s, {i, i + rows});
    const Logit<ExtendedAttention<T>> logit{a, s, b};
    const RowLoads<T, S> q_rows(
        [&](int r) { return row_or_null(r < rows, a.q, a.of_q.offset(b, h, s.first_query + i + r)); });
    C sums[4] = {};
    for (int64_t j = keys.begin; j < keys.end; j += S::kTile) {
      const int n = static_cast<int>(least(S::kTile, keys.end - j));
      const RowLoads<T, S> k_rows(
          [&](int r) { return row_or_null(r < n, a.k, a.of_k.offset(b, kv_head, s.first_key + j + r)); });
      C x[4][4];
      multiply_rows<S>(x, q_rows, k_rows, static_cast<int>(a.width), shared, place);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (place.y + r >= rows) continue;
        const C lse = a.lse[place_of(place.y + r)];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (place.x + c >= n) continue;
          const C of_key = logit(logit.of_product(x[r][c]), h, i + place.y + r, j + place.x + c, false);
          sums[r] += of_key > C(-INFINITY) ? exponential(of_key - lse) : C(0);
        }
      }
    }
    constexpr int kAcross = S::kTile / 4;  // threads that share a row
#pragma unroll
    for (int r = 0; r < 4; ++r) shared.tile[(place.y + r) * S::kPitch + place.x / 4] = sums[r];
    __syncthreads();
    if (is_far) {
      C total = 0;
      for (int x = 0; x < kAcross; ++x) total += shared.tile[row * S::kPitch + x];
      g.rest[place_of(row)] = log(total);
    }
    __syncthreads();
  }
}

// Computes g.rest where there is one.
template <typename T>
void launch_rest(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g) {
  using S = ShapeOf<T>;
  const int64_t tiles = parts_of(a.queries, S::kTile), count = a.batch * a.heads * tiles;
  if (g.rest) launch(call, plain_rest<T>, least(count, INT32_MAX), S::kThreads, 0, a, g, tiles, count);
}

}  // namespace msops::flash_attention::plain

#endif
