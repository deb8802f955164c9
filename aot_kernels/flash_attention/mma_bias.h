// The gradient of a bias on tensor cores for sm_80 and later. A block owns a tile of it, and adds up dx of all samples,
// heads, queries and keys that share these elements, in order.
#pragma once

#include "mma_backward.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

template <int kWidth_>
struct BiasShape {
  static constexpr int kWidth = kWidth_, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps, kPitch = kRows + 1;  // of queries, and of keys
  static constexpr int kBytes = 4 * kRows * kWidth * 2;
  static_assert(kRows * kPitch * 4 <= kBytes, "the tile of sums takes the place of the tiles of rows");
};

// Adds dx of a tile of an item's queries and of keys from j0 to end - 1. `tiles` are those of q, dout, k and v, (4,
// kRows, kWidth).
template <typename S>
__device__ __forceinline__ void add_gradient(float (&sums)[1][S::kRows / 8][4], const ExtendedAttention<Half>& a,
                                             const AttentionGradient<Half>& g, const Exponents<Half>& exponents,
                                             const QueryItem& item, int j0, int end, int aligned, Half* tiles) {
  using T = Tile<Half, S::kWidth>;
  constexpr int kSize = S::kRows * S::kWidth;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = a.width, value_width = a.value_width;
  const auto q = rows_of_q(a, item, width, aligned);
  const auto dout = rows_of_dout(a, g, item, value_width, aligned);
  const auto k = rows_of_k(a, item, width, aligned);
  const auto v = rows_of_v(a, item, value_width, aligned);
  __syncthreads();  // others may still read what is overwritten
  T::template load<S::kRows, S::kThreads>(tiles, q, item.i0, item.i1, threadIdx.x);
  T::template load<S::kRows, S::kThreads>(tiles + kSize, dout, item.i0, item.i1, threadIdx.x);
  T::template load<S::kRows, S::kThreads>(tiles + 2 * kSize, k, j0, end, threadIdx.x);
  T::template load<S::kRows, S::kThreads>(tiles + 3 * kSize, v, j0, end, threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  const int i0 = item.i0 + 16 * warp, i1 = std::min(i0 + 16, item.i1);
  float lse[2], delta[2], rest[2], p[1][S::kRows / 8][4], dx[1][S::kRows / 8][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + 8 * half + lane / 4;
    const int64_t from = item.query(a.of_lse, i);
    lse[half] = i < i1 ? a.lse[from] : INFINITY;
    delta[half] = i < i1 ? g.delta[from] : 0;
    rest[half] = i < i1 && g.rest ? g.rest[from] : 0;
    if (lse[half] == -INFINITY) lse[half] = INFINITY;  // so that all p are 0
  }
  const Seen<Half> seen(a, item.s, item.b, item.h, end);
  const Terms<ExtendedAttention<Half>> terms(a, seen);
  const auto query = [&](int, int half) { return QueryOfRow{item.h, i0 + 8 * half + lane / 4}; };
  clear(p), clear(dx);
  T::multiply_rows(p, T::left(tiles, 16 * warp), T::right(tiles + 2 * kSize), width);
  exponents.logits.apply(p);
  terms.add(p, j0, query);
  if (!seen.all(i0, i1, j0, j0 + S::kRows)) seen.hide(p, i0, j0);
  T::multiply_rows(dx, T::left(tiles + kSize, 16 * warp), T::right(tiles + 3 * kSize), value_width);
  for_sums<1, S::kRows / 8>(
      [&](int m, int n, int i, int, int) { p[m][n][i] = exponents.p(p[m][n][i], lse[i / 2], rest[i / 2]); });
  terms.template for_weights<1, S::kRows / 8>(j0, query, [&](int m, int n, int i, bool keeps) {
    differentiate_weight(dx[m][n][i], p[m][n][i], 1, keeps, a.kept, delta[i / 2]);
    sums[m][n][i] += dx[m][n][i];
  });
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    mma_backward_bias(const ExtendedAttention<Half> a, const AttentionGradient<Half> g, const BiasGradient<Half> to,
                      int64_t query_tiles, int64_t key_tiles, int64_t count, int aligned) {
  if (!has_instructions_of(80)) return;
  using Bias = BiasGradient<Half>;
  extern __shared__ __align__(1024) unsigned char shared[];
  float* const tile = reinterpret_cast<float*>(shared);  // (kRows, kPitch)
  const int warp = threadIdx.x / 32;
  const Exponents exponents(a);
  for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
    const int64_t j0 = item % key_tiles * S::kRows, i0 = item / key_tiles % query_tiles * S::kRows;
    const int64_t head = item / key_tiles / query_tiles % to.heads, sample = item / key_tiles / query_tiles / to.heads;
    const Span samples = Bias::sharing(to.batch, a.batch, sample), heads = Bias::sharing(to.heads, a.heads, head);
    const Span queries = Bias::sharing(to.queries, a.queries, i0, S::kRows);
    const Span keys = Bias::sharing(to.keys, a.keys, j0, S::kRows);
    float sums[1][S::kRows / 8][4];
    clear(sums);
    for (int64_t b = samples.begin; b < samples.end; ++b)
      for (int64_t h = heads.begin; h < heads.end; ++h)
        for (int64_t i = queries.begin; i < queries.end; i += S::kRows) {
          const auto of_head = QueryItem::of(a, static_cast<int>(b), static_cast<int>(h), i, S::kRows);
          const int end = static_cast<int>(least(keys.end, of_head.end));
          for (int j = static_cast<int>(keys.begin); j < end; j += S::kRows)
            if (j + S::kRows > of_head.begin)
              add_gradient<S>(sums, a, g, exponents, of_head, j, end, aligned, reinterpret_cast<Half*>(shared));
        }

    // Add rows where all queries share an element, and columns where all keys do, and store.
    __syncthreads();
    for_sums<1, S::kRows / 8>([&](int m, int n, int e, int row, int column) {
      tile[(16 * warp + row) * S::kPitch + column] = sums[m][n][e];
    });
    __syncthreads();
    if (to.queries != a.queries && threadIdx.x < S::kRows)
      for (int r = 1; r < S::kRows; ++r) tile[threadIdx.x] += tile[r * S::kPitch + threadIdx.x];
    __syncthreads();
    if (to.keys != a.keys && threadIdx.x < S::kRows)
      for (int c = 1; c < S::kRows; ++c) tile[threadIdx.x * S::kPitch] += tile[threadIdx.x * S::kPitch + c];
    __syncthreads();
    for (int at = threadIdx.x; at < S::kRows * S::kRows; at += S::kThreads) {
      const int row = at / S::kRows, column = at % S::kRows;
      if (i0 + row < to.queries && j0 + column < to.keys)
        to.store(sample, head, i0 + row, j0 + column, tile[row * S::kPitch + column]);
    }
  }
}

}  // namespace msops::flash_attention

#endif
