// The forward pass on tensor cores of sm_90a.
//
// A block has three warpgroups and goes through tiles of queries. One thread of the first warpgroup copies tiles by TMA
// into rings of stages. Each of the two others owns 64 queries. It begins the products of the next tile of keys and
// those of the last tile of values, and computes the next tile's softmax while the latter run; and the two take turns,
// so that one computes softmax while the tensor cores work for the other.
#pragma once

#include "wgmma_tiles.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

template <int kWidth_>
struct WgmmaShape {
  static constexpr int kWidth = kWidth_, kBoxes = kWidth / 64;  // TMA copies boxes of 64 columns
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kQueries = 64 * kConsumers, kKeys = kWidth <= 128 ? 128 : 64, kStages = 2;
  static constexpr int kTile = kKeys * kWidth;  // elements
  static constexpr int kBytes = (kQueries * kWidth + 2 * kStages * kTile) * 2 + 8 * (2 + 4 * kStages);
};

// Work is what a block does for one item: a tile of queries of one head, with the keys from begin to end - 1.
struct Work {
  Sequence s;
  int b, h, i0, i1, begin, end, tiles;

  template <typename S>
  static __device__ __forceinline__ Work of(const Attention<Half>& a, const Order& order, int64_t item) {
    Work w;
    const Order::Place at = order.find(item, a.heads);
    w.b = at.b, w.h = at.h;
    w.s = a.sequence(w.b);
    w.i0 = static_cast<int>(at.tile * S::kQueries);
    w.i1 = static_cast<int>(least(w.i0 + S::kQueries, w.s.queries));
    w.begin = w.end = 0;
    if (w.i0 < w.i1) {
      const Span keys = a.keys_of(w.s, {w.i0, w.i1});
      w.begin = static_cast<int>(keys.begin), w.end = static_cast<int>(most(keys.begin, keys.end));
    }
    w.tiles = (w.end - w.begin + S::kKeys - 1) / S::kKeys;
    return w;
  }
};

template <typename S>
__device__ __forceinline__ void run_wgmma_forward(const Attention<Half>& a, const TensorMap& q_map,
                                                  const TensorMap& k_map, const TensorMap& v_map, const Order& order,
                                                  int64_t count) {
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int kTileBytes = 2 * S::kTile, kQueryBytes = 2 * S::kQueries * S::kWidth;
  const unsigned first = shared_address(shared), barriers = first + kQueryBytes + 2 * S::kStages * kTileBytes;
  const Ring<1> queries{first, barriers, kQueryBytes};                          // (kBoxes, kQueries, 64)
  const Ring<S::kStages> keys{first + kQueryBytes, barriers + 16, kTileBytes};  // (kStages, kBoxes, kKeys, 64)
  const Ring<S::kStages> values{keys.data + S::kStages * kTileBytes, keys.barriers + 16 * S::kStages, kTileBytes};
  if (threadIdx.x == 0) {
    queries.init(4 * S::kConsumers), keys.init(4 * S::kConsumers), values.init(4 * S::kConsumers);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int group = static_cast<int>(a.group());
  int copies = 0, tiles_of_queries = 0;  // that were used before this item
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    if (threadIdx.x > 0) return;
    for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
      const Work w = Work::of<S>(a, order, item);
      if (w.tiles == 0) continue;
      const int batch = a.is_packed() ? 0 : w.b, kv_head = w.h / group;
      queries.template load<S::kBoxes, S::kQueries>(tiles_of_queries++, q_map, w.s.first_query + w.i0, w.h, batch);
      for (int t = 0; t < w.tiles; ++t, ++copies) {
        const int64_t row = w.s.first_key + w.begin + t * S::kKeys;
        keys.template load<S::kBoxes, S::kKeys>(copies, k_map, row, kv_head, batch);
        values.template load<S::kBoxes, S::kKeys>(copies, v_map, row, kv_head, batch);
      }
    }
  } else {
    setmaxnreg_inc<240>();
    const int consumer = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    const int turn = 1 + consumer, next_turn = 1 + (consumer + 1) % S::kConsumers,
              others = 1 + S::kConsumers + consumer;
    const Logits logits(a);
    const bool hides_rows = a.kv_lengths || a.is_packed();  // so that keys beyond the end may be anything
    if (consumer == 1) bar_arrive(next_turn, 256);          // the first consumer begins
    for (int64_t item = blockIdx.x; item < count; item += gridDim.x) {
      const Work w = Work::of<S>(a, order, item);
      if (w.i0 >= w.i1) continue;
      const int i0 = w.i0 + consumer * 64 + threadIdx.x / 32 % 4 * 16, i1 = std::min(i0 + 16, w.i1);
      const Seen seen(a, w.s, w.b, w.h, w.end);
      OnlineSoftmax<1> softmax;
      float out[1][S::kWidth / 8][4], x[1][S::kKeys / 8][4], shrink[1][2];
      uint32_t p[1][S::kKeys / 16][4];

      // Each begins a group of products: x = q k^T, and out += p v.
      const auto multiply_keys = [&](int t) {
        keys.wait(copies + t);
        begin_rows<S::kWidth>(x[0], queries.data + consumer * (64 * 128), S::kQueries, keys.stage(copies + t),
                              S::kKeys);
      };
      const auto multiply_values = [&](int t) {
        begin_columns(out[0], p[0], values.stage(copies + t), S::kKeys, t > 0);
      };
      const auto take = [&](int t) {
        const int j0 = w.begin + t * S::kKeys;
        logits.apply(x);
        if (!seen.all(i0, i1, j0, j0 + S::kKeys)) seen.hide(x, i0, j0);
        return softmax.advance(x, shrink, logits.factor * kLog2E);
      };
      clear(out);
      if (w.tiles > 0) {
        queries.wait(tiles_of_queries);
        multiply_keys(0);
        wgmma_wait_group<0>();
        wgmma_fence_operand(x[0]);
        keys.release(copies);
        take(0);
        operand(p, x);
        for (int t = 1; t < w.tiles; ++t) {
          bar_sync(turn, 256);
          multiply_keys(t);
          values.wait(copies + t - 1);
          multiply_values(t - 1);
          bar_arrive(next_turn, 256);
          wgmma_wait_group<1>();
          wgmma_fence_operand(x[0]);
          keys.release(copies + t);
          const bool grows = take(t);
          wgmma_wait_group<0>();
          wgmma_fence_operand(out[0]);
          values.release(copies + t - 1);
          if (grows) softmax.scale(out, shrink);
          operand(p, x);
        }
        queries.release(tiles_of_queries);
        values.wait(copies + w.tiles - 1);
        clear_rows<S::kBoxes, S::kKeys>(values.stage(copies + w.tiles - 1) - first + shared,
                                        w.s.keys - w.begin - (w.tiles - 1) * S::kKeys, hides_rows, others);
        multiply_values(w.tiles - 1);
        wgmma_wait_group<0>();
        wgmma_fence_operand(out[0]);
        values.release(copies + w.tiles - 1);
        copies += w.tiles, ++tiles_of_queries;
      }
      softmax.finish();
      const auto to = rows_of(a.out, a.of_out, w.b, w.h, w.s.first_query, a.value_width, true);
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = i0 + 8 * half + lane / 4;
        const float sum = softmax.sum[0][half], lse = softmax.lse(0, half, logits.factor);
        factor[half] = sum == 0 ? 0 : 1 / sum;
        if (lane % 4 == 0 && i < i1) a.lse[a.of_lse.offset(w.b, w.h, w.s.first_query + i)] = lse;
      }
      store_packed(out[0], factor, to, i0, i1);
    }
    if (consumer == 0) bar_sync(turn, 256);  // takes the last arrival
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_forward(const __grid_constant__ Attention<Half> a, const __grid_constant__ TensorMap q_map,
                  const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                  const __grid_constant__ Order order, int64_t count) {
  if constexpr (kHasSm90a) run_wgmma_forward<S>(a, q_map, k_map, v_map, order, count);
}

}  // namespace msops::flash_attention

#endif
#endif
