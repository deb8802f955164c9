// The backward pass on tensor cores of sm_90a, with the transposed products of mma_backward.h.
//
// A block takes a tile of keys, and goes through the queries of all heads that read them, the last first. One thread
// copies their tiles by TMA into rings of stages. Each of two warpgroups owns 64 of the keys and sums dk and dv in
// registers. They exchange dx through shared memory, and each multiplies a part of dx k, which is what the tile of keys
// gives to dq of these queries. Other warps add that to sums in global memory.
//
// A thread has two keys, and reads their bias from global memory. Where a bias has moved lse far from 0, p is
// multiplied by e^-rest (see extended.h). There is no room for the rests in shared memory, and few calls have any but
// 0, so that they, too, are read from global memory.
//
// The additions to a sum have a fixed order, that of its tiles of keys: a counter says how many have added theirs.
// Blocks take tiles of keys in the same order, by a ticket each, so that whatever a block waits for has begun before.
#pragma once

#include "../common/gpu/counter.h"
#include "../common/gpu/cp_async_bulk.h"
#include "mask_bits.h"
#include "mma_backward.h"
#include "wgmma_tiles.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

template <int kWidth_, bool kHasMask_, bool kHasBias_ = false>
struct WgmmaBackwardShape {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kHasMask = kHasMask_, kHasBias = kHasBias_;  // a bias of keys
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kRegisters = 240;
  static constexpr int kKeys = 64 * kConsumers, kQueries = QuerySums::kNumbers / kWidth;
  static constexpr int kSumStages = kWidth <= 64 ? 1 : 2;  // as many as there is room
  // Whether there are registers for the keys and values, and for p as words beside p.
  static constexpr bool kHasRegisters = kWidth <= 64;
  using Keys = Ring<kWidth <= 64 ? 2 : 1, SharedTile<kKeys, kWidth>>;
  using Queries = Ring<2, SharedTile<kQueries, kWidth>>;
  using Dx = Stages<2, SharedTile<kKeys, kQueries>>;
  using Sums = Ring<kSumStages, SharedArray<float4, QuerySums::kNumbers / 4>>;
  // (2, kQueries): lse, in units of the base 2 unless there is a bias, and delta; then, beside a bias, whether any rest
  // is not 0
  using Rows = Ring<2, SharedArray<float, 2 * kQueries + kHasBias>>;
  using Tickets = Ring<2, SharedArray<unsigned, 1>>;  // that were drawn before they are needed
  using Memory = SharedMemory<Keys, Keys, Queries, Queries, Dx, Sums, Rows, Tickets>;
  static constexpr int kBytes = Memory::kBytes;
};

// KeysWork is an item with its steps: a step is a tile of queries of one head, where tiles begin at multiples of their
// length. The numbers have 32 bits, as those that TMA takes, since the warps that copy have few registers.
template <typename S>
struct KeysWork : KeyItem {
  int first_query, first_key, tiles, steps;

  __device__ __forceinline__ KeysWork(const Attention<Half>& a, const Order& order, int64_t number)
      : KeysWork(a, order.find(number, a.kv_heads)) {}
  __device__ __forceinline__ KeysWork(const Attention<Half>& a, const Order::Place& at)
      : KeyItem(a, at.b, at.h, at.tile * S::kKeys, S::kKeys),
        first_query(static_cast<int>(s.first_query)),
        first_key(static_cast<int>(s.first_key)) {
    begin = begin / S::kQueries * S::kQueries;
    tiles = (end - begin + S::kQueries - 1) / S::kQueries, steps = tiles * static_cast<int>(a.group());
  }
};

// Steps goes through the steps of an item: for each tile of queries, from the last one on, through the heads. Tiles of
// keys begin together, and those with fewer queries end first, so that none waits for another that has more to do.
template <typename S>
struct Steps {
  int h, i0, first_head, last_head;

  __device__ __forceinline__ Steps(const KeysWork<S>& w, int group)
      : h(w.kv_head * group), i0(w.begin + (w.tiles - 1) * S::kQueries), first_head(h), last_head(h + group - 1) {}
  __device__ __forceinline__ void advance() {
    if (h++ < last_head) return;
    h = first_head, i0 -= S::kQueries;
  }
};

// Store and load a tile's sums of dq as QuerySums have them: each thread of a consumer has float4 number `n` of 8.
__device__ __forceinline__ void store_sums(float4* to, const float (&dq)[8][4], int consumer) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
    to[(consumer * 8 + n) * 128 + threadIdx.x % 128] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
}

__device__ __forceinline__ void load_sums(float (&dq)[8][4], const float4* from, int consumer) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 four = from[(consumer * 8 + n) * 128 + threadIdx.x % 128];
    dq[n][0] = four.x, dq[n][1] = four.y, dq[n][2] = four.z, dq[n][3] = four.w;
  }
}

// BackwardRings are the rings of stages in shared memory. Consumers exchange dx through stages without barriers, and
// fill those of the sums, which the warps of add_sums use.
template <typename S>
struct BackwardRings {
  typename S::Memory memory;
  typename S::Keys keys, values;
  typename S::Queries queries, douts;
  typename S::Dx dx;
  typename S::Sums sums;
  typename S::Rows rows;
  typename S::Tickets tickets;

  __device__ __forceinline__ explicit BackwardRings(unsigned char* shared) : memory{shared} {
    memory.take(keys), memory.take(values), memory.take(queries), memory.take(douts), memory.take(dx);
    memory.take(sums), memory.take(rows), memory.take(tickets);
  }
  __device__ __forceinline__ void init() const {
    constexpr int kUsers = 4 * S::kConsumers;
    keys.init(kUsers), values.init(kUsers), queries.init(kUsers), douts.init(kUsers), rows.init(kUsers);
    sums.init(1, kUsers), tickets.init(kUsers + 1 + S::kSumStages);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ volatile unsigned& ticket(int number) const { return *memory[tickets.tile(number)]; }
};

// BackwardBlock is what all warps of a block know.
template <typename S>
struct BackwardBlock {
  const Attention<Half>& a;
  const AttentionGradient<Half>& g;
  const QuerySums& sums;
  const Order& order;
  const MaskBits& mask;
  const KeyBias& bias;
  unsigned count;  // of items
  const BackwardRings<S>& rings;

  // Calls f(work) for each item of the block, which copy_tiles draws.
  template <typename F>
  __device__ __forceinline__ void for_items(F&& f) const {
    for (int n = 0;; ++n) {
      rings.tickets.wait(n);
      const unsigned item = rings.ticket(n);
      rings.tickets.release(n);
      if (item >= count) return;
      f(KeysWork<S>(a, order, item));
    }
  }
};

// Draws the block's items, and copies their tiles. One thread calls this.
template <typename S>
__device__ __forceinline__ void copy_tiles(const BackwardBlock<S>& block, const TensorMap& q_map,
                                           const TensorMap& k_map, const TensorMap& v_map, const TensorMap& dout_map) {
  const Attention<Half>& a = block.a;
  const BackwardRings<S>& rings = block.rings;
  const int group = static_cast<int>(a.group());
  int copies = 0, tiles_of_keys = 0;  // that were copied before this item
  unsigned item = 0;
  for (int n = 0; item < block.count; ++n) {
    rings.tickets.wait_for_room(n);
    rings.ticket(n) = item = atomicAdd(block.sums.tickets, 1u);
    mbarrier_arrive(rings.tickets.full(n));
    if (item >= block.count) return;
    const KeysWork<S> w(a, block.order, item);
    if (w.steps == 0) continue;
    const int batch = a.is_packed() ? 0 : w.b;
    rings.keys.load(tiles_of_keys, k_map, w.first_key + w.j0, w.kv_head, batch);
    rings.values.load(tiles_of_keys++, v_map, w.first_key + w.j0, w.kv_head, batch);
    Steps<S> at(w, group);
    for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
      const int row = w.first_query + at.i0;
      rings.queries.load(copies, q_map, row, at.h, batch);
      rings.douts.load(copies, dout_map, row, at.h, batch);
    }
  }
}

// Copies lse and delta of the steps' queries, and looks at their rests. A warp calls this.
template <typename S>
__device__ __forceinline__ void copy_rows(const BackwardBlock<S>& block) {
  const Attention<Half>& a = block.a;
  const BackwardRings<S>& rings = block.rings;
  const int group = static_cast<int>(a.group()), lane = threadIdx.x % 32;
  int copies = 0;
  block.for_items([&](const KeysWork<S>& w) {
    Steps<S> at(w, group);
    for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
      const int64_t from = w.query(a.of_lse, at.h, at.i0);
      rings.rows.wait_for_room(copies);
      float* const to = rings.memory[rings.rows.tile(copies)];
      [[maybe_unused]] bool has_rests = false;
      for (int i = lane; i < S::kQueries; i += 32) {
        const float lse = at.i0 + i < w.end ? a.lse[from + i] : -INFINITY;
        to[i] = lse == -INFINITY ? INFINITY : S::kHasBias ? lse : lse * kLog2E<float>;  // so that all p are 0
        to[S::kQueries + i] = at.i0 + i < w.end ? block.g.delta[from + i] : 0;
        if constexpr (S::kHasBias) has_rests |= at.i0 + i < w.end && block.g.rest[from + i] != 0;
      }
      if constexpr (S::kHasBias) {
        const bool any = __any_sync(~0u, has_rests);
        if (lane == 0) to[2 * S::kQueries] = any;
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(rings.rows.full(copies));
    }
  });
}

// Adds what the consumers have summed of dq to the sums in global memory, in the order of the tiles of keys. A warp
// calls this for each stage of these sums.
template <typename S>
__device__ __forceinline__ void add_sums(const BackwardBlock<S>& block, int stage) {
  const Attention<Half>& a = block.a;
  const QuerySums& sums = block.sums;
  const auto& ring = block.rings.sums;
  const int group = static_cast<int>(a.group()), lane = threadIdx.x % 32;
  const int tiles_of_head = static_cast<int>(sums.tiles / a.heads);
  const int left = static_cast<int>(least(a.left, SeenWith<Half, false>::kFar));
  int copies = 0;
  block.for_items([&](const KeysWork<S>& w) {
    Steps<S> at(w, group);
    const int first_tile = static_cast<int>(sums.template first_tile<S>(a, w.first_query, w.b));
    const int shift = static_cast<int>(w.s.shift());
    for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
      if (lane > 0 || copies % S::kSumStages != stage) continue;
      const int tile = at.h * tiles_of_head + first_tile + at.i0 / S::kQueries;
      const int first_key = left < 0 ? 0 : std::max(0, at.i0 + shift - left);  // that any of the queries sees
      const unsigned before = w.j0 / S::kKeys - first_key / S::kKeys;          // tiles of keys
      float* const to = sums.numbers + int64_t{tile} * QuerySums::kNumbers;
      unsigned* const counter = sums.counters + tile;
      while (before > 0 && ld_acquire(counter) < before) {
      }
      ring.wait(copies);
      const auto from = ring.tile(copies);
      if (before == 0) {
        cp_async_bulk(to, from.address, from.kBytes);
      } else {
        fence_proxy_async_global();
        cp_reduce_async_bulk_add(to, from.address, from.kBytes);
      }
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<0>();
      mbarrier_arrive(ring.empty(copies));
      cp_async_bulk_wait_group<0>();
      fence_proxy_async_global();
      red_release_add(counter);
    }
  });
}

// Computes dk and dv of 64 of each item's keys, and a part of what these keys give to dq. A warpgroup calls this;
// `consumer` is its number.
template <typename S>
__device__ __forceinline__ void compute_gradients(const BackwardBlock<S>& block, int consumer) {
  const Attention<Half>& a = block.a;
  const AttentionGradient<Half>& g = block.g;
  const BackwardRings<S>& rings = block.rings;
  const int group = static_cast<int>(a.group()), lane = threadIdx.x % 32;
  const int own = 1 + consumer, both = 1 + S::kConsumers;  // barriers
  const Exponents exponents(a);
  int copies = 0, tiles_of_keys = 0;  // that were used before this item
  block.for_items([&](const KeysWork<S>& w) {
    if (w.empty()) return;
    const int row = consumer * 64 + threadIdx.x / 32 % 4 * 16, j0 = w.j0 + row;
    float dk[1][S::kWidth / 8][4], dv[1][S::kWidth / 8][4];
    clear(dk), clear(dv);
    const auto keys = rings.keys.tile(tiles_of_keys), values = rings.values.tile(tiles_of_keys);
    [[maybe_unused]] const auto k = keys.rows(64 * consumer), v = values.rows(64 * consumer);
    [[maybe_unused]] uint32_t k_words[4][4], v_words[4][4];  // of the warp
    SeenWith<Half, false> seen(a, w.s, w.b, w.kv_head * group, w.keys);
    Steps<S> at(w, group);
    if (w.steps > 0) {
      rings.keys.wait(tiles_of_keys), rings.values.wait(tiles_of_keys);
      for (const auto tile : {keys, values})
        clear_rows(rings.memory, tile, w.keys - w.j0, a.kv_lengths || a.is_packed(), own);
      if constexpr (S::kHasRegisters) load_operand(k_words, keys.rows(row)), load_operand(v_words, values.rows(row));
    }
    for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
      const auto queries = rings.queries.tile(copies), douts = rings.douts.tile(copies);
      const auto dx_tile = rings.dx.tile(copies);
      const int64_t words = S::kHasMask ? block.mask.first_word(w.b, at.h, j0) : 0;
      const HiddenSums<S::kHasMask, S::kQueries / 8> hidden(block.mask, words, at.i0 / 64);
      [[maybe_unused]] float bias[2];
      if constexpr (S::kHasBias) {
        const int64_t first = block.bias.first(w.b, at.h);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = j0 + 8 * half + lane / 4;
          bias[half] = j < w.keys ? block.bias[first + j * block.bias.key] : 0;
        }
      }
      rings.queries.wait(copies), rings.douts.wait(copies), rings.rows.wait(copies);
      clear_rows(rings.memory, queries, seen.queries - at.i0, a.is_packed(), own);
      clear_rows(rings.memory, douts, seen.queries - at.i0, a.is_packed(), own);
      float dq[8][4];
#pragma unroll
      for (int box = 0; box < dx_tile.kBoxes; ++box) {  // of 64 queries
        float p[1][8][4], dx[1][8][4];
        uint32_t p_words[1][4][4], dx_words[1][4][4];
        const auto q = queries.rows(64 * box), dout = douts.rows(64 * box);
        const int i0 = at.i0 + 64 * box;
        const float* const lse = rings.memory[rings.rows.tile(copies)] + 64 * box;
        const float* const delta = lse + S::kQueries;
        if constexpr (S::kHasRegisters) {
          begin_product(p[0], k_words, q);
          begin_product(dx[0], v_words, dout);
        } else {
          begin_product(p[0], k, q);
          begin_product(dx[0], v, dout);
        }

        // All products that were begun before have ended, too.
        wgmma_wait_group<1>();
        wgmma_fence_operand(p[0]), wgmma_fence_operand(dk[0]), wgmma_fence_operand(dv[0]);
        if (box == 0 && step > 0) rings.queries.release(copies - 1);
        if constexpr (!S::kHasBias) {
          exponents.logits.apply(p);
          for_sums<1, 8>([&](int m, int n, int i, int, int column) {
            p[m][n][i] = ex2_approx_ftz(p[m][n][i] * exponents.factor - lse[column]);
          });
        } else {
          for_sums<1, 8>([&](int m, int n, int i, int, int column) {
            const float logit = fmaf(p[m][n][i], a.scale, bias[i / 2]);
            p[m][n][i] = ex2_approx_ftz((logit - lse[column]) * kLog2E<float>);  // exact where both are large
          });
          if (rings.memory[rings.rows.tile(copies)][2 * S::kQueries] != 0) {
            const float* const rest = g.rest + w.query(a.of_lse, at.h, i0);
            for_sums<1, 8>([&](int m, int n, int i, int, int column) {
              if (i0 + column < w.end) p[m][n][i] *= ex2_approx_ftz(-rest[column] * kLog2E<float>);
            });
          }
        }
        if (!seen.all(i0, i0 + 64, j0, j0 + 16) || i0 + 64 > w.end) seen.hide_transposed(p, i0, w.end, j0);
        hidden.hide(p, 0, box);
        const auto multiply_douts = [&] {
          operand(p_words, p);
          begin_product(dv[0], p_words[0], dout, true);
        };
        if (S::kHasRegisters) multiply_douts();
        wgmma_wait_group<S::kHasRegisters>();
        wgmma_fence_operand(dx[0]);
        // The softcap is 0 beside a bias, but without the branch on it ptxas begins so much at once that it lacks
        // registers and serializes the products.
        exponents.differentiate(
            dx, p, [&](int, int, int column) { return delta[column]; },
            [&](int, int, int column) { return lse[column] * kLn2; });
        operand(dx_words, dx);
        if (!S::kHasRegisters) multiply_douts();
        store_operand(dx_tile.box(box).rows(row), dx_words[0]);
        if (box + 1 == dx_tile.kBoxes) {
          fence_proxy_async();
          bar_sync(both, 256);  // also says that both have done with the other tile dx
          // Warpgroups share dx k by its queries, if these are in two boxes, else by its columns.
          begin_transposed(dq, dx_tile.box(dx_tile.kBoxes > 1 ? consumer : 0),
                           keys.box(keys.kBoxes > 1 ? consumer : 0));
        }
        begin_product(dk[0], dx_words[0], q, true);
      }
      rings.rows.release(copies);
      wgmma_wait_group<1>();
      wgmma_fence_operand(dq), wgmma_fence_operand(dv[0]);
      rings.douts.release(copies);
      rings.sums.wait_for_room(copies);
      store_sums(rings.memory[rings.sums.tile(copies)], dq, consumer);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(rings.sums.full(copies));
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(dk[0]);
    if (w.steps > 0) {
      rings.queries.release(copies - 1), rings.keys.release(tiles_of_keys), rings.values.release(tiles_of_keys);
      ++tiles_of_keys;
    }
    const auto to_k = rows_of(g.dk, a.of_k, w.key(a.of_k, 0), a.width, true);
    const auto to_v = rows_of(g.dv, a.of_v, w.key(a.of_v, 0), a.value_width, true);
    store_aligned(dk[0], {a.scale, a.scale}, to_k, j0, w.j1);
    store_aligned(dv[0], {1, 1}, to_v, j0, w.j1);
  });
}

template <typename S>
__device__ __forceinline__ void run_wgmma_backward(const Attention<Half>& a, const AttentionGradient<Half>& g,
                                                   const TensorMap& q_map, const TensorMap& k_map,
                                                   const TensorMap& v_map, const TensorMap& dout_map,
                                                   const QuerySums& sums, const Order& order, unsigned count,
                                                   const MaskBits& mask, const KeyBias& bias) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BackwardRings<S> rings(shared);
  if (threadIdx.x == 0) rings.init();
  __syncthreads();
  const BackwardBlock<S> block{a, g, sums, order, mask, bias, count, rings};
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      copy_tiles<S>(block, q_map, k_map, v_map, dout_map);
    } else if (warp == 1) {
      copy_rows<S>(block);
    } else if (const int stage = warp - 2; 0 <= stage && stage < S::kSumStages) {
      add_sums<S>(block, stage);
    }
  } else {
    setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // is known to be the same in a warp
    compute_gradients<S>(block, consumer);
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_backward(const __grid_constant__ Attention<Half> a, const __grid_constant__ AttentionGradient<Half> g,
                   const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                   const __grid_constant__ QuerySums sums, const __grid_constant__ Order order, unsigned count,
                   const __grid_constant__ MaskBits mask, const __grid_constant__ KeyBias bias) {
  if constexpr (kHasSm90a) run_wgmma_backward<S>(a, g, q_map, k_map, v_map, dout_map, sums, order, count, mask, bias);
}

// Stores dq from its sums. A block has a tile of queries.
template <typename S>
__global__ void __launch_bounds__(256)
    store_query_sums(const Attention<Half> a, const AttentionGradient<Half> g, const QuerySums sums, int64_t tiles) {
  const int64_t tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
  const int b = static_cast<int>(head / a.heads), h = static_cast<int>(head % a.heads);
  const auto item = QueryItem::of(a, b, h, tile * S::kQueries, S::kQueries);
  if (item.empty()) return;
  float dq[8][4] = {};
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  if (item.begin < item.end) {
    const int64_t slot = h * (sums.tiles / a.heads) + sums.first_tile<S>(a, item.s.first_query, b) + tile;
    load_sums(dq, reinterpret_cast<const float4*>(sums.numbers + slot * QuerySums::kNumbers), consumer);
  }
  auto rows = rows_of(g.dq, a.of_q, item.query(a.of_q, 0), a.width, true);
  if (S::kWidth > 64) rows.first += 64 * consumer, rows.width -= 64 * consumer;
  store_aligned(dq, {a.scale, a.scale}, rows, item.i0 + (S::kQueries > 64 ? 64 * consumer : 0) + 16 * warp, item.i1);
}

}  // namespace msops::flash_attention

#endif
#endif
