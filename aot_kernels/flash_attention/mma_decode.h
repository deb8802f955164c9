// The forward pass on tensor cores for few queries against many keys, for sm_80 and later. It is as fast as keys and
// values are read.
//
// The queries of all heads that read the same keys are rows of tiles of 16. A block takes a split of the keys. If there
// is one tile of rows, the block's warps take turns at tiles of keys: a warp copies its own keys and values by
// cp.async, some tiles ahead, so that warps wait for each other only at the end, when they add what each has summed. If
// there are more, each warp has its own rows, and all of them read the same keys.
//
// The splits of one tile of rows may be a cluster, whose blocks add what they have summed through shared memory. Else
// combine.h adds it.
#pragma once

#include "../common/gpu/cluster.h"
#include "../common/launch.h"
#include "mma_terms.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

template <int kWidth_, bool kHasManyRows>
struct DecodeShape {
  static constexpr int kWidth = kWidth_, kWarps = kWidth <= 128 ? 4 : 2, kThreads = 32 * kWarps;
  static constexpr int kTeam = kHasManyRows ? kWarps : 1;  // warps that read the same keys
  // With larger tiles of short rows in fewer stages, three blocks share a multiprocessor of sm_90 in place of two.
  static constexpr int kBlocks = kWidth <= 64 && !kHasManyRows ? 3 : 1;  // that have registers at once, at least
  static constexpr int kRows = 16 * kTeam, kKeys = kWidth <= 64 && !kHasManyRows ? 32 : 16 * kTeam;
  static constexpr int kStages = kWidth > 64 ? 3 : kHasManyRows ? 6 : 2;
  static constexpr int kStage = 2 * kKeys * kWidth;                     // elements
  static constexpr bool kSharesQueries = kWidth > 128 || kHasManyRows;  // else each warp has them in registers
  static constexpr int kQueries = kSharesQueries ? kRows * kWidth : 0;
  static constexpr int kBytes = (kWarps / kTeam * kStages * kStage + kQueries) * 2;
  static constexpr int kOwnRow = kWidth + 4;  // of a block's sums: a row, its maximum and its total, and two more
  static_assert((kWarps * 16 * (kWidth + 2) + 16 * kOwnRow) * 4 <= kBytes, "sums take the stages' place");
};

// Adds what the blocks of a cluster have summed, `own` in each, in order. Each block takes a part of the rows.
template <typename S>
__device__ __forceinline__ void add_in_cluster(const Attention<Half>& a, const GroupItem& item, const float* own) {
  constexpr int kAhead = 4;
  const int quads = max((static_cast<int>(a.value_width) + 3) / 4, 1);
  const int blocks = static_cast<int>(cluster_nctarank()), rank = static_cast<int>(cluster_ctarank());
  for (int i = rank * S::kThreads + threadIdx.x; i < 16 * quads; i += blocks * S::kThreads) {
    const int row = i / quads, first = i % quads * 4;
    if (!item.has(row)) return;
    const float* const from = own + row * S::kOwnRow;
    float max = -INFINITY, sum = 0, total[4] = {};
    for (int block = 0; block < blocks; block += kAhead) {
      Pack<float, 4> sums[kAhead] = {}, stats[kAhead] = {};
      float greatest = max;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        stats[j].values[0] = -INFINITY;
        if (block + j >= blocks) continue;
        stats[j] = ld_shared_cluster(from + S::kWidth, block + j), sums[j] = ld_shared_cluster(from + first, block + j);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) greatest = fmaxf(greatest, stats[j].values[0]);
      const float base = greatest == -INFINITY ? 0 : greatest, kept = ex2_approx_ftz((max - base) * kLog2E<float>);
      max = greatest, sum *= kept;
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] *= kept;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const float share = ex2_approx_ftz((stats[j].values[0] - base) * kLog2E<float>);
        sum += share * stats[j].values[1];
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] += share * sums[j].values[e];
      }
    }
    const int h = item.head(row), query = item.s.first_query + item.query(row);
    Half* const to = a.out + a.of_out.offset(item.b, h, query);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (first + e < a.value_width) to[first + e] = Half(sum == 0 ? 0 : total[e] / sum);
    if (first == 0) a.lse[a.of_lse.offset(item.b, h, query)] = max + logf(sum);
  }
}

// Loads two neighbouring elements of a row, from a column on; those beyond its width are 0.
__device__ __forceinline__ uint32_t load_pair(const Half* row, int column, int width) {
  const uint32_t first = column < width ? row[column].bits : 0, second = column + 1 < width ? row[column + 1].bits : 0;
  return first | second << 16;
}

// A is Attention<Half> or ExtendedAttention<Half>.
template <typename S, typename A>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    mma_decode(const A a, const SplitOrder order, int64_t count, int aligned) {
  if (!has_instructions_of(80)) return;
  using T = Tile<Half, S::kWidth>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = a.width, value_width = a.value_width;
  constexpr int kTeams = S::kWarps / S::kTeam;
  const int team = warp / S::kTeam, part = warp % S::kTeam;  // `part` is which 16 of the rows the warp has
  Half* const stages =
      reinterpret_cast<Half*>(shared) + team * (S::kStages * S::kStage);  // (kStages, 2, kKeys, kWidth)
  Half* const q_tile = reinterpret_cast<Half*>(shared) + kTeams * S::kStages * S::kStage;  // (kRows, kWidth)
  float* const sums = reinterpret_cast<float*>(shared);                                    // (kWarps, 16, kWidth)
  float* const stats = sums + S::kWarps * 16 * S::kWidth;                                  // (kWarps, 16, 2)
  float* const own = stats + S::kWarps * 16 * 2;                                           // (16, kOwnRow)
  const bool in_cluster = kTeams > 1 && cluster_nctarank() > 1;
  const Logits logits(a);
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const SplitOrder::Place at = order.find(number, a.kv_heads);
    const GroupItem item(a, at.b, at.h, at.tile * S::kRows, at.split);
    if (item.empty()) continue;
    const int b = item.b, queries = static_cast<int>(item.s.queries), begin = item.begin, end = item.end;
    const int64_t split = at.split;
    const auto k = rows_of(a.k, a.of_k, item.key(a.of_k, 0), width, aligned & 2);
    const auto v = rows_of(a.v, a.of_v, item.key(a.of_v, 0), value_width, aligned & 4);

    const int tiles = (end - begin + S::kKeys - 1) / S::kKeys;
    const auto begin_copy = [&](int t) {
      if (t * kTeams + team < tiles) {
        const int j0 = begin + (t * kTeams + team) * S::kKeys, thread = threadIdx.x % (32 * S::kTeam);
        Half* const stage = stages + t % S::kStages * S::kStage;
        T::template load<S::kKeys, 32 * S::kTeam>(stage, k, j0, end, thread);
        T::template load<S::kKeys, 32 * S::kTeam>(stage + S::kKeys * S::kWidth, v, j0, end, thread);
      }
      cp_async_commit();
    };
    __syncthreads();
#pragma unroll
    for (int t = 0; t < S::kStages - 1; ++t) begin_copy(t);

    uint32_t q[S::kWidth / 16][4];
    int row_head[2], row_query[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * part + 8 * half + lane / 4;
      const bool inside = item.has(row);
      row_head[half] = inside ? item.head(row) : 0, row_query[half] = inside ? item.query(row) : queries;
      const Half* const from =
          a.q + a.of_q.offset(b, row_head[half], item.s.first_query + (inside ? row_query[half] : 0));
      unrolled<S::kWidth / 16, 2>([&](int step, int i) {
        const int column = step * 16 + 8 * i + lane % 4 * 2;
        const uint32_t pair = load_pair(from, column, inside ? width : 0);
        q[step][2 * i + half] = pair;
        if (S::kSharesQueries && team == 0) *reinterpret_cast<uint32_t*>(T::at(q_tile, row, column)) = pair;
      });
    }
    if (S::kSharesQueries) __syncthreads();
    const unsigned q_address = T::left(q_tile, 16 * part);
    const Seen<Half> seen(a, item.s, b, 0, end);
    const Terms<A> terms(a, seen);
    const auto query_of_row = [&](int, int half) {
      return QueryOfRow{half ? row_head[1] : row_head[0], half ? row_query[1] : row_query[0]};
    };
    OnlineSoftmax<1> softmax;
    float out[1][S::kWidth / 8][4];
    clear(out);
    for (int t = 0; t * kTeams + team < tiles; ++t) {
      const int j0 = begin + (t * kTeams + team) * S::kKeys;
      const Half* const stage = stages + t % S::kStages * S::kStage;
      cp_async_wait<S::kStages - 2>();
      S::kTeam > 1 ? __syncthreads() : __syncwarp();
      begin_copy(t + S::kStages - 1);
      float x[1][S::kKeys / 8][4], shrink[1][2];
      uint32_t p[1][S::kKeys / 16][4];
      clear(x);
#pragma unroll
      for (int step = 0; step < S::kWidth / 16; ++step) {
        if (S::kSharesQueries) ldmatrix_x4(q[step], T::at(q_address, 16 * step));
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; n += 2) {
          uint32_t right[4];
          ldmatrix_x4(right, T::at(T::right(stage), 16 * step, 8 * n));
          mma_m16n8k16(x[0][n], q[step], {right[0], right[1]});
          mma_m16n8k16(x[0][n + 1], q[step], {right[2], right[3]});
        }
      }
      logits.apply(x);
      terms.add(x, j0, query_of_row);
      if (!seen.all(0, queries, j0, j0 + S::kKeys)) seen.hide_rows(x, j0, query_of_row);
      if (softmax.advance(x, shrink, logits.factor * kLog2E<float>)) softmax.scale(out, shrink);
      terms.drop(x, j0, query_of_row);
      operand(p, x);
      T::multiply(out, p, T::transposed(stage + S::kKeys * S::kWidth), value_width);
    }
    cp_async_wait<0>();
    softmax.finish();

    __syncthreads();
    for_sums<1, S::kWidth / 8>([&](int m, int n, int i, int row, int column) {
      sums[(warp * 16 + row) * S::kWidth + column] = out[m][n][i] * kept_of(a);
      if (column > 0 || n > 0) return;
      stats[(warp * 16 + row) * 2] = softmax.max[m][i / 2] * logits.factor;
      stats[(warp * 16 + row) * 2 + 1] = softmax.sum[m][i / 2];
    });
    __syncthreads();
    for (int row = warp; row < S::kRows && item.has(row); row += S::kWarps) {
      const auto place = [&](int t) { return t * S::kRows + row; };  // what team t has of the row
      float max = -INFINITY, sum = 0, share[kTeams];
#pragma unroll
      for (int t = 0; t < kTeams; ++t) max = fmaxf(max, stats[place(t) * 2]);
#pragma unroll
      for (int t = 0; t < kTeams; ++t) {
        const float less = stats[place(t) * 2] - (max == -INFINITY ? 0 : max);
        share[t] = ex2_approx_ftz(less * kLog2E<float>);
        sum += share[t] * stats[place(t) * 2 + 1];
      }
      const int h = item.head(row), i = item.query(row);
      float* const partial = in_cluster ? own + row * S::kOwnRow : a.partial_sums(split, b, h, i);
      Half* const to = a.out + a.of_out.offset(b, h, item.s.first_query + i);
      const int columns = in_cluster ? (value_width + 3) / 4 * 4 : value_width;  // whole packs
      for (int column = lane; column < columns; column += 32) {
        float total = 0;
#pragma unroll
        for (int t = 0; t < kTeams; ++t) total += share[t] * sums[place(t) * S::kWidth + column];
        if (a.splits > 1) {
          partial[column] = total;
        } else {
          to[column] = Half(sum == 0 ? 0 : total / sum);
        }
      }
      if (lane == 0 && a.splits > 1) {
        float* const to_stats = in_cluster ? partial + S::kWidth : a.partial_stats(split, b, h, i);
        to_stats[0] = max, to_stats[1] = sum;
        if (in_cluster) to_stats[2] = to_stats[3] = 0;  // the cluster's blocks read a whole pack
      } else if (lane == 0) {
        a.lse[a.of_lse.offset(b, h, item.s.first_query + i)] = max + logf(sum);
      }
    }
    if (in_cluster) {
      cluster_arrive_wait();
      add_in_cluster<S>(a, item, own);
      cluster_arrive_wait();
    }
  }
}

// Splits the keys over the blocks of clusters, or returns false and does nothing. A cluster has as many blocks as it
// can while all clusters run at once, and each block has 128 keys or more.
template <typename S>
bool decode_in_clusters(Call& call, Attention<Half> a, int aligned) {
  constexpr int kMost = 16, kLeastKeys = 128;
  [[maybe_unused]] static FactOfGpu<kMost + 1> fact;
  const auto kernel = mma_decode<S, Attention<Half>>;
  const int64_t heads = a.batch * a.kv_heads;
  for (int blocks = kMost; blocks > 1; blocks /= 2) {
    const auto clusters = [&] {
      const Grid cluster = Grid(blocks).in_clusters(blocks);
      return is_compiled_for(90, kernel) ? clusters_at_once(kernel, cluster, S::kThreads, S::kBytes) : 0;
    };
    if (blocks * kLeastKeys > a.keys || fact.get(clusters, blocks) < heads) continue;
    a.splits = blocks;
    launch(call, kernel, Grid(heads * blocks).in_clusters(blocks), S::kThreads, S::kBytes, a, SplitOrder{1, blocks},
           heads * blocks, aligned);
    return true;
  }
  return false;
}

}  // namespace msops::flash_attention

#endif
