// The backward pass on tensor cores of sm_90a, with the transposed products of mma_backward.h.
//
// A block takes a tile of keys, and goes through the queries of all heads that read them, the last first. One thread
// copies their tiles by TMA into rings of stages. Each of two warpgroups owns 64 of the keys and sums dk and dv in
// registers. They exchange dx through shared memory, and each multiplies a part of dx k, which is what the tile of keys
// gives to dq of these queries. Other warps add that to sums in global memory.
//
// The additions to a sum have a fixed order, that of its tiles of keys: a counter says how many have added theirs.
// Blocks take tiles of keys in the same order, by a ticket each, so that whatever a block waits for has begun before.
#pragma once

#include "../common/gpu/counter.h"
#include "../common/gpu/cp_async_bulk.h"
#include "mma_backward.h"
#include "wgmma_tiles.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

template <int kWidth_>
struct WgmmaBackwardShape {
  static constexpr int kWidth = kWidth_, kBoxes = kWidth / 64;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kKeys = 64 * kConsumers, kQueries = QuerySums::kNumbers / kWidth, kStages = 2;
  static constexpr int kKeyStages = kWidth <= 64 ? 2 : 1,
                       kSumStages = kWidth <= 64 ? 1 : 2;  // as many as there is room
  static constexpr int kKeysBytes = kKeys * kWidth * 2, kQueriesBytes = kQueries * kWidth * 2;
  static constexpr int kDxBytes = kKeys * kQueries * 2, kSumsBytes = QuerySums::kNumbers * 4;
  static constexpr int kRowBytes = 2 * kQueries * 4;  // lse and delta of a stage
  static constexpr int kTickets = 2;                  // that were drawn before they are needed
  static constexpr int kBytes = 2 * kKeyStages * kKeysBytes + kStages * (2 * kQueriesBytes + kRowBytes) + 2 * kDxBytes +
                                kSumStages * kSumsBytes +
                                16 * (2 * kKeyStages + 3 * kStages + kSumStages + 2 * kTickets);
};

// KeysWork is what a block does for one item: a tile of keys, with the queries from begin to end - 1 of all heads that
// read them. A step is a tile of queries of one head. The numbers have 32 bits, as those that TMA takes, since the
// warps that copy have few registers.
template <typename S>
struct KeysWork {
  int b, kv_head, first_query, first_key, j0, j1, keys, begin, end, tiles, steps;

  __device__ __forceinline__ KeysWork(const Attention<Half>& a, const Order& order, int64_t item) {
    const Order::Place at = order.find(item, a.kv_heads);
    b = at.b, kv_head = at.h;
    const Sequence s = a.sequence(b);
    first_query = static_cast<int>(s.first_query), first_key = static_cast<int>(s.first_key);
    // Keys that kv_lengths hides have the gradient 0.
    keys = static_cast<int>(s.keys), j0 = static_cast<int>(at.tile * S::kKeys);
    j1 = static_cast<int>(least(j0 + S::kKeys, a.is_packed() ? s.keys : a.keys));
    Span queries{0, 0};
    if (j0 < keys) queries = a.queries_of(s, {j0, least(j1, keys)});
    begin = static_cast<int>(least(queries.begin, queries.end)) / S::kQueries * S::kQueries;
    end = static_cast<int>(queries.end);
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

template <typename S>
__device__ __forceinline__ void run_wgmma_backward(const Attention<Half>& a, const AttentionGradient<Half>& g,
                                                   const TensorMap& q_map, const TensorMap& k_map,
                                                   const TensorMap& v_map, const TensorMap& dout_map,
                                                   const QuerySums& sums, const Order& order, unsigned count) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned first = shared_address(shared);
  const unsigned stages = first + 2 * S::kKeyStages * S::kKeysBytes;
  const unsigned dx_tiles = stages + 2 * S::kStages * S::kQueriesBytes;  // (2, kQueries / 64, kKeys, 64)
  const unsigned sum_stages = dx_tiles + 2 * S::kDxBytes, row_stages = sum_stages + S::kSumStages * S::kSumsBytes;
  const unsigned barriers = row_stages + S::kStages * S::kRowBytes;
  const Ring<S::kKeyStages> k_ring{first, barriers, S::kKeysBytes};  // (kKeyStages, kBoxes, kKeys, 64)
  const Ring<S::kKeyStages> v_ring{first + S::kKeyStages * S::kKeysBytes, barriers + 16 * S::kKeyStages,
                                   S::kKeysBytes};  // (kKeyStages, kBoxes, kKeys, 64)
  const Ring<S::kStages> q_ring{stages, v_ring.barriers + 16 * S::kKeyStages,
                                S::kQueriesBytes};  // (kStages, kBoxes, kQueries, 64)
  const Ring<S::kStages> dout_ring{stages + S::kStages * S::kQueriesBytes, q_ring.barriers + 16 * S::kStages,
                                   S::kQueriesBytes};  // (kStages, kBoxes, kQueries, 64)
  const Ring<S::kStages> row_ring{row_stages, dout_ring.barriers + 16 * S::kStages, S::kRowBytes};
  const Ring<S::kSumStages> sum_ring{sum_stages, row_ring.barriers + 16 * S::kStages, S::kSumsBytes};
  const unsigned ticket_barriers = sum_ring.barriers + 16 * S::kSumStages;
  const Ring<S::kTickets> tickets{ticket_barriers + 16 * S::kTickets, ticket_barriers, 16};
  const auto rows_of_stage = [&](int copy) {  // (2, kQueries): lse in units of the base 2, delta
    return reinterpret_cast<float*>(shared + (row_ring.stage(copy) - first));
  };
  const auto ticket = [&](int n) { return reinterpret_cast<volatile unsigned*>(shared + (tickets.stage(n) - first)); };
  if (threadIdx.x == 0) {
    constexpr int kUsers = 4 * S::kConsumers;
    k_ring.init(kUsers), v_ring.init(kUsers), q_ring.init(kUsers), dout_ring.init(kUsers), row_ring.init(kUsers);
    sum_ring.init(1, kUsers), tickets.init(kUsers + 1 + S::kSumStages);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int group = static_cast<int>(a.group()), lane = threadIdx.x % 32;
  int copies = 0, tiles_of_keys = 0;  // that were used before this item
  // Calls f(work) for each item of the block.
  const auto for_items = [&](auto&& f) {
    for (int n = 0;; ++n) {
      tickets.wait(n);
      const unsigned item = *ticket(n);
      tickets.release(n);
      if (item >= count) return;
      f(KeysWork<S>(a, order, item));
    }
  };
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 0) {
      unsigned item = 0;
      for (int n = 0; item < count; ++n) {
        if (n >= S::kTickets) mbarrier_wait(tickets.empty(n), n / S::kTickets - 1);
        *ticket(n) = item = atomicAdd(sums.tickets, 1u);
        mbarrier_arrive(tickets.full(n));
        if (item >= count) return;
        const KeysWork<S> w(a, order, item);
        if (w.steps == 0) continue;
        const int batch = a.is_packed() ? 0 : w.b;
        k_ring.template load<S::kBoxes, S::kKeys>(tiles_of_keys, k_map, w.first_key + w.j0, w.kv_head, batch);
        v_ring.template load<S::kBoxes, S::kKeys>(tiles_of_keys++, v_map, w.first_key + w.j0, w.kv_head, batch);
        Steps<S> at(w, group);
        for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
          const int row = w.first_query + at.i0;
          q_ring.template load<S::kBoxes, S::kQueries>(copies, q_map, row, at.h, batch);
          dout_ring.template load<S::kBoxes, S::kQueries>(copies, dout_map, row, at.h, batch);
        }
      }
    } else if (threadIdx.x / 32 == 1) {
      for_items([&](const KeysWork<S>& w) {
        Steps<S> at(w, group);
        for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
          const int64_t from = a.of_lse.offset(w.b, at.h, w.first_query + at.i0);
          if (copies >= S::kStages) mbarrier_wait(row_ring.empty(copies), copies / S::kStages - 1);
          float* const to = rows_of_stage(copies);
          for (int i = lane; i < S::kQueries; i += 32) {
            const float lse = at.i0 + i < w.end ? a.lse[from + i] : -INFINITY;
            to[i] = lse == -INFINITY ? INFINITY : lse * kLog2E;  // so that all p are 0
            to[S::kQueries + i] = at.i0 + i < w.end ? g.delta[from + i] : 0;
          }
          __syncwarp();
          if (lane == 0) mbarrier_arrive(row_ring.full(copies));
        }
      });
    } else if (const int stage = static_cast<int>(threadIdx.x / 32) - 2; 0 <= stage && stage < S::kSumStages) {
      const int tiles_of_head = static_cast<int>(sums.tiles / a.heads);
      const int left = static_cast<int>(least(a.left, Seen::kFar));
      for_items([&](const KeysWork<S>& w) {
        Steps<S> at(w, group);
        const int first_tile = static_cast<int>(sums.template first_tile<S>(a, w.first_query, w.b));
        const int shift = static_cast<int>(a.sequence(w.b).shift());
        for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
          if (lane > 0 || copies % S::kSumStages != stage) continue;
          const int tile = at.h * tiles_of_head + first_tile + at.i0 / S::kQueries;
          const int first_key = left < 0 ? 0 : std::max(0, at.i0 + shift - left);  // that any of the queries sees
          const unsigned before = w.j0 / S::kKeys - first_key / S::kKeys;          // tiles of keys
          float* const to = sums.numbers + int64_t{tile} * QuerySums::kNumbers;
          unsigned* const counter = sums.counters + tile;
          while (before > 0 && ld_acquire(counter) < before) {
          }
          sum_ring.wait(copies);
          if (before == 0) {
            cp_async_bulk(to, sum_ring.stage(copies), S::kSumsBytes);
          } else {
            fence_proxy_async_global();
            cp_reduce_async_bulk_add(to, sum_ring.stage(copies), S::kSumsBytes);
          }
          cp_async_bulk_commit_group();
          cp_async_bulk_wait_group_read<0>();
          mbarrier_arrive(sum_ring.empty(copies));
          cp_async_bulk_wait_group<0>();
          fence_proxy_async_global();
          red_release_add(counter);
        }
      });
    }
  } else {
    setmaxnreg_inc<240>();
    // The compiler learns that all threads of a warp have the same number.
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, own = 1 + consumer, both = 1 + S::kConsumers;
    const Exponents exponents(a);
    for_items([&](const KeysWork<S>& w) {
      if (w.j0 >= w.j1) return;
      const int row = consumer * 64 + threadIdx.x / 32 % 4 * 16, j0 = w.j0 + row;
      float dk[1][S::kWidth / 8][4], dv[1][S::kWidth / 8][4];
      clear(dk), clear(dv);
      const unsigned k_tile = k_ring.stage(tiles_of_keys), v_tile = v_ring.stage(tiles_of_keys);
      const unsigned k = k_tile + consumer * (64 * 128), v = v_tile + consumer * (64 * 128);
      Seen seen(a, a.sequence(w.b), w.b, w.kv_head * group, w.keys);
      Steps<S> at(w, group);
      // Rows of tiles that may be anything become 0.
      const auto clear_queries = [&](unsigned tile, int i0) {
        clear_rows<S::kBoxes, S::kQueries>(shared + (tile - first), seen.queries - i0, a.is_packed(), own);
      };
      if (w.steps > 0) {
        k_ring.wait(tiles_of_keys), v_ring.wait(tiles_of_keys);
        for (const unsigned tile : {k_tile, v_tile})
          clear_rows<S::kBoxes, S::kKeys>(shared + (tile - first), w.keys - w.j0, a.kv_lengths || a.is_packed(), own);
      }
      for (int step = 0; step < w.steps; ++step, ++copies, at.advance()) {
        const unsigned q = q_ring.stage(copies), dout = dout_ring.stage(copies);
        const unsigned dx_tile = dx_tiles + copies % 2 * S::kDxBytes;
        seen.h = at.h;
        q_ring.wait(copies), dout_ring.wait(copies), row_ring.wait(copies);
        clear_queries(q, at.i0), clear_queries(dout, at.i0);
        float dq[8][4];
#pragma unroll
        for (int box = 0; box < S::kQueries / 64; ++box) {  // of 64 queries
          float p[1][8][4], dx[1][8][4];
          uint32_t p_words[1][4][4], dx_words[1][4][4];
          const unsigned box_of_q = q + box * (64 * 128), box_of_dout = dout + box * (64 * 128);
          const int i0 = at.i0 + 64 * box;
          const float* const lse = rows_of_stage(copies) + 64 * box;
          const float* const delta = lse + S::kQueries;
          begin_rows<S::kWidth>(p[0], k, S::kKeys, box_of_q, S::kQueries);
          begin_rows<S::kWidth>(dx[0], v, S::kKeys, box_of_dout, S::kQueries);

          // All products that were begun before have ended, too.
          wgmma_wait_group<1>();
          wgmma_fence_operand(p[0]), wgmma_fence_operand(dk[0]), wgmma_fence_operand(dv[0]);
          if (box == 0 && step > 0) q_ring.release(copies - 1);
          exponents.logits.apply(p);
          for_sums<1, 8>([&](int m, int n, int i, int, int column) {
            p[m][n][i] = ex2_approx_ftz(p[m][n][i] * exponents.factor - lse[column]);
          });
          if (!seen.all(i0, i0 + 64, j0, j0 + 16) || i0 + 64 > w.end) hide_transposed(seen, p, i0, w.end, j0);
          wgmma_wait_group<0>();
          wgmma_fence_operand(dx[0]);
          exponents.differentiate(
              dx, p, [&](int, int, int column) { return delta[column]; },
              [&](int, int, int column) { return lse[column] * kLn2; });
          operand(p_words, p), operand(dx_words, dx);
          begin_columns(dv[0], p_words[0], box_of_dout, S::kQueries, true);
          store_operand(dx_tile + box * (S::kKeys * 128), row, dx_words[0]);
          if (64 * (box + 1) == S::kQueries) {
            fence_proxy_async();
            bar_sync(both, 256);  // also says that both have done with the other tile dx
            // Warpgroups share dx k by its queries, if these are in two boxes, else by its columns.
            begin_transposed<S::kKeys>(dq, S::kQueries > 64 ? dx_tile + consumer * (S::kKeys * 128) : dx_tile,
                                       S::kWidth > 64 ? k_tile + consumer * (S::kKeys * 128) : k_tile);
          }
          begin_columns(dk[0], dx_words[0], box_of_q, S::kQueries, true);
        }
        row_ring.release(copies);
        wgmma_wait_group<1>();
        wgmma_fence_operand(dq), wgmma_fence_operand(dv[0]);
        dout_ring.release(copies);
        if (copies >= S::kSumStages) mbarrier_wait(sum_ring.empty(copies), copies / S::kSumStages - 1);
        float4* const to = reinterpret_cast<float4*>(shared + (sum_ring.stage(copies) - first));
#pragma unroll
        for (int n = 0; n < 8; ++n)
          to[(consumer * 8 + n) * 128 + threadIdx.x % 128] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(sum_ring.full(copies));
      }
      wgmma_wait_group<0>();
      wgmma_fence_operand(dk[0]);
      if (w.steps > 0) {
        q_ring.release(copies - 1), k_ring.release(tiles_of_keys), v_ring.release(tiles_of_keys);
        ++tiles_of_keys;
      }
      const auto to_k = rows_of(g.dk, a.of_k, w.b, w.kv_head, w.first_key, a.width, true);
      const auto to_v = rows_of(g.dv, a.of_v, w.b, w.kv_head, w.first_key, a.value_width, true);
      store_packed(dk[0], {a.scale, a.scale}, to_k, j0, w.j1);
      store_packed(dv[0], {1, 1}, to_v, j0, w.j1);
    });
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, 1)
    wgmma_backward(const __grid_constant__ Attention<Half> a, const __grid_constant__ AttentionGradient<Half> g,
                   const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                   const __grid_constant__ QuerySums sums, const __grid_constant__ Order order, unsigned count) {
  if constexpr (kHasSm90a) run_wgmma_backward<S>(a, g, q_map, k_map, v_map, dout_map, sums, order, count);
}

// Stores dq from its sums. A block has a tile of queries.
template <typename S>
__global__ void __launch_bounds__(256)
    store_query_sums(const Attention<Half> a, const AttentionGradient<Half> g, const QuerySums sums, int64_t tiles) {
  const int64_t tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
  const int b = static_cast<int>(head / a.heads), h = static_cast<int>(head % a.heads);
  const Sequence s = a.sequence(b);
  const int i0 = static_cast<int>(tile * S::kQueries), i1 = static_cast<int>(least(i0 + S::kQueries, s.queries));
  if (i0 >= i1) return;
  float dq[8][4] = {};
  const int consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  if (!a.keys_of(s, {i0, i1}).empty()) {
    const int64_t slot = h * (sums.tiles / a.heads) + sums.first_tile<S>(a, s.first_query, b) + tile;
    const float4* const from = reinterpret_cast<const float4*>(sums.numbers + slot * QuerySums::kNumbers);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 four = from[(consumer * 8 + n) * 128 + threadIdx.x % 128];
      dq[n][0] = four.x, dq[n][1] = four.y, dq[n][2] = four.z, dq[n][3] = four.w;
    }
  }
  auto rows = rows_of(g.dq, a.of_q, b, h, s.first_query, a.width, true);
  if (S::kWidth > 64) rows.first += 64 * consumer, rows.width -= 64 * consumer;
  store_packed(dq, {a.scale, a.scale}, rows, i0 + (S::kQueries > 64 ? 64 * consumer : 0) + 16 * warp, i1);
}

}  // namespace msops::flash_attention

#endif
#endif
