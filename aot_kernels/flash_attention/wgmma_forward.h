// The forward pass on tensor cores of sm_90a.
//
// A block goes through items: tiles of queries of one head. The first warp of its first warpgroup plans which items,
// and copies their tiles of queries and keys by TMA into rings of stages; the second warp copies values. Each of the
// other warpgroups owns 64 queries. It begins the products of the next tile of keys and those of the last tile of
// values, and computes the next tile's softmax while the latter run; and the warpgroups take turns, so that one
// computes softmax while the tensor cores work for another. This goes on from the last tile of an item to the first one
// of the next item, so that the tensor cores also work while results are stored. A warpgroup without queries in an
// item, or whose queries do not see its last tiles, passes their turns on.
//
// A bias of keys is added in float32. The third warp copies it for each tile of keys; then logits may be far from 0,
// and the softmax takes differences of them first, as that of mma_forward.h does.
//
// Tensors tell the kernel which items there are and how to copy their tiles: DenseTensors, or keys in blocks, as
// paged_attention/wgmma.h has them.
#pragma once

#include "mask_bits.h"
#include "wgmma_tiles.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

// Work is an item of `tiles` tiles of keys. The plan ends with one without queries.
struct Work {
  QueryItem item;
  int tiles;
};

template <int kWidth_, bool kHasMask_, bool kInBlocks_ = false, bool kHasBias_ = false>
struct WgmmaShape {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kHasMask = kHasMask_, kInBlocks = kInBlocks_;  // keys may lie in blocks
  static constexpr bool kHasBias = kHasBias_;                          // of keys
  static constexpr int kConsumers = kWidth <= 64 ? 3 : 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kQueries = 64 * kConsumers, kKeys = kWidth <= 128 ? 128 : 64;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr bool kWaitsLate = kWidth <= 128;     // for products of values, until softmax beside them is done
  static constexpr int kStages = kWidth <= 64 ? 4 : 2;  // of keys and of values
  using Queries = Ring<kWidth <= 128 ? 2 : 1, SharedTile<kQueries, kWidth>>;
  using Keys = Ring<kStages, SharedTile<kKeys, kWidth>>;
  using Plan = Ring<2, SharedArray<Work, 1>>;  // the planned item, and the one that is not finished
  using Lost = Stages<kInBlocks ? kStages : 0, SharedArray<uint32_t, 1>>;  // see ForwardRings::lost_keys
  using Biases = Ring<kHasBias ? kStages : 0, SharedArray<float, kKeys>>;
  using Memory = SharedMemory<Queries, Keys, Keys, Plan, Lost, Biases>;
  static constexpr int kBytes = Memory::kBytes;
};

// Stores the results of queries that see no key.
template <typename S>
__device__ __forceinline__ void store_nothing(const Attention<Half>& a, const QueryItem& item) {
  const auto to = rows_of(a.out, a.of_out, item.query(a.of_out, 0), a.value_width, true);
  const int packs = to.width / 8, thread = threadIdx.x - 128;
  for (int i = thread; i < (item.i1 - item.i0) * packs; i += 128 * S::kConsumers)
    store(to[item.i0 + i / packs] + i % packs * 8, Pack<Half, 8>{});
  for (int i = item.i0 + thread; i < item.i1; i += 128 * S::kConsumers) a.lse[item.query(a.of_lse, i)] = -INFINITY;
}

// Stores a warp's results, of the queries from i0 to i1 - 1.
template <int kN>
__device__ __forceinline__ void store_results(const Attention<Half>& a, const QueryItem& item,
                                              const float (&out)[kN][4], OnlineSoftmax<1> softmax, float logit_factor,
                                              int i0, int i1) {
  softmax.finish();
  const auto to = rows_of(a.out, a.of_out, item.query(a.of_out, 0), a.value_width, true);
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + 8 * half + threadIdx.x % 32 / 4;
    const float sum = softmax.sum[0][half], lse = softmax.lse(0, half, logit_factor);
    factor[half] = sum == 0 ? 0 : 1 / sum;
    if (threadIdx.x % 4 == 0 && i < i1) a.lse[item.query(a.of_lse, i)] = lse;
  }
  store_aligned(out, factor, to, i0, i1);
}

// ForwardRings are the rings of stages in shared memory. The plan is a ring of Works.
template <typename S>
struct ForwardRings {
  typename S::Memory memory;
  typename S::Queries queries;
  typename S::Keys keys, values;
  typename S::Plan plan;
  typename S::Lost lost;
  typename S::Biases biases;

  __device__ __forceinline__ explicit ForwardRings(unsigned char* shared) : memory{shared} {
    memory.take(queries), memory.take(keys), memory.take(values), memory.take(plan), memory.take(lost);
    memory.take(biases);
  }
  __device__ __forceinline__ void init() const {
    constexpr int kUsers = 4 * S::kConsumers;
    queries.init(kUsers), keys.init(kUsers), values.init(kUsers), plan.init(kUsers + 1 + S::kHasBias);
    if constexpr (S::kHasBias) biases.init(kUsers);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ Work* planned(int number) const { return memory[plan.tile(number)]; }
  // Returns where it stands which keys of a tile, of those that queries could see, are in no block: bit n says that
  // keys 8 n to 8 n + 7 are not. It belongs to the stage of keys.
  __device__ __forceinline__ uint32_t* lost_keys(int copy) const { return memory[lost.tile(copy)]; }
};

// DenseTensors are tensors with strides.
struct DenseTensors {
  Attention<Half> a;
  TensorMap q, k, v;
  Order order;
  int64_t count;      // of items
  unsigned* tickets;  // how many items were taken, or null: then each block takes its share
  MaskBits mask;
  KeyBias bias;

  __device__ __forceinline__ int64_t items() const { return count; }
  // Returns an item, whose keys begin where a tile may begin.
  template <typename S>
  __device__ __forceinline__ QueryItem find(int64_t number) const {
    QueryItem item = QueryItem::find(a, order, number, S::kQueries);
    if constexpr (S::kHasMask) item.begin -= item.begin % S::kKeys;  // as the words of the mask
    return item;
  }

  // Tiles copies an item's tiles of keys, or of values. A warp calls this.
  template <typename S>
  struct Tiles {
    const DenseTensors& from;
    const ForwardRings<S>& rings;
    int batch, kv_head;
    int64_t row;

    __device__ __forceinline__ Tiles(const DenseTensors& tensors, const ForwardRings<S>& forward_rings,
                                     const QueryItem& item)
        : from(tensors),
          rings(forward_rings),
          batch(from.a.is_packed() ? 0 : item.b),
          kv_head(item.kv_head),
          row(item.s.first_key + item.begin) {}
    __device__ __forceinline__ void load_keys(int copy, int t) const {
      if (threadIdx.x % 32 == 0) rings.keys.load(copy, from.k, row + t * S::kKeys, kv_head, batch);
    }
    __device__ __forceinline__ void load_values(int copy, int t) const {
      if (threadIdx.x % 32 == 0) rings.values.load(copy, from.v, row + t * S::kKeys, kv_head, batch);
    }
  };
};

// Plans the block's items, and copies their queries and keys. The first warp calls this.
template <typename S, typename Tensors>
__device__ __forceinline__ void copy_keys(const Tensors& from, const ForwardRings<S>& rings) {
  const int64_t count = from.items();
  int copies = 0, tiles_of_queries = 0, works = 0;
  const auto next = [&](int64_t number) {
    if (!from.tickets) return number + gridDim.x;
    const unsigned ticket = threadIdx.x == 0 ? atomicAdd(from.tickets, 1u) : 0;
    return int64_t{gridDim.x} + __shfl_sync(~0u, ticket, 0);
  };
  for (int64_t number = blockIdx.x;; number = next(number)) {
    // The plan leaves out items without queries, and ends with one.
    Work w{};
    const bool ends = number >= count;
    if (!ends) {
      w.item = from.template find<S>(number);
      w.tiles = (w.item.end - w.item.begin + S::kKeys - 1) / S::kKeys;
      if (w.item.empty()) continue;
    }
    const QueryItem& item = w.item;
    if (threadIdx.x == 0) {
      rings.plan.wait_for_room(works);
      *rings.planned(works) = w;
      mbarrier_arrive(rings.plan.full(works));
    }
    ++works;
    if (ends) return;
    if (w.tiles == 0) continue;
    if (threadIdx.x == 0) {
      const int batch = from.a.is_packed() ? 0 : item.b;
      rings.queries.load(tiles_of_queries, from.q, item.s.first_query + item.i0, item.h, batch);
    }
    ++tiles_of_queries;
    typename Tensors::template Tiles<S> tiles(from, rings, item);
    for (int t = 0; t < w.tiles; ++t) tiles.load_keys(copies++, t);
  }
}

// Calls f(work) for each of the planned items. A warp of the producer's calls this.
template <typename S, typename F>
__device__ __forceinline__ void for_planned(const ForwardRings<S>& rings, const F& f) {
  for (int works = 0;; ++works) {
    rings.plan.wait(works);
    const Work w = *rings.planned(works);
    rings.plan.release(works);
    if (w.item.empty()) return;
    f(w);
  }
}

// Copies the values of the planned items. The second warp calls this.
template <typename S, typename Tensors>
__device__ __forceinline__ void copy_values(const Tensors& from, const ForwardRings<S>& rings) {
  int copies = 0;
  for_planned(rings, [&](const Work& w) {
    if (w.tiles == 0) return;
    typename Tensors::template Tiles<S> tiles(from, rings, w.item);
    for (int t = 0; t < w.tiles; ++t) tiles.load_values(copies++, t);
  });
}

// Copies the bias of the planned items' keys. The third warp calls this.
template <typename S, typename Tensors>
__device__ __forceinline__ void copy_biases(const Tensors& from, const ForwardRings<S>& rings) {
  const int lane = threadIdx.x % 32;
  int copies = 0;
  for_planned(rings, [&](const Work& w) {
    const int64_t first = from.bias.first(w.item.b, w.item.h);
    for (int t = 0; t < w.tiles; ++t, ++copies) {
      float biases[S::kKeys / 32];
#pragma unroll
      for (int i = 0; i < S::kKeys / 32; ++i) {
        const int j = w.item.begin + t * S::kKeys + 32 * i + lane;
        biases[i] = j < w.item.end ? from.bias[first + j * from.bias.key] : 0;
      }
      rings.biases.wait_for_room(copies);
      float* const to = rings.memory[rings.biases.tile(copies)];
#pragma unroll
      for (int i = 0; i < S::kKeys / 32; ++i) to[32 * i + lane] = biases[i];
      __syncwarp();
      if (lane == 0) mbarrier_arrive(rings.biases.full(copies));
    }
  });
}

// Computes the results of the items for 64 of each item's queries. A warpgroup calls this; `consumer` is its number.
template <typename S>
__device__ __forceinline__ void compute_items(const Attention<Half>& a, const MaskBits& mask, int consumer,
                                              const ForwardRings<S>& rings) {
  using Hidden = HiddenSums<S::kHasMask, S::kKeys / 8>;
  const auto& queries = rings.queries;
  const auto& plan = rings.plan;
  const auto& keys = rings.keys;
  const auto& values = rings.values;
  const int row = consumer * 64 + threadIdx.x / 32 % 4 * 16;
  const int turn = 1 + consumer, next_turn = 1 + (consumer + 1) % S::kConsumers, own = 1 + S::kConsumers + consumer;
  Logits logits(a);
  if constexpr (S::kHasBias) logits.take_as_they_are();
  const bool hides_rows = a.kv_lengths || a.is_packed();  // so that keys beyond the end may be anything

  if (consumer == S::kConsumers - 1) bar_arrive(next_turn, 256);  // the first consumer begins

  OnlineSoftmax<1> softmax;
  float out[1][S::kWidth / 8][4], x[1][S::kKeys / 8][4], shrink[1][2];
  uint32_t p[1][S::kKeys / 16][4];
  int copies = 0, tiles_of_queries = 0, number = 0;  // the next ones
  int tiles_of_item = 0, last_copy = 0;              // of the item that is not finished
  SharedTile<S::kQueries, S::kWidth> own_queries{};  // from the warpgroup's first one on

  // Each begins a group of products: x = q k^T, and out += p v.
  const auto multiply_keys = [&](int copy) { begin_product(x[0], own_queries, keys.tile(copy)); };
  const auto multiply_values = [&](int copy, bool adds) { begin_product(out[0], p[0], values.tile(copy), adds); };
  // Returns which keys of a tile are lost (see ForwardRings), before the tile is released.
  const auto lost_keys = [&](int copy) {
    if constexpr (S::kInBlocks) return *rings.lost_keys(copy);
    return 0u;
  };
  // Turns products into logits.
  const auto add_biases = [&](int copy) {
    if constexpr (S::kHasBias) {
      rings.biases.wait(copy);
      const float* const from = rings.memory[rings.biases.tile(copy)] + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
        const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[0][n][i] = fmaf(x[0][n][i], logits.scale, i % 2 ? pair.y : pair.x);
      }
      rings.biases.release(copy);
    }
  };
  const auto take = [&](const SeenWith<Half, false>& seen, const Hidden& hidden, uint32_t lost, int copy, int i0,
                        int i1, int j0) {
    add_biases(copy);
    logits.apply(x);
    if (!seen.all(i0, i1, j0, j0 + S::kKeys)) seen.hide(x, i0, j0);
    // Queries of another sequence do not change when maxima grow, and so no bit of this one's results.
    if (S::kInBlocks && (lost != 0 || i1 < i0 + 16))
      unrolled<S::kKeys / 8, 4>([&](int n, int i) {
        const bool is_outside = i0 + 8 * (i / 2) + static_cast<int>(threadIdx.x) % 32 / 4 >= i1;
        x[0][n][i] = is_outside || lost >> n & 1 ? -INFINITY : x[0][n][i];
      });
    hidden.hide(x, -INFINITY);
    return softmax.template advance<S::kHasBias>(x, shrink, logits.factor * kLog2E<float>);
  };
  const auto wait_for_last_values = [&] {
    const Work& w = *rings.planned(number);
    if (!S::kWaitsLate) values.wait(last_copy);
    clear_rows(rings.memory, values.tile(last_copy), w.item.s.keys - w.item.begin - (tiles_of_item - 1) * S::kKeys,
               hides_rows, own);
  };
  const auto store_last = [&](const OnlineSoftmax<1>& statistics) {
    const QueryItem& item = rings.planned(number)->item;
    values.release(last_copy);
    store_results(a, item, out[0], statistics, logits.factor, item.i0 + row, std::min(item.i0 + row + 16, item.i1));
    plan.release(number);
  };
  // Goes past tiles that none of the warpgroup's queries sees, without a product.
  const auto pass_tiles = [&](int count) {
    for (; count > 0; --count, ++copies) {
      keys.wait(copies);
      bar_sync(turn, 256);
      bar_arrive(next_turn, 256);
      keys.release(copies);
      if constexpr (S::kHasBias) rings.biases.wait(copies), rings.biases.release(copies);
      values.wait(copies);
      values.release(copies);
    }
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
    const QueryItem& item = w.item;
    const int first = item.i0 + 64 * consumer;
    if (w.tiles == 0 || first >= item.i1) {
      if (ends) {
        wait_for_last_values();
        multiply_values(last_copy, tiles_of_item > 1);
        wgmma_wait_group<0>();
        wgmma_fence_operand(out[0]);
        store_last(softmax);
      }
      if (item.empty()) break;
      if (w.tiles == 0) {
        store_nothing<S>(a, item);
      } else {
        pass_tiles(w.tiles);
        queries.release(tiles_of_queries++);
      }
      plan.release(next);
      number = next + 1, tiles_of_item = 0;
      continue;
    }
    const int64_t words = S::kHasMask ? mask.first_word(item.b, item.h, item.i0 + row) : 0;
    const Hidden first_hidden(mask, words, item.begin / 64);
    queries.wait(tiles_of_queries);
    // ptxas does not see that the number is the same in a warp.
    own_queries = queries.tile(__shfl_sync(~0u, tiles_of_queries, 0)).rows(64 * consumer);
    keys.wait(copies);
    const uint32_t first_lost = lost_keys(copies);
    if (ends) wait_for_last_values();
    bar_sync(turn, 256);
    multiply_keys(copies);
    multiply_values(last_copy, tiles_of_item > 1);
    bar_arrive(next_turn, 256);
    const OnlineSoftmax<1> finished = softmax;
    const int begin = item.begin, i0 = item.i0 + row, i1 = std::min(i0 + 16, item.i1);
    const SeenWith<Half, false> seen(a, item.s, item.b, item.h, item.end);
    // The last tiles may have no key that the warpgroup's queries see. At most kStages - 2 tiles are passed, else the
    // block deadlocks: one stage keeps the last values, and one gets the next item's before these are released.
    const int all_tiles = w.tiles, end = std::min(first + 63 + seen.high, item.end);
    const int tiles_seen = (end - begin + S::kKeys - 1) / S::kKeys;
    const int tiles_of_next = std::max(std::max(1, tiles_seen), all_tiles - (S::kStages - 2));
    wgmma_wait_group<1>();
    wgmma_fence_operand(x[0]);
    keys.release(copies);
    if (tiles_of_next == 1) queries.release(tiles_of_queries);
    softmax = OnlineSoftmax<1>();
    take(seen, first_hidden, first_lost, copies, i0, i1, begin);
    if (S::kWaitsLate) values.wait(copies, softmax.zero());
    wgmma_wait_group<0>();
    wgmma_fence_operand(out[0]);
    if (ends) store_last(finished);
    operand(p, x);
    number = next, tiles_of_item = tiles_of_next;

    for (int t = 1; t < tiles_of_item; ++t) {
      ++copies;
      const Hidden hidden(mask, words, (begin + t * S::kKeys) / 64);
      keys.wait(copies);
      const uint32_t lost = lost_keys(copies);
      if (!S::kWaitsLate) values.wait(copies - 1);
      bar_sync(turn, 256);
      multiply_keys(copies);
      multiply_values(copies - 1, t > 1);
      bar_arrive(next_turn, 256);
      wgmma_wait_group<1>();
      wgmma_fence_operand(x[0]);
      keys.release(copies);
      if (t + 1 == tiles_of_item) queries.release(tiles_of_queries);
      const bool grows = take(seen, hidden, lost, copies, i0, i1, begin + t * S::kKeys);
      if (S::kWaitsLate) values.wait(copies, softmax.zero());
      wgmma_wait_group<0>();
      wgmma_fence_operand(out[0]);
      values.release(copies - 1);
      if (grows) softmax.scale(out, shrink);
      operand(p, x);
    }
    last_copy = copies++, ++tiles_of_queries;
    pass_tiles(all_tiles - tiles_of_item);
  }
  if (consumer == 0) bar_sync(turn, 256);  // takes the last arrival
}

template <typename S, typename Tensors>
__device__ __forceinline__ void run_wgmma_forward(const Tensors& tensors) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardRings<S> rings(shared);
  if (threadIdx.x == 0) rings.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x < 32) copy_keys<S>(tensors, rings);
    if (threadIdx.x / 32 == 1) copy_values<S>(tensors, rings);
    if constexpr (S::kHasBias) {
      if (threadIdx.x / 32 == 2) copy_biases<S>(tensors, rings);
    }
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    compute_items<S>(tensors.a, tensors.mask, consumer, rings);
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S, typename Tensors>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_forward(const __grid_constant__ Tensors tensors) {
  if constexpr (kHasSm90a) run_wgmma_forward<S>(tensors);
}

}  // namespace msops::flash_attention

#endif
#endif
