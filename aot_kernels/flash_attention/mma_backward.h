// The backward pass on tensor cores for sm_80 and later, in two kernels: the first sums the gradients of keys and
// values, the second those of queries. Each sum has one owner, which adds in a fixed order.
//
// In the first kernel, a block takes a tile of keys, and goes through the queries of all heads that read them. A warp
// owns 16 or 32 keys, and computes the transposed products k q and v dout, since their float16 are then the left
// operands of dv = p^T dout and dk = dx^T q as they are in registers. In the second, it owns queries, as forward does.
#pragma once

#include "delta.h"
#include "mma_forward.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

// Exponents computes p = e^(logit - lse), and the gradient of products q k.
template <typename T>
struct Exponents {
  Logits<T> logits;
  float factor;

  template <typename A>
  __device__ explicit Exponents(const A& a) : logits(a), factor(logits.factor * kLog2E<float>) {}
  __device__ __forceinline__ float p(float x, float lse) const {
    return ex2_approx_ftz(x * factor - lse * kLog2E<float>);
  }
  // Returns e^(logit - lse - rest). The difference of the first two is exact where both are large.
  __device__ __forceinline__ float p(float x, float lse, float rest) const {
    return ex2_approx_ftz((fmaf(x, logits.factor, -lse) - rest) * kLog2E<float>);
  }

  // Sets dx, which is dp, to the gradient of products q k except for the factor scale. delta(m, i, column) and lse are
  // those of a sum's query.
  template <int kM, int kN, typename Delta, typename Lse>
  __device__ __forceinline__ void differentiate(float (&dx)[kM][kN][4], const float (&p)[kM][kN][4], Delta&& delta,
                                                Lse&& lse) const {
    for_sums<kM, kN>(
        [&](int m, int n, int i, int, int column) { dx[m][n][i] = p[m][n][i] * (dx[m][n][i] - delta(m, i, column)); });
    if (logits.softcap == 0) return;
    for_sums<kM, kN>([&](int m, int n, int i, int, int column) {
      const float tanh = (logf(p[m][n][i]) + lse(m, i, column)) / logits.softcap;
      dx[m][n][i] = p[m][n][i] > 0 ? dx[m][n][i] * (1 - tanh * tanh) : 0;
    });
  }
};
template <typename A>
Exponents(const A&) -> Exponents<typename A::Element>;

// Turns dp of a weight, dx, into the gradient of a product q k except for the factor scale, and p into the weight
// except for the factor `kept`, where dropout keeps it or not. `slope` is the logit's derivative by the product.
__device__ __forceinline__ void differentiate_weight(float& dx, float& p, float slope, bool keeps, float kept,
                                                     float delta) {
  dx = p * slope * ((keeps ? dx * kept : 0) - delta);
  if (!keeps) p = 0;
}

template <typename Element_, int kWidth_>
struct KeysShape {
  using Element = Element_;
  static constexpr bool kIsHalf = std::is_same<Element, Half>::value;
  static constexpr int kWidth = kWidth_, kWarps = kIsHalf && kWidth > 64 ? 8 : 4, kThreads = 32 * kWarps;
  static constexpr int kM = kWidth <= 64 ? 2 : 1;       // matrices of 16 keys that a warp has
  static constexpr int kParts = kWidth <= 128 ? 1 : 2;  // of the columns; a warp sums one part
  static constexpr int kKeys = 16 * kM * kWarps / kParts, kQueries = kIsHalf ? 32 : 16;
  static constexpr int kN = kWidth / kParts / 8;
  static constexpr int kStages = 2, kBlocks = kIsHalf && kWidth > 64 ? 1 : 2;
  static constexpr int kStage = 2 * kQueries * kWidth;  // elements
  static constexpr int kBytes = (2 * kKeys * kWidth + kStages * kStage) * sizeof(Element) + kStages * 3 * kQueries * 4;
};

// A is an Attention or ExtendedAttention of S::Element.
template <typename S, typename A>
__global__ void __launch_bounds__(S::kThreads, kBlocksOf<S, A>)
    mma_backward_keys(const A a, const AttentionGradient<typename S::Element> g, const Order order, int64_t count,
                      int aligned) {
  if (!has_instructions_of(80)) return;
  using Element = typename S::Element;
  using T = Tile<Element, S::kWidth>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* const k_tile = reinterpret_cast<Element*>(shared);  // (kKeys, kWidth)
  Element* const v_tile = k_tile + S::kKeys * S::kWidth;       // (kKeys, kWidth)
  Element* const stages = v_tile + S::kKeys * S::kWidth;       // (kStages, 2, kQueries, kWidth): q, dout
  // (kStages, 3, kQueries): lse, delta, rest
  float* const rows = reinterpret_cast<float*>(stages + S::kStages * S::kStage);
  const int warp = threadIdx.x / 32, width = a.width, value_width = a.value_width;
  [[maybe_unused]] const int lane = threadIdx.x % 32;
  const int part = warp % S::kParts, row = warp / S::kParts * (16 * S::kM);
  const Exponents exponents(a);
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const Order::Place at = order.find(number, a.kv_heads);
    const KeyItem item(a, at.b, at.h, at.tile * S::kKeys, S::kKeys);
    if (item.empty()) continue;
    const int begin = item.begin, end = item.end, group = static_cast<int>(a.group());
    const auto k = rows_of_k(a, item, width, aligned);
    const auto v = rows_of_v(a, item, value_width, aligned);

    // A step is a tile of queries of one head.
    const int tiles = (end - begin + S::kQueries - 1) / S::kQueries, steps = group * tiles;
    const auto begin_copy = [&](int step) {
      if (step < steps) {
        const int h = item.kv_head * group + step / tiles, i0 = begin + step % tiles * S::kQueries;
        Element* const stage = stages + step % S::kStages * S::kStage;
        const auto q = rows_of(a.q, a.of_q, item.query(a.of_q, h, 0), width, aligned & kAlignedQ);
        const auto dout = rows_of(g.dout, a.of_out, item.query(a.of_out, h, 0), value_width, aligned & kAlignedOut);
        T::template load<S::kQueries, S::kThreads>(stage, q, i0, end, threadIdx.x);
        T::template load<S::kQueries, S::kThreads>(stage + S::kQueries * S::kWidth, dout, i0, end, threadIdx.x);
        const int i = threadIdx.x % S::kQueries;
        if (threadIdx.x < (A::kIsExtended ? 3 : 2) * S::kQueries) {
          const float* const from = threadIdx.x < S::kQueries       ? a.lse
                                    : threadIdx.x < 2 * S::kQueries ? g.delta
                                                                    : g.rest;
          cp_async<4>(rows + step % S::kStages * (3 * S::kQueries) + threadIdx.x,
                      from ? from + item.query(a.of_lse, h, i0 + i) : a.lse, from && i0 + i < end);
        }
      }
      cp_async_commit();
    };
    __syncthreads();
    T::template load<S::kKeys, S::kThreads>(k_tile, k, item.j0, std::min(item.j1, item.keys), threadIdx.x);
    T::template load<S::kKeys, S::kThreads>(v_tile, v, item.j0, std::min(item.j1, item.keys), threadIdx.x);
    begin_copy(0);

    const int j0 = item.j0 + row;
    const unsigned k_address = T::left(k_tile, row), v_address = T::left(v_tile, row);
    float dk[S::kM][S::kN][4], dv[S::kM][S::kN][4];
    clear(dk), clear(dv);
    for (int step = 0; step < steps; ++step) {
      const int h = item.kv_head * group + step / tiles, i0 = begin + step % tiles * S::kQueries;
      const Element* const q_tile = stages + step % S::kStages * S::kStage;
      const Element* const dout_tile = q_tile + S::kQueries * S::kWidth;
      const float* const lse = rows + step % S::kStages * (3 * S::kQueries);
      const float* const delta = lse + S::kQueries;
      [[maybe_unused]] const float* const rest = delta + S::kQueries;
      cp_async_wait<0>();
      __syncthreads();
      begin_copy(step + 1);

      float p[S::kM][S::kQueries / 8][4], dx[S::kM][S::kQueries / 8][4];
      [[maybe_unused]] float slopes[S::kM][S::kQueries / 8][4];
      uint32_t words[S::kM][S::kQueries / T::kStep][4];
      clear(p), clear(dx);
      T::multiply_rows(p, k_address, T::right(q_tile), width);
      exponents.logits.apply(p);
      if constexpr (A::kIsExtended) exponents.logits.differentiate(slopes, p);
      const Seen<Element> seen(a, item.s, item.b, h, item.keys);
      const Terms<A> terms(a, seen);
      terms.add_transposed(p, h, i0, j0);
      for_sums<S::kM, S::kQueries / 8>([&](int m, int n, int i, int, int column) {
        if constexpr (A::kIsExtended)
          p[m][n][i] = exponents.p(p[m][n][i], lse[column] == -INFINITY ? INFINITY : lse[column], rest[column]);
        else
          p[m][n][i] = exponents.p(p[m][n][i], lse[column]);
      });
      if (!seen.all(i0, i0 + S::kQueries, j0, j0 + 16 * S::kM) || i0 + S::kQueries > end)
        seen.hide_transposed(p, i0, end, j0);
      T::multiply_rows(dx, v_address, T::right(dout_tile), value_width);
      if constexpr (A::kIsExtended) {
        terms.template for_transposed_weights<S::kM, S::kQueries / 8>(h, i0, j0, [&](int m, int n, int i, bool keeps) {
          differentiate_weight(dx[m][n][i], p[m][n][i], slopes[m][n][i], keeps, kept_of(a),
                               delta[8 * n + lane % 4 * 2 + i % 2]);
        });
      }
      operand(words, p);
      T::multiply(dv, words, T::at(T::transposed(dout_tile), part * S::kN * 8), value_width - part * S::kN * 8);
      if constexpr (!A::kIsExtended) {
        exponents.differentiate(
            dx, p, [&](int, int, int column) { return delta[column]; },
            [&](int, int, int column) { return lse[column]; });
      }
      operand(words, dx);
      T::multiply(dk, words, T::at(T::transposed(q_tile), part * S::kN * 8), width - part * S::kN * 8);
    }
    cp_async_wait<0>();
    __syncthreads();
    const auto to_k = rows_of(g.dk, a.of_k, item.key(a.of_k, 0), width, aligned & kAlignedK);
    const auto to_v = rows_of(g.dv, a.of_v, item.key(a.of_v, 0), value_width, aligned & kAlignedV);
    store_rows<S::kWidth>(dk, k_tile + row * S::kWidth, to_k, j0, item.j1, part, [&](int, int) { return a.scale; });
    store_rows<S::kWidth>(dv, v_tile + row * S::kWidth, to_v, j0, item.j1, part, [&](int, int) { return kept_of(a); });
  }
}

template <typename Element_, int kWidth_>
struct QueriesShape {
  using Element = Element_;
  static constexpr bool kIsHalf = std::is_same<Element, Half>::value;
  static constexpr int kWidth = kWidth_, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kM = kWidth <= (kIsHalf ? 128 : 64) ? 2 : 1;  // matrices of 16 queries that a warp has
  static constexpr int kQueries = 16 * kM * kWarps, kKeys = kIsHalf || kWidth <= 64 ? 32 : 16;
  static constexpr int kStages = 2, kBlocks = kWidth <= 64 && kIsHalf ? 3 : kWidth <= 128 ? 2 : 1;
  static constexpr int kStage = 2 * kKeys * kWidth;  // elements
  static constexpr int kBytes = (2 * kQueries * kWidth + kStages * kStage) * sizeof(Element);
};

template <typename S, typename A>
__global__ void __launch_bounds__(S::kThreads, kBlocksOf<S, A>)
    mma_backward_queries(const A a, const AttentionGradient<typename S::Element> g, const Order order, int64_t count,
                         int aligned) {
  if (!has_instructions_of(80)) return;
  using Element = typename S::Element;
  using T = Tile<Element, S::kWidth>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* const q_tile = reinterpret_cast<Element*>(shared);   // (kQueries, kWidth)
  Element* const dout_tile = q_tile + S::kQueries * S::kWidth;  // (kQueries, kWidth)
  Element* const stages = dout_tile + S::kQueries * S::kWidth;  // (kStages, 2, kKeys, kWidth): k, v
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = a.width, value_width = a.value_width;
  const Exponents exponents(a);
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const auto item = QueryItem::find(a, order, number, S::kQueries);
    if (item.empty()) continue;
    const int begin = item.begin, end = item.end;
    const auto q = rows_of_q(a, item, width, aligned);
    const auto dout = rows_of_dout(a, g, item, value_width, aligned);
    const auto k = rows_of_k(a, item, width, aligned);
    const auto v = rows_of_v(a, item, value_width, aligned);

    const int tiles = (end - begin + S::kKeys - 1) / S::kKeys;
    const auto begin_copy = [&](int t) {
      if (t < tiles) {
        Element* const stage = stages + t % S::kStages * S::kStage;
        T::template load<S::kKeys, S::kThreads>(stage, k, begin + t * S::kKeys, end, threadIdx.x);
        T::template load<S::kKeys, S::kThreads>(stage + S::kKeys * S::kWidth, v, begin + t * S::kKeys, end,
                                                threadIdx.x);
      }
      cp_async_commit();
    };
    __syncthreads();
    T::template load<S::kQueries, S::kThreads>(q_tile, q, item.i0, item.i1, threadIdx.x);
    T::template load<S::kQueries, S::kThreads>(dout_tile, dout, item.i0, item.i1, threadIdx.x);
    begin_copy(0);

    const int row = warp * (16 * S::kM), i0 = item.i0 + row, i1 = std::min(i0 + 16 * S::kM, item.i1);
    float lse[S::kM][2], delta[S::kM][2];
    [[maybe_unused]] float rest[S::kM][2];
    unrolled<S::kM, 2>([&](int m, int half) {
      const int i = i0 + 16 * m + 8 * half + lane / 4;
      const int64_t from = item.query(a.of_lse, i);
      lse[m][half] = i < i1 ? a.lse[from] : INFINITY;
      delta[m][half] = i < i1 ? g.delta[from] : 0;
      if constexpr (A::kIsExtended) rest[m][half] = i < i1 && g.rest ? g.rest[from] : 0;
      if (lse[m][half] == -INFINITY) lse[m][half] = INFINITY;  // so that all p are 0
    });
    const unsigned q_address = T::left(q_tile, row), dout_address = T::left(dout_tile, row);
    const Seen<Element> seen(a, item.s, item.b, item.h, end);
    const Terms<A> terms(a, seen);
    const auto query = [&](int m, int half) { return QueryOfRow{item.h, i0 + 16 * m + 8 * half + lane / 4}; };
    float dq[S::kM][S::kWidth / 8][4];
    clear(dq);
    for (int t = 0; t < tiles; ++t) {
      const int j0 = begin + t * S::kKeys;
      const Element* const k_tile = stages + t % S::kStages * S::kStage;
      const Element* const v_tile = k_tile + S::kKeys * S::kWidth;
      cp_async_wait<0>();
      __syncthreads();
      begin_copy(t + 1);
      float p[S::kM][S::kKeys / 8][4], dx[S::kM][S::kKeys / 8][4];
      [[maybe_unused]] float slopes[S::kM][S::kKeys / 8][4];
      uint32_t words[S::kM][S::kKeys / T::kStep][4];
      clear(p), clear(dx);
      T::multiply_rows(p, q_address, T::right(k_tile), width);
      exponents.logits.apply(p);
      if constexpr (A::kIsExtended) exponents.logits.differentiate(slopes, p);
      terms.add(p, j0, query);
      if (!seen.all(i0, i1, j0, j0 + S::kKeys)) seen.hide(p, i0, j0);
      T::multiply_rows(dx, dout_address, T::right(v_tile), value_width);
      for_sums<S::kM, S::kKeys / 8>([&](int m, int n, int i, int, int) {
        if constexpr (A::kIsExtended)
          p[m][n][i] = exponents.p(p[m][n][i], lse[m][i / 2], rest[m][i / 2]);
        else
          p[m][n][i] = exponents.p(p[m][n][i], lse[m][i / 2]);
      });
      if constexpr (A::kIsExtended) {
        terms.template for_weights<S::kM, S::kKeys / 8>(j0, query, [&](int m, int n, int i, bool keeps) {
          differentiate_weight(dx[m][n][i], p[m][n][i], slopes[m][n][i], keeps, kept_of(a), delta[m][i / 2]);
        });
      } else {
        exponents.differentiate(
            dx, p, [&](int m, int i, int) { return delta[m][i / 2]; },
            [&](int m, int i, int) { return lse[m][i / 2]; });
      }
      operand(words, dx);
      T::multiply(dq, words, T::transposed(k_tile), width);
    }
    cp_async_wait<0>();
    if (tiles == 0) __syncthreads();
    const auto to = rows_of(g.dq, a.of_q, item.query(a.of_q, 0), width, aligned & kAlignedQ);
    store_rows<S::kWidth>(dq, q_tile + row * S::kWidth, to, i0, i1, 0, [&](int, int) { return a.scale; });
  }
}

}  // namespace msops::flash_attention

#endif
