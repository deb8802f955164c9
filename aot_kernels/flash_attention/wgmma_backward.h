// The backward pass on tensor cores of sm_90a, in two kernels as mma_backward.h has them, and with its transposed
// products. One thread copies tiles by TMA into rings of stages for two warpgroups, each of which owns 64 rows.
#pragma once

#include "mma_backward.h"
#include "wgmma_forward.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

// KeysWork is what a block does for one item: a tile of keys, with the queries from begin to end - 1 of all heads that
// read them. A step is a tile of these queries of one head.
struct KeysWork {
  Sequence s;
  int b, kv_head, j0, j1, keys, begin, end, tiles, steps;

  template <typename S>
  static __device__ __forceinline__ KeysWork of(const Attention<Half>& a, const Order& order, int64_t item) {
    KeysWork w;
    int64_t head, tile;
    order.find(item, &head, &tile);
    w.b = static_cast<int>(head / a.kv_heads), w.kv_head = static_cast<int>(head % a.kv_heads);
    w.s = a.sequence(w.b);
    // Keys that kv_lengths hides have the gradient 0.
    w.keys = static_cast<int>(w.s.keys), w.j0 = static_cast<int>(tile * S::kKeys);
    w.j1 = static_cast<int>(least(w.j0 + S::kKeys, a.is_packed() ? w.s.keys : a.keys));
    Span queries{0, 0};
    if (w.j0 < w.keys) queries = a.queries_of(w.s, {w.j0, least(w.j1, w.keys)});
    w.begin = static_cast<int>(least(queries.begin, queries.end)), w.end = static_cast<int>(queries.end);
    w.tiles = (w.end - w.begin + S::kQueries - 1) / S::kQueries, w.steps = w.tiles * static_cast<int>(a.group());
    return w;
  }
};

template <int kWidth_>
struct WgmmaKeysShape {
  static constexpr int kWidth = kWidth_, kBoxes = kWidth / 64;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kKeys = 64 * kConsumers, kQueries = 64, kStages = 3;
  static constexpr int kKeysBytes = kKeys * kWidth * 2, kQueriesBytes = kQueries * kWidth * 2;
  static constexpr int kRowBytes = 2 * kQueries * 4;  // lse and delta of a stage
  static constexpr int kBytes = 2 * kKeysBytes + kStages * (2 * kQueriesBytes + kRowBytes) + 16 * (2 + 3 * kStages);
};

template <typename S>
__device__ __forceinline__ void run_wgmma_backward_keys(const Attention<Half>& a, const AttentionGradient<Half>& g,
                                                        const TensorMap& q_map, const TensorMap& k_map,
                                                        const TensorMap& v_map, const TensorMap& dout_map,
                                                        const Order& order, int64_t count) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned first = shared_address(shared);
  const unsigned stages = first + 2 * S::kKeysBytes, row_stages = stages + 2 * S::kStages * S::kQueriesBytes;
  const unsigned barriers = row_stages + S::kStages * S::kRowBytes;
  const Ring<1> k_ring{first, barriers, S::kKeysBytes};                       // (kBoxes, kKeys, 64)
  const Ring<1> v_ring{first + S::kKeysBytes, barriers + 16, S::kKeysBytes};  // (kBoxes, kKeys, 64)
  const Ring<S::kStages> q_ring{stages, barriers + 32, S::kQueriesBytes};     // (kStages, kBoxes, kQueries, 64)
  const Ring<S::kStages> dout_ring{stages + S::kStages * S::kQueriesBytes, q_ring.barriers + 16 * S::kStages,
                                   S::kQueriesBytes};  // (kStages, kBoxes, kQueries, 64)
  const Ring<S::kStages> row_ring{row_stages, dout_ring.barriers + 16 * S::kStages, S::kRowBytes};
  const auto rows_of_stage = [&](int copy) {  // (2, kQueries): lse in units of the base 2, delta
    return reinterpret_cast<float*>(shared + (row_ring.stage(copy) - first));
  };
  if (threadIdx.x == 0) {
    constexpr int kUsers = 4 * S::kConsumers;
    k_ring.init(kUsers), v_ring.init(kUsers), q_ring.init(kUsers), dout_ring.init(kUsers), row_ring.init(kUsers);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int group = static_cast<int>(a.group()), lane = threadIdx.x % 32;
  int copies = 0, tiles_of_keys = 0;  // that were used before this item
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 0) {
      for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
        const KeysWork w = KeysWork::of<S>(a, order, item);
        if (w.steps == 0) continue;
        const int batch = a.is_packed() ? 0 : w.b;
        k_ring.template load<S::kBoxes, S::kKeys>(tiles_of_keys, k_map, w.s.first_key + w.j0, w.kv_head, batch);
        v_ring.template load<S::kBoxes, S::kKeys>(tiles_of_keys++, v_map, w.s.first_key + w.j0, w.kv_head, batch);
        for (int step = 0; step < w.steps; ++step, ++copies) {
          const int h = w.kv_head * group + step / w.tiles, i0 = w.begin + step % w.tiles * S::kQueries;
          q_ring.template load<S::kBoxes, S::kQueries>(copies, q_map, w.s.first_query + i0, h, batch);
          dout_ring.template load<S::kBoxes, S::kQueries>(copies, dout_map, w.s.first_query + i0, h, batch);
        }
      }
    } else if (threadIdx.x / 32 == 1) {
      for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
        const KeysWork w = KeysWork::of<S>(a, order, item);
        for (int step = 0; step < w.steps; ++step, ++copies) {
          const int h = w.kv_head * group + step / w.tiles, i0 = w.begin + step % w.tiles * S::kQueries;
          const int64_t from = a.of_lse.offset(w.b, h, w.s.first_query + i0);
          if (copies >= S::kStages) mbarrier_wait(row_ring.empty(copies), copies / S::kStages - 1);
          float* const to = rows_of_stage(copies);
          for (int i = lane; i < S::kQueries; i += 32) {
            const float lse = i0 + i < w.end ? a.lse[from + i] : -INFINITY;
            to[i] = lse == -INFINITY ? INFINITY : lse * kLog2E;  // so that all p are 0
            to[S::kQueries + i] = i0 + i < w.end ? g.delta[from + i] : 0;
          }
          __syncwarp();
          if (lane == 0) mbarrier_arrive(row_ring.full(copies));
        }
      }
    }
  } else {
    setmaxnreg_inc<240>();
    const int consumer = threadIdx.x / 128 - 1, own = 1 + consumer;
    const Exponents exponents(a);
    for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
      const KeysWork w = KeysWork::of<S>(a, order, item);
      if (w.j0 >= w.j1) continue;
      const int j0 = w.j0 + consumer * 64 + threadIdx.x / 32 % 4 * 16;
      float dk[1][S::kWidth / 8][4], dv[1][S::kWidth / 8][4];
      clear(dk), clear(dv);
      const unsigned k = k_ring.data + consumer * (64 * 128), v = v_ring.data + consumer * (64 * 128);
      if (w.steps > 0) {
        k_ring.wait(tiles_of_keys), v_ring.wait(tiles_of_keys);
        clear_rows<S::kBoxes, S::kKeys>(shared, w.keys - w.j0, a.kv_lengths || a.is_packed(), own);
        clear_rows<S::kBoxes, S::kKeys>(shared + S::kKeysBytes, w.keys - w.j0, a.kv_lengths || a.is_packed(), own);
      }
      Seen seen(a, w.s, w.b, w.kv_head * group, w.keys);
      int i0 = w.begin;
      for (int step = 0; step < w.steps; ++step, ++copies, i0 += S::kQueries) {
        float p[1][S::kQueries / 8][4], dx[1][S::kQueries / 8][4];
        uint32_t p_words[1][S::kQueries / 16][4], dx_words[1][S::kQueries / 16][4];
        if (i0 >= w.end) i0 = w.begin, ++seen.h;
        const unsigned q = q_ring.stage(copies), dout = dout_ring.stage(copies);
        q_ring.wait(copies), dout_ring.wait(copies);
        const int inside = seen.queries - i0;
        clear_rows<S::kBoxes, S::kQueries>(shared + (q - first), inside, a.is_packed(), own);
        clear_rows<S::kBoxes, S::kQueries>(shared + (dout - first), inside, a.is_packed(), own);
        begin_rows<S::kWidth>(p[0], k, S::kKeys, q, S::kQueries);
        // The products of the step before end here, so that their operands' registers are free for dx.
        wgmma_wait_group<1>();
        wgmma_fence_operand(dk[0]), wgmma_fence_operand(dv[0]);
        if (step > 0) q_ring.release(copies - 1), dout_ring.release(copies - 1);
        begin_rows<S::kWidth>(dx[0], v, S::kKeys, dout, S::kQueries);
        row_ring.wait(copies);
        const float* const lse = rows_of_stage(copies);
        const float* const delta = lse + S::kQueries;

        wgmma_wait_group<1>();
        wgmma_fence_operand(p[0]);
        exponents.logits.apply(p);
        for_sums<1, S::kQueries / 8>([&](int m, int n, int i, int, int column) {
          p[m][n][i] = ex2_approx_ftz(p[m][n][i] * exponents.factor - lse[column]);
        });
        if (!seen.all(i0, i0 + S::kQueries, j0, j0 + 16) || i0 + S::kQueries > w.end)
          hide_transposed(seen, p, i0, w.end, j0);
        wgmma_wait_group<0>();
        wgmma_fence_operand(dx[0]);
        exponents.differentiate(
            dx, p, [&](int, int, int column) { return delta[column]; },
            [&](int, int, int column) { return lse[column] * kLn2; });
        row_ring.release(copies);
        operand(p_words, p), operand(dx_words, dx);
        begin_columns(dv[0], p_words[0], dout, S::kQueries, true);
        begin_columns(dk[0], dx_words[0], q, S::kQueries, true);
      }
      wgmma_wait_group<0>();
      wgmma_fence_operand(dk[0]), wgmma_fence_operand(dv[0]);
      if (w.steps > 0) {
        q_ring.release(copies - 1), dout_ring.release(copies - 1), k_ring.release(tiles_of_keys),
            v_ring.release(tiles_of_keys);
        ++tiles_of_keys;
      }
      const auto to_k = rows_of(g.dk, a.of_k, w.b, w.kv_head, w.s.first_key, a.width, true);
      const auto to_v = rows_of(g.dv, a.of_v, w.b, w.kv_head, w.s.first_key, a.value_width, true);
      store_packed(dk[0], {a.scale, a.scale}, to_k, j0, w.j1);
      store_packed(dv[0], {1, 1}, to_v, j0, w.j1);
    }
  }
}

template <int kWidth_>
struct WgmmaQueriesShape {
  static constexpr int kWidth = kWidth_, kBoxes = kWidth / 64;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kQueries = 64 * kConsumers, kKeys = 64, kStages = 3;
  static constexpr int kKeysBytes = kKeys * kWidth * 2, kQueriesBytes = kQueries * kWidth * 2;
  static constexpr int kBytes = 2 * kQueriesBytes + 2 * kStages * kKeysBytes + 16 * (2 + 2 * kStages);
};

template <typename S>
__device__ __forceinline__ void run_wgmma_backward_queries(const Attention<Half>& a, const AttentionGradient<Half>& g,
                                                           const TensorMap& q_map, const TensorMap& k_map,
                                                           const TensorMap& v_map, const TensorMap& dout_map,
                                                           const Order& order, int64_t count) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned first = shared_address(shared), stages = first + 2 * S::kQueriesBytes;
  const unsigned barriers = stages + 2 * S::kStages * S::kKeysBytes;
  const Ring<1> q_ring{first, barriers, S::kQueriesBytes};                             // (kBoxes, kQueries, 64)
  const Ring<1> dout_ring{first + S::kQueriesBytes, barriers + 16, S::kQueriesBytes};  // (kBoxes, kQueries, 64)
  const Ring<S::kStages> k_ring{stages, barriers + 32, S::kKeysBytes};                 // (kStages, kBoxes, kKeys, 64)
  const Ring<S::kStages> v_ring{stages + S::kStages * S::kKeysBytes, k_ring.barriers + 16 * S::kStages,
                                S::kKeysBytes};  // (kStages, kBoxes, kKeys, 64)
  if (threadIdx.x == 0) {
    constexpr int kUsers = 4 * S::kConsumers;
    k_ring.init(kUsers), v_ring.init(kUsers), q_ring.init(kUsers), dout_ring.init(kUsers);
    fence_mbarrier_init();
  }
  __syncthreads();

  int copies = 0, tiles_of_queries = 0;  // that were used before this item
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    if (threadIdx.x > 0) return;
    for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
      const Work w = Work::of<S>(a, order, item);
      if (w.tiles == 0) continue;
      const int batch = a.is_packed() ? 0 : w.b, kv_head = w.h / static_cast<int>(a.group());
      const int64_t i0 = w.s.first_query + w.i0;
      q_ring.template load<S::kBoxes, S::kQueries>(tiles_of_queries, q_map, i0, w.h, batch);
      dout_ring.template load<S::kBoxes, S::kQueries>(tiles_of_queries++, dout_map, i0, w.h, batch);
      for (int t = 0; t < w.tiles; ++t, ++copies) {
        const int64_t row = w.s.first_key + w.begin + t * S::kKeys;
        k_ring.template load<S::kBoxes, S::kKeys>(copies, k_map, row, kv_head, batch);
        v_ring.template load<S::kBoxes, S::kKeys>(copies, v_map, row, kv_head, batch);
      }
    }
  } else {
    setmaxnreg_inc<240>();
    const int consumer = threadIdx.x / 128 - 1, own = 1 + consumer, lane = threadIdx.x % 32;
    const Exponents exponents(a);
    for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
      const Work w = Work::of<S>(a, order, item);
      if (w.i0 >= w.i1) continue;
      const int i0 = w.i0 + consumer * 64 + threadIdx.x / 32 % 4 * 16, i1 = std::min(i0 + 16, w.i1);
      float lse[2], delta[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = i0 + 8 * half + lane / 4;
        const int64_t from = a.of_lse.offset(w.b, w.h, w.s.first_query + i);
        lse[half] = i < i1 ? a.lse[from] : INFINITY;
        delta[half] = i < i1 ? g.delta[from] : 0;
        if (lse[half] == -INFINITY) lse[half] = INFINITY;  // so that all p are 0
      }
      const Seen seen(a, w.s, w.b, w.h, w.end);
      float dq[1][S::kWidth / 8][4];
      clear(dq);
      const unsigned q = q_ring.data + consumer * (64 * 128), dout = dout_ring.data + consumer * (64 * 128);
      if (w.tiles > 0) q_ring.wait(tiles_of_queries), dout_ring.wait(tiles_of_queries);
      for (int t = 0; t < w.tiles; ++t, ++copies) {
        float p[1][S::kKeys / 8][4], dx[1][S::kKeys / 8][4];
        uint32_t words[1][S::kKeys / 16][4];
        const int j0 = w.begin + t * S::kKeys, inside = static_cast<int>(w.s.keys) - j0;
        const unsigned k = k_ring.stage(copies), v = v_ring.stage(copies);
        k_ring.wait(copies), v_ring.wait(copies);
        clear_rows<S::kBoxes, S::kKeys>(shared + (k - first), inside, a.kv_lengths || a.is_packed(), own);
        clear_rows<S::kBoxes, S::kKeys>(shared + (v - first), inside, a.kv_lengths || a.is_packed(), own);
        begin_rows<S::kWidth>(p[0], q, S::kQueries, k, S::kKeys);
        begin_rows<S::kWidth>(dx[0], dout, S::kQueries, v, S::kKeys);

        // The products of the tile before have ended, too.
        wgmma_wait_group<1>();
        wgmma_fence_operand(p[0]);
        if (t > 0) k_ring.release(copies - 1);
        exponents.logits.apply(p);
        if (!seen.all(i0, i1, j0, j0 + S::kKeys)) seen.hide(p, i0, j0);
        for_sums<1, S::kKeys / 8>(
            [&](int m, int n, int i, int, int) { p[m][n][i] = exponents.p(p[m][n][i], lse[i / 2]); });
        wgmma_wait_group<0>();
        wgmma_fence_operand(dx[0]);
        v_ring.release(copies);
        exponents.differentiate(
            dx, p, [&](int, int i, int) { return delta[i / 2]; }, [&](int, int i, int) { return lse[i / 2]; });
        operand(words, dx);
        begin_columns(dq[0], words[0], k, S::kKeys, true);
      }
      wgmma_wait_group<0>();
      wgmma_fence_operand(dq[0]);
      if (w.tiles > 0) {
        k_ring.release(copies - 1), q_ring.release(tiles_of_queries), dout_ring.release(tiles_of_queries);
        ++tiles_of_queries;
      }
      const auto to = rows_of(g.dq, a.of_q, w.b, w.h, w.s.first_query, a.width, true);
      store_packed(dq[0], {a.scale, a.scale}, to, i0, i1);
    }
  }
}

// Where the instructions are missing, the kernels have no code, and are compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_backward_keys(const __grid_constant__ Attention<Half> a, const __grid_constant__ AttentionGradient<Half> g,
                        const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                        const __grid_constant__ Order order, int64_t count) {
  if constexpr (kHasSm90a) run_wgmma_backward_keys<S>(a, g, q_map, k_map, v_map, dout_map, order, count);
}
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_backward_queries(const __grid_constant__ Attention<Half> a, const __grid_constant__ AttentionGradient<Half> g,
                           const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                           const __grid_constant__ Order order, int64_t count) {
  if constexpr (kHasSm90a) run_wgmma_backward_queries<S>(a, g, q_map, k_map, v_map, dout_map, order, count);
}

}  // namespace msops::flash_attention

#endif
#endif
