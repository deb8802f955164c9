// The forward pass on tensor cores of sm_90a.
//
// A block goes through items: tiles of queries of one head. One thread of its first warpgroup plans which items, and
// copies their tiles by TMA into rings of stages. Each of the other warpgroups owns 64 queries. It begins the products
// of the next tile of keys and those of the last tile of values, and computes the next tile's softmax while the latter
// run; and the warpgroups take turns, so that one computes softmax while the tensor cores work for another. This goes
// on from the last tile of an item to the first one of the next item, so that the tensor cores also work while results
// are stored.
#pragma once

#include "wgmma_tiles.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

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

template <int kWidth_>
struct WgmmaShape {
  static constexpr int kWidth = kWidth_, kBoxes = kWidth / 64;  // TMA copies boxes of 64 columns
  static constexpr int kConsumers = kWidth <= 64 ? 3 : 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kQueries = 64 * kConsumers, kKeys = kWidth <= 128 ? 128 : 64;
  static constexpr int kStages = kWidth <= 64 ? 4 : 2, kQueryStages = kWidth <= 128 ? 2 : 1;
  static constexpr int kWorks = 2;  // the planned one, and the one that is not finished
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr bool kWaitsLate = kWidth <= 128;  // for products of values, until softmax beside them is done
  static constexpr int kTile = kKeys * kWidth;       // elements
  static constexpr int kBytes = (kQueryStages * kQueries * kWidth + 2 * kStages * kTile) * 2 +
                                16 * (kQueryStages + 2 * kStages + kWorks) + kWorks * static_cast<int>(sizeof(Work));
};

// Stores the results of queries that see no key.
template <typename S>
__device__ __forceinline__ void store_nothing(const Attention<Half>& a, const Work& w) {
  const auto to = rows_of(a.out, a.of_out, w.b, w.h, w.s.first_query, a.value_width, true);
  const int packs = to.width / 8, thread = threadIdx.x - 128;
  for (int i = thread; i < (w.i1 - w.i0) * packs; i += 128 * S::kConsumers)
    store(to[w.i0 + i / packs] + i % packs * 8, Pack<Half, 8>{});
  for (int i = w.i0 + thread; i < w.i1; i += 128 * S::kConsumers)
    a.lse[a.of_lse.offset(w.b, w.h, w.s.first_query + i)] = -INFINITY;
}

// Stores a warp's results, of the queries from i0 to i1 - 1.
template <int kN>
__device__ __forceinline__ void store_results(const Attention<Half>& a, const Work& w, const float (&out)[kN][4],
                                              OnlineSoftmax<1> softmax, float logit_factor, int i0, int i1) {
  softmax.finish();
  const auto to = rows_of(a.out, a.of_out, w.b, w.h, w.s.first_query, a.value_width, true);
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + 8 * half + threadIdx.x % 32 / 4;
    const float sum = softmax.sum[0][half], lse = softmax.lse(0, half, logit_factor);
    factor[half] = sum == 0 ? 0 : 1 / sum;
    if (threadIdx.x % 4 == 0 && i < i1) a.lse[a.of_lse.offset(w.b, w.h, w.s.first_query + i)] = lse;
  }
  store_packed(out, factor, to, i0, i1);
}

// ForwardRings are the rings of stages in shared memory. The plan is a ring of Works.
template <typename S>
struct ForwardRings {
  static constexpr int kTileBytes = 2 * S::kTile, kQueryBytes = 2 * S::kQueries * S::kWidth;

  unsigned char* shared;
  Ring<S::kQueryStages> queries;  // (kQueryStages, kBoxes, kQueries, 64)
  Ring<S::kStages> keys, values;  // (kStages, kBoxes, kKeys, 64)
  Ring<S::kWorks> plan;

  __device__ __forceinline__ explicit ForwardRings(unsigned char* memory) : shared(memory) {
    const unsigned first = shared_address(memory), tiles = first + S::kQueryStages * kQueryBytes;
    const unsigned barriers = tiles + 2 * S::kStages * kTileBytes;
    queries = {first, barriers, kQueryBytes};
    keys = {tiles, barriers + 16 * S::kQueryStages, kTileBytes};
    values = {keys.data + S::kStages * kTileBytes, keys.barriers + 16 * S::kStages, kTileBytes};
    const unsigned plan_barriers = values.barriers + 16 * S::kStages;
    plan = {plan_barriers + 16 * S::kWorks, plan_barriers, sizeof(Work)};
  }
  __device__ __forceinline__ void init() const {
    constexpr int kUsers = 4 * S::kConsumers;
    queries.init(kUsers), keys.init(kUsers), values.init(kUsers), plan.init(kUsers);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ unsigned char* at(unsigned address) const {
    return shared + (address - shared_address(shared));
  }
  __device__ __forceinline__ Work* planned(int number) const { return reinterpret_cast<Work*>(at(plan.stage(number))); }
};

// Plans the block's items, and copies their tiles. One thread calls this.
template <typename S>
__device__ __forceinline__ void copy_items(const Attention<Half>& a, const TensorMap& q_map, const TensorMap& k_map,
                                           const TensorMap& v_map, const Order& order, int64_t count, unsigned* tickets,
                                           const ForwardRings<S>& rings) {
  const int group = static_cast<int>(a.group());
  int copies = 0, tiles_of_queries = 0, number = 0;
  for (int64_t item = blockIdx.x;; item = tickets ? int64_t{gridDim.x} + atomicAdd(tickets, 1u) : item + gridDim.x) {
    // The plan leaves out items without queries, and ends with one.
    Work w{};
    if (item < count) w = Work::of<S>(a, order, item);
    const bool ends = item >= count;
    if (!ends && w.i0 >= w.i1) continue;
    if (number >= S::kWorks) mbarrier_wait(rings.plan.empty(number), number / S::kWorks - 1);
    *rings.planned(number) = w;
    mbarrier_arrive(rings.plan.full(number++));
    if (ends) return;
    if (w.tiles == 0) continue;
    const int batch = a.is_packed() ? 0 : w.b, kv_head = w.h / group;
    const int64_t row = w.s.first_key + w.begin;
    rings.queries.template load<S::kBoxes, S::kQueries>(tiles_of_queries++, q_map, w.s.first_query + w.i0, w.h, batch);
    rings.keys.template load<S::kBoxes, S::kKeys>(copies, k_map, row, kv_head, batch);
    for (int t = 0; t < w.tiles; ++t, ++copies) {  // keys are used before the values of the tile before
      if (t + 1 < w.tiles)
        rings.keys.template load<S::kBoxes, S::kKeys>(copies + 1, k_map, row + (t + 1) * S::kKeys, kv_head, batch);
      rings.values.template load<S::kBoxes, S::kKeys>(copies, v_map, row + t * S::kKeys, kv_head, batch);
    }
  }
}

// Computes the results of the items for 64 of each item's queries. A warpgroup calls this; `consumer` is its number.
template <typename S>
__device__ __forceinline__ void compute_items(const Attention<Half>& a, int consumer, const ForwardRings<S>& rings) {
  const auto& queries = rings.queries;
  const auto& plan = rings.plan;
  const auto& keys = rings.keys;
  const auto& values = rings.values;
  const int row = consumer * 64 + threadIdx.x / 32 % 4 * 16;
  const int turn = 1 + consumer, next_turn = 1 + (consumer + 1) % S::kConsumers, own = 1 + S::kConsumers + consumer;
  const Logits logits(a);
  const bool hides_rows = a.kv_lengths || a.is_packed();  // so that keys beyond the end may be anything

  if (consumer == S::kConsumers - 1) bar_arrive(next_turn, 256);  // the first consumer begins

  OnlineSoftmax<1> softmax;
  float out[1][S::kWidth / 8][4], x[1][S::kKeys / 8][4], shrink[1][2];
  uint32_t p[1][S::kKeys / 16][4];
  int copies = 0, tiles_of_queries = 0, number = 0;  // the next ones
  int tiles_of_item = 0, last_copy = 0;              // of the item that is not finished

  // Each begins a group of products: x = q k^T, and out += p v.
  const auto multiply_keys = [&](int copy) {
    begin_rows<S::kWidth>(x[0], queries.stage(tiles_of_queries) + consumer * (64 * 128), S::kQueries, keys.stage(copy),
                          S::kKeys);
  };
  const auto multiply_values = [&](int copy, bool adds) {
    begin_columns(out[0], p[0], values.stage(copy), S::kKeys, adds);
  };
  const auto take = [&](const Seen& seen, int i0, int i1, int j0) {
    logits.apply(x);
    if (!seen.all(i0, i1, j0, j0 + S::kKeys)) seen.hide(x, i0, j0);
    return softmax.advance(x, shrink, logits.factor * kLog2E);
  };
  const auto wait_for_last_values = [&] {
    const Work& w = *rings.planned(number);
    if (!S::kWaitsLate) values.wait(last_copy);
    clear_rows<S::kBoxes, S::kKeys>(rings.at(values.stage(last_copy)),
                                    w.s.keys - w.begin - (tiles_of_item - 1) * S::kKeys, hides_rows, own);
  };
  const auto store_last = [&](const OnlineSoftmax<1>& statistics) {
    const Work& w = *rings.planned(number);
    values.release(last_copy);
    store_results(a, w, out[0], statistics, logits.factor, w.i0 + row, std::min(w.i0 + row + 16, w.i1));
    plan.release(number);
  };
  clear(out), clear(x);
  operand(p, x);
  for (;;) {
    // The last tile of values of one item, and the first tile of keys of the next one. The first item has none before
    // it: then the products are of any numbers, and not used. Products under a condition would serialize all others.
    const bool ends = tiles_of_item > 0;
    const int next = number + ends;
    plan.wait(next);
    const Work& w = *rings.planned(next);
    if (w.tiles == 0) {
      if (ends) {
        wait_for_last_values();
        multiply_values(last_copy, tiles_of_item > 1);
        wgmma_wait_group<0>();
        wgmma_fence_operand(out[0]);
        store_last(softmax);
      }
      if (w.i0 >= w.i1) break;
      store_nothing<S>(a, w);
      plan.release(next);
      number = next + 1, tiles_of_item = 0;
      continue;
    }
    queries.wait(tiles_of_queries);
    keys.wait(copies);
    if (ends) wait_for_last_values();
    bar_sync(turn, 256);
    multiply_keys(copies);
    multiply_values(last_copy, tiles_of_item > 1);
    bar_arrive(next_turn, 256);
    const OnlineSoftmax<1> finished = softmax;
    const int begin = w.begin, tiles_of_next = w.tiles;
    const int i0 = w.i0 + row, i1 = std::min(i0 + 16, w.i1);
    const Seen seen(a, w.s, w.b, w.h, w.end);
    wgmma_wait_group<1>();
    wgmma_fence_operand(x[0]);
    keys.release(copies);
    if (tiles_of_next == 1) queries.release(tiles_of_queries);
    softmax = OnlineSoftmax<1>();
    take(seen, i0, i1, begin);
    if (S::kWaitsLate) values.wait(copies, softmax.zero());
    wgmma_wait_group<0>();
    wgmma_fence_operand(out[0]);
    if (ends) store_last(finished);
    operand(p, x);
    number = next, tiles_of_item = tiles_of_next;

    for (int t = 1; t < tiles_of_item; ++t) {
      ++copies;
      keys.wait(copies);
      if (!S::kWaitsLate) values.wait(copies - 1);
      bar_sync(turn, 256);
      multiply_keys(copies);
      multiply_values(copies - 1, t > 1);
      bar_arrive(next_turn, 256);
      wgmma_wait_group<1>();
      wgmma_fence_operand(x[0]);
      keys.release(copies);
      if (t + 1 == tiles_of_item) queries.release(tiles_of_queries);
      const bool grows = take(seen, i0, i1, begin + t * S::kKeys);
      if (S::kWaitsLate) values.wait(copies, softmax.zero());
      wgmma_wait_group<0>();
      wgmma_fence_operand(out[0]);
      values.release(copies - 1);
      if (grows) softmax.scale(out, shrink);
      operand(p, x);
    }
    last_copy = copies++, ++tiles_of_queries;
  }
  if (consumer == 0) bar_sync(turn, 256);  // takes the last arrival
}

template <typename S>
__device__ __forceinline__ void run_wgmma_forward(const Attention<Half>& a, const TensorMap& q_map,
                                                  const TensorMap& k_map, const TensorMap& v_map, const Order& order,
                                                  int64_t count, unsigned* tickets) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardRings<S> rings(shared);
  if (threadIdx.x == 0) rings.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x == 0) copy_items<S>(a, q_map, k_map, v_map, order, count, tickets, rings);
  } else {
    setmaxnreg_inc<S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    compute_items<S>(a, consumer, rings);
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_forward(const __grid_constant__ Attention<Half> a, const __grid_constant__ TensorMap q_map,
                  const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                  const __grid_constant__ Order order, int64_t count, unsigned* tickets) {
  if constexpr (kHasSm90a) run_wgmma_forward<S>(a, q_map, k_map, v_map, order, count, tickets);
}

}  // namespace msops::flash_attention

#endif
#endif
