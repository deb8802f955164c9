// The forward pass on tensor cores for few queries against many keys, for sm_80 and later. It is as fast as keys and
// values are read.
//
// The queries of all heads that read the same keys are rows of tiles of 16. A block takes a split of the keys. If there
// is one tile of rows, the block's warps take turns at tiles of keys: a warp copies its own keys and values by
// cp.async, some tiles ahead, so that warps wait for each other only at the end, when they add what each has summed. If
// there are more, each warp has its own rows, and all of them read the same keys; this also takes rows that are not
// aligned, whose copies need code of their own.
//
// The splits of one tile of rows may be a cluster, whose blocks add what they have summed through shared memory. Else
// combine.h adds it.
//
// All blocks run at once where they can, so the memory is idle before they begin to copy and after they have read their
// last keys. What is computed there is short, in code as well: instructions come from memory, too.
#pragma once

#include "../common/gpu/cluster.h"
#include "../common/launch.h"
#include "mma_terms.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

template <int kWidth_, bool kHasManyRows>
struct DecodeShape {
  static constexpr int kWidth = kWidth_, kWarps = kWidth <= 128 ? 4 : 2, kThreads = 32 * kWarps;
  static constexpr bool kIsAligned = !kHasManyRows;  // whether it takes aligned rows of q, k and v alone
  static constexpr int kTeam = kHasManyRows ? kWarps : 1, kTeams = kWarps / kTeam;  // a team's warps read the same keys
  // With larger tiles of short rows in fewer stages, three blocks share a multiprocessor of sm_90 in place of two.
  static constexpr int kBlocks = kWidth <= 64 && !kHasManyRows ? 3 : 1;  // that have registers at once, at least
  static constexpr int kRows = 16 * kTeam, kKeys = kWidth <= 64 && !kHasManyRows ? 32 : 16 * kTeam;
  static constexpr int kStages = kWidth > 64 ? 3 : kHasManyRows ? 6 : 2;
  static constexpr int kStage = 2 * kKeys * kWidth;                      // elements
  static constexpr bool kKeepsQueries = kWidth <= 128 && !kHasManyRows;  // in registers
  static constexpr int kBytes = (kTeams * kStages * kStage + kRows * kWidth) * 2;
  // What a team has summed takes the place of its stages: of each row the sums, its maximum and its total. Two further
  // numbers only keep rows whole packs.
  static constexpr int kRowSums = kWidth + 4, kTeamSums = kStages * kStage / 2;
  static_assert((kRows + 16) * kRowSums <= kTeamSums, "a team's sums, and a block's, take the stages' place");
};

// Returns whether the shape for few rows takes a call, where `aligned` has the bits of AlignedRows.
template <typename A>
bool has_few_aligned_rows(const A& a, int aligned) {
  constexpr int kNeeded = kAlignedQ | kAlignedK | kAlignedV;
  return a.queries * a.group() <= 16 && (aligned & kNeeded) == kNeeded;
}

// RowSums are what has been summed of four columns of a row.
struct RowSums {
  float max = -INFINITY, sum = 0, total[4] = {};

  __device__ __forceinline__ void store_to(Half* out, int columns, float* lse) const {
    const float inverse = sum == 0 ? 0 : __fdividef(1, sum);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < columns) out[e] = Half(total[e] * inverse);
    if (lse) *lse = max + logf(sum);
  }
};

// Adds what `parts` parts have summed, in order. load(part, stats, sums) loads a part's maximum and total, and its
// sums.
template <int kAtOnce, typename Load>
__device__ __forceinline__ RowSums merged(int parts, const Load& load) {
  RowSums row;
#pragma unroll 1
  for (int part = 0; part < parts; part += kAtOnce) {
    Pack<float, 4> stats[kAtOnce] = {}, sums[kAtOnce] = {};
    float greatest = row.max;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      stats[j].values[0] = -INFINITY;
      if (part + j < parts) load(part + j, stats[j], sums[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) greatest = fmaxf(greatest, stats[j].values[0]);
    const float base = greatest == -INFINITY ? 0 : greatest;
    const float kept = ex2_approx_ftz((row.max - base) * kLog2E<float>);
    row.max = greatest, row.sum *= kept;
#pragma unroll
    for (int e = 0; e < 4; ++e) row.total[e] *= kept;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float share = ex2_approx_ftz((stats[j].values[0] - base) * kLog2E<float>);
      row.sum = fmaf(share, stats[j].values[1], row.sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) row.total[e] = fmaf(share, sums[j].values[e], row.total[e]);
    }
  }
  return row;
}

// Begins to copy the queries of an item to a tile of kRows. Rows beyond the item's, and what is beyond the rows' width,
// become 0.
template <typename S, typename A>
__device__ __forceinline__ void copy_queries(Half* tile, const A& a, const GroupItem& item, bool aligned) {
  using T = Tile<Half, S::kWidth>;
  const int width = static_cast<int>(a.width);
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kRows * T::kPacks; i += S::kThreads) {
    const int row = i / T::kPacks, column = i % T::kPacks * T::kPack;
    const int inside = item.has(row) ? width - column : 0;
    const Half* from = a.q;
    if (inside > 0) from += a.of_q.offset(item.b, item.head(row), item.s.first_query + item.query(row)) + column;
    if (aligned) {
      cp_async<16>(T::at(tile, row, column), from, inside > 0);
    } else {
      Pack<Half, T::kPack> values;
#pragma unroll
      for (int j = 0; j < T::kPack; ++j) values.values[j] = j < inside ? from[j] : Half{};
      store(T::at(tile, row, column), values);
    }
  }
}

// A is Attention<Half> or ExtendedAttention<Half>.
template <typename S, typename A>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    mma_decode(const A a, const SplitOrder order, [[maybe_unused]] int aligned) {
  if (!has_instructions_of(80)) return;
  using T = Tile<Half, S::kWidth>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, value_width = static_cast<int>(a.value_width);
  const int team = warp / S::kTeam, part = warp % S::kTeam;  // `part` is which 16 of the rows the warp has
  Half* const stages =
      reinterpret_cast<Half*>(shared) + team * (S::kStages * S::kStage);  // (kStages, 2, kKeys, kWidth)
  Half* const q_tile = reinterpret_cast<Half*>(shared) + S::kTeams * S::kStages * S::kStage;  // (kRows, kWidth)
  const SplitOrder::Place at = order.find(blockIdx.x);
  const GroupItem item = GroupItem::of<S::kRows, S::kKeys * S::kTeams>(a, order, at);
  if (item.empty()) return;
  const int b = item.b, queries = static_cast<int>(item.s.queries), begin = item.begin, end = item.end;

  const auto k = rows_of_k(a, item, a.width, aligned);
  const auto v = rows_of_v(a, item, a.value_width, aligned);
  const int tiles = (end - begin + S::kKeys - 1) / S::kKeys;
  const auto copy_rows = [&](Half* to, const HeadRows<const Half>& rows, int j0) {
    const int thread = threadIdx.x % (32 * S::kTeam);
    if constexpr (S::kIsAligned) {
      T::template load_aligned<S::kKeys, 32 * S::kTeam>(to, rows, j0, end, thread);
    } else {
      T::template load<S::kKeys, 32 * S::kTeam>(to, rows, j0, end, thread);
    }
  };
  const auto begin_copy = [&](int t) {
    if (t * S::kTeams + team < tiles) {
      const int j0 = begin + (t * S::kTeams + team) * S::kKeys;
      Half* const stage = stages + t % S::kStages * S::kStage;
      copy_rows(stage, k, j0);
      copy_rows(stage + S::kKeys * S::kWidth, v, j0);
    }
  };
#pragma unroll 1
  for (int t = 0; t < S::kStages; ++t) {
    begin_copy(t);
    if (t == 0) copy_queries<S>(q_tile, a, item, S::kIsAligned || aligned & kAlignedQ);
    cp_async_commit();
  }

  const Logits logits(a);
  const Seen<Half> seen(a, item.s, b, 0, end);
  const Terms<A> terms(a, seen);
  const auto sync_team = [] { S::kTeam > 1 ? __syncthreads() : __syncwarp(); };
  const auto query_of_row = [&](int, int half) {
    const int row = 16 * part + 8 * half + lane / 4;
    return item.has(row) ? QueryOfRow{item.head(row), item.query(row)} : QueryOfRow{0, queries};
  };
  OnlineSoftmax<1> softmax;
  float out[1][S::kWidth / 8][4];
  clear(out);
  uint32_t q[S::kWidth / 16][4];
  const unsigned q_address = T::left(q_tile, 16 * part);
  cp_async_wait<S::kStages - 1>();
  __syncthreads();
  if (S::kKeepsQueries) unrolled<S::kWidth / 16>([&](int step) { ldmatrix_x4(q[step], T::at(q_address, 16 * step)); });
  for (int t = 0; t * S::kTeams + team < tiles; ++t) {
    const int j0 = begin + (t * S::kTeams + team) * S::kKeys;
    const Half* const stage = stages + t % S::kStages * S::kStage;
    cp_async_wait<S::kStages - 1>();
    sync_team();
    float x[1][S::kKeys / 8][4], shrink[1][2];
    uint32_t p[1][S::kKeys / 16][4];
    clear(x);
#pragma unroll
    for (int step = 0; step < S::kWidth / 16; ++step) {
      if (!S::kKeepsQueries) ldmatrix_x4(q[step], T::at(q_address, 16 * step));
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
    if (softmax.template advance<A::kIsExtended>(x, shrink, logits.factor * kLog2E<float>)) softmax.scale(out, shrink);
    terms.drop(x, j0, query_of_row);
    operand(p, x);
    T::multiply(out, p, T::transposed(stage + S::kKeys * S::kWidth), value_width);
    sync_team();
    begin_copy(t + S::kStages);
    cp_async_commit();
  }
  softmax.finish();

  // Each warp writes what it has summed of its rows.
  float* const all_sums = reinterpret_cast<float*>(shared);  // (kTeams, kTeamSums), of which (kRows, kRowSums) count
  float* const own = all_sums + S::kRows * S::kRowSums;      // (16, kRowSums): the block's, for the cluster
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * part + 8 * half + lane / 4;
    if (!item.has(row)) continue;
    float* const to = all_sums + team * S::kTeamSums + row * S::kRowSums;
#pragma unroll
    for (int n = 0; n < S::kWidth / 8; ++n)
      store(to + 8 * n + lane % 4 * 2,
            Pack<float, 2>{out[0][n][2 * half] * kept_of(a), out[0][n][2 * half + 1] * kept_of(a)});
    if (lane % 4 == 0)
      store(to + S::kWidth, Pack<float, 4>{softmax.max[0][half] * logits.factor, softmax.sum[0][half], 0, 0});
  }
  __syncthreads();

  // A thread adds what the teams have summed of four columns of a row, and then what the cluster's blocks have.
  constexpr int kQuads = S::kWidth / 4;
  const auto results = [&](int row, int first, const RowSums& sums) {
    const int h = item.head(row), i = item.s.first_query + item.query(row);
    sums.store_to(a.out + a.of_out.offset(b, h, i) + first, value_width - first,
                  first == 0 ? a.lse + a.of_lse.offset(b, h, i) : nullptr);
  };
  const int blocks = S::kTeam == 1 ? static_cast<int>(cluster_nctarank()) : 1;
  for (int place = threadIdx.x; place < S::kRows * kQuads; place += S::kThreads) {
    const int row = place / kQuads, first = place % kQuads * 4;
    if (!item.has(row)) break;
    if (first >= value_width) continue;
    const RowSums sums = merged<S::kTeams>(S::kTeams, [&](int of_team, Pack<float, 4>& stats, Pack<float, 4>& columns) {
      const float* const from = all_sums + of_team * S::kTeamSums + row * S::kRowSums;
      stats = load<4>(from + S::kWidth), columns = load<4>(from + first);
    });
    if (blocks > 1) {
      float* const to = own + row * S::kRowSums;
      store(to + first, Pack<float, 4>{sums.total[0], sums.total[1], sums.total[2], sums.total[3]});
      if (first == 0) store(to + S::kWidth, Pack<float, 4>{sums.max, sums.sum, 0, 0});
    } else if (a.splits > 1) {
      const int h = item.head(row), i = item.query(row);
      float *const to = a.partial_sums(at.split, b, h, i) + first, *const stats = a.partial_stats(at.split, b, h, i);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (first + e < value_width) to[e] = sums.total[e];
      if (first == 0) stats[0] = sums.max, stats[1] = sums.sum;
    } else {
      results(row, first, sums);
    }
  }
  if (blocks == 1) return;
  cluster_arrive_wait();
  for (int place = cluster_ctarank() * S::kThreads + threadIdx.x; place < 16 * kQuads; place += blocks * S::kThreads) {
    const int row = place / kQuads, first = place % kQuads * 4;
    if (!item.has(row)) break;
    if (first >= value_width) continue;
    results(row, first, merged<8>(blocks, [&](int block, Pack<float, 4>& stats, Pack<float, 4>& columns) {
              const float* const from = own + row * S::kRowSums;
              stats = ld_shared_cluster(from + S::kWidth, block), columns = ld_shared_cluster(from + first, block);
            }));
  }
  cluster_arrive_wait();
}

// Computes `out` and `lse`, or what splits have summed, or returns false and does nothing.
template <typename S, typename A>
bool launch_decode(Call& call, const A& a, int aligned) {
  constexpr int64_t kMostSplits = 256;  // so that the parts of all keys times a split are a number of 32 bits
  const int64_t blocks = a.batch * a.kv_heads * a.splits * parts_of(a.queries * a.group(), S::kRows);
  if (a.splits > kMostSplits || blocks > INT32_MAX) return false;
  return launch_on_tensor_cores<S>(call, mma_decode<S, A>, blocks, a, SplitOrder::of(a, S::kRows), aligned);
}

// Splits the keys over the blocks of clusters, or returns false and does nothing. A cluster has as many blocks as it
// can while all clusters run at once, and each block has 128 keys or more, or 64 long ones.
template <typename S>
bool decode_in_clusters(Call& call, Attention<Half> a, int aligned) {
  constexpr int kMost = 16, kLeastKeys = S::kWidth > 128 ? 64 : 128;
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
    launch(call, kernel, Grid(heads * blocks).in_clusters(blocks), S::kThreads, S::kBytes, a,
           SplitOrder::of(a, S::kRows), aligned);
    return true;
  }
  return false;
}

}  // namespace msops::flash_attention

#endif
