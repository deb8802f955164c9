// Paged attention of float16 on tensor cores, for sm_80 and later: rows of up to 256 features in whole packs of 16
// bytes, and caches of float16 or of codes; of up to 576 features where values are the first 512 of the keys or fewer.
//
// Sequences with up to 16 rows (see plan.h): a block's warps take turns at tiles of keys, which each of them copies for
// itself, some tiles ahead; they add what they have summed at the end. Other sequences: each warp has 16 rows of its
// own, and all of them read the same keys. A tile's entries of the block table are loaded one tile before its keys.
//
// Codes are copied as they are, and turned into float16, exactly, when their tile's turn comes. The scales of keys are
// factors of the queries, whose rows are scaled by powers of 2 so that they fit float16.
#pragma once

#include "mma_store.h"

#ifdef __CUDACC__

namespace msops::paged {

template <typename S, typename P>
__global__ void __launch_bounds__(S::kThreads) mma_paged(const P p, Plan plan, const Divisor block_size) {
  if (!has_instructions_of(80)) return;
  using T = flash::Tile<Half, S::kWidth>;
  using K = typename P::Cached;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint32_t valid_keys[S::kTeams][S::kStages][S::kRounds];
  __shared__ float factors[S::kRows], offsets[S::kRows];
  __shared__ int64_t own_plan[kFewSequences + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, value_width = static_cast<int>(p.value_width);
  const int team = warp / S::kTeam, part = warp % S::kTeam / S::kShares;  // `part` is which 16 of the rows it has
  const int first_value = warp % S::kShares * S::kValues;
  const int thread = threadIdx.x % (32 * S::kTeam);
  K* const stages = reinterpret_cast<K*>(shared + team * S::kTeamBytes);  // (kStages, 2, kKeys, kWidth)
  Half* const halves = reinterpret_cast<Half*>(shared + S::kTeams * S::kTeamBytes) + team * S::kHalves;
  Half* const q_tile = reinterpret_cast<Half*>(shared + S::kTeams * S::kTeamBytes) + S::kTeams * S::kHalves;
  const unsigned q_address = T::left(q_tile, 16 * part);
  const flash::Logits<Half> logits(p);
  const auto sync_team = [] { S::kTeam > 1 ? __syncthreads() : __syncwarp(); };
  if (plan.first == nullptr) {
    if (warp == 0) plan.count_few(p, own_plan);
    plan.first = own_plan;
    __syncthreads();
  }
  const int64_t count = plan.first[p.batch];

  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const Item item = Item::of(p, plan, number);
    const int begin = static_cast<int>(item.keys.begin), end = static_cast<int>(item.keys.end);
    const int tiles = begin < end ? (end - begin + S::kKeys - 1) / S::kKeys : 0;
    const auto first_key = [&](int t) { return begin + (t * S::kTeams + team) * S::kKeys; };
    const K *const keys = p.key(0, item.head), *const values = p.value(0, item.head);
    const auto stride_of = [&](int64_t width) { return static_cast<int>(p.kv_heads * width * sizeof(K)); };
    KeyRows<S> rows;
    const auto begin_copy = [&](int t) {
      if (t * S::kTeams + team >= tiles) return;
      K* const stage = stages + t % S::kStages * (S::kTiles * S::kTile);
      rows.copy(stage, keys, stride_of(p.width), static_cast<int>(p.width), thread);
      if (!S::kIsLatent) rows.copy(stage + S::kTile, values, stride_of(p.v_width), value_width, thread);
#pragma unroll
      for (int round = 0; round < S::kRounds; ++round) {
        const uint32_t valid = __ballot_sync(~0u, rows.row[round] >= 0);
        if (warp % S::kTeam == 0 && lane == 0) valid_keys[team][t % S::kStages][round] = valid;
      }
      rows.find(p, item, block_size, first_key(t + 1), end);
    };
    rows.find(p, item, block_size, first_key(0), end);
    __syncthreads();  // others may still read what is overwritten
    if constexpr (P::kHasCodes) load_scaled_queries<S>(q_tile, factors, offsets, p, item);
#pragma unroll 1
    for (int t = 0; t < S::kStages; ++t) {
      begin_copy(t);
      if (!P::kHasCodes && t == 0) load_queries<S>(q_tile, p, item);
      cp_async_commit();
    }

    const RowFacts facts(p, item, 16 * part);
    flash::OnlineSoftmax<1> softmax;
    float out[1][S::kValues / 8][4];
    flash::clear(out);
    cp_async_wait<S::kStages - 1>();
    __syncthreads();
    for (int t = 0; t * S::kTeams + team < tiles; ++t) {
      const int j0 = first_key(t);
      cp_async_wait<S::kStages - 1>();
      sync_team();
      const K* const stage = stages + t % S::kStages * (S::kTiles * S::kTile);
      const Half *k_tile = nullptr, *v_tile = nullptr;
      if constexpr (P::kHasCodes) {
        convert<S>(halves, stage, thread);
        convert<S>(halves + S::kTile, stage + S::kTile, thread);
        sync_team();
        k_tile = halves, v_tile = halves + S::kTile;
      } else {
        k_tile = stage, v_tile = S::kIsLatent ? stage : stage + S::kTile;
      }
      float x[1][S::kKeys / 8][4], shrink[1][2];
      uint32_t weights[1][S::kKeys / 16][4], valid[S::kRounds];
#pragma unroll
      for (int round = 0; round < S::kRounds; ++round) valid[round] = valid_keys[team][t % S::kStages][round];
      flash::clear(x);
#pragma unroll
      for (int step = 0; step < S::kWidth / 16; ++step) {
        uint32_t q[4];
        ldmatrix_x4(q, T::at(q_address, 16 * step));
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; n += 2) {
          uint32_t right[4];
          ldmatrix_x4(right, T::at(T::right(k_tile), 16 * step, 8 * n));
          mma_m16n8k16(x[0][n], q, {right[0], right[1]});
          mma_m16n8k16(x[0][n + 1], q, {right[2], right[3]});
        }
      }
      if constexpr (P::kHasCodes) {
        unrolled<S::kKeys / 8, 4>([&](int n, int i) {
          const int r = 16 * part + 8 * (i / 2) + lane / 4;
          x[0][n][i] = fmaf(x[0][n][i], factors[r], -offsets[r]);
        });
      }
      logits.apply(x);
      facts.finish(x, p, item, j0, valid);
      const float factor = logits.factor * kLog2E<float>;
      const bool grows = p.adds_to_logits() ? softmax.template advance<true>(x, shrink, factor)
                                            : softmax.template advance<false>(x, shrink, factor);
      if (grows) softmax.scale(out, shrink);
      flash::operand(weights, x);
      T::multiply(out, weights, T::at(T::transposed(v_tile), first_value), value_width - first_value);
      sync_team();
      begin_copy(t + S::kStages);
      cp_async_commit();
    }
    softmax.finish();
    cp_async_wait_all();

    if (number + gridDim.x >= count) griddepcontrol_launch_dependents();
    if constexpr (S::kTeams == 1)
      store_own_rows<S>(p, item, facts, softmax, out, first_value, logits.factor);
    else
      store_merged_rows<S>(p, item, softmax, out, reinterpret_cast<float*>(shared), logits.factor);
  }
}

constexpr int64_t kFewRows = 16;

// Returns the plan of the sequences with least_rows to most_rows rows.
template <typename S, typename P>
Plan mma_plan(const P& p, int64_t* first, int64_t least_rows, int64_t most_rows) {
  return {p.batch > kFewSequences ? first : nullptr, S::kRows, least_rows, most_rows, p.kv_heads, p.group, nullptr};
}

template <typename S, typename P>
bool has_mma() {
  return is_compiled_for(80, mma_paged<S, P>) && Gpu().dynamic_bytes() >= S::kBytes;
}

// Computes what is planned.
template <typename S, typename P>
void launch_mma(Call& call, const P& p, const Plan& plan) {
  [[maybe_unused]] static FactOfGpu<> fact;
  const auto kernel = mma_paged<S, P>;
  const int64_t at_once = fact.get([&] { return blocks_at_once(Gpu(), kernel, S::kThreads, S::kBytes); });
  const int64_t items = (parts_of(p.tokens * p.group, S::kRows) + p.batch) * p.kv_heads * p.parts;
  launch(call, kernel, least(most(1, at_once), items), S::kThreads, S::kBytes, p, plan, Divisor(p.block_size));
}

// Returns whether rows are whole packs, and numbers within the kernels have 32 bits.
template <typename P>
bool fits_tensor_cores(const P& p) {
  using K = typename P::Cached;
  constexpr int64_t kMost = 1 << 28, kPacks = kPackWidth<K>;
  return least(p.width, p.value_width) > 0 && p.width % kPacks == 0 && p.value_width % kPacks == 0 &&
         p.v_width % kPacks == 0 && is_aligned<kPacks>(p.k) && is_aligned<kPacks>(p.v) && is_aligned<8>(p.q) &&
         size_of({p.columns, p.block_size}) <= kMost && size_of({p.kv_heads, most(p.width, p.v_width)}) <= kMost &&
         size_of({p.blocks, p.block_size}) <= INT32_MAX && size_of({p.tokens, p.group}) <= kMost;
}

}  // namespace msops::paged

#endif
