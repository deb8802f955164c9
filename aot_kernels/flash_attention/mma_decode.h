// The forward pass on tensor cores for few queries against many keys, for sm_80 and later. It is as fast as keys and
// values are read.
//
// The queries of all heads that read the same keys are rows of tiles of 16. A block takes a split of the keys. If there
// is one tile of rows, the block's warps take turns at tiles of keys: a warp copies its own keys and values by
// cp.async, some tiles ahead, so that warps wait for each other only at the end, when they add what each has summed. If
// there are more, each warp has its own rows, and all of them read the same keys.
#pragma once

#include "mma_terms.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

template <int kWidth_, bool kHasManyRows>
struct DecodeShape {
  static constexpr int kWidth = kWidth_, kWarps = kWidth <= 128 ? 4 : 2, kThreads = 32 * kWarps;
  static constexpr int kTeam = kHasManyRows ? kWarps : 1;  // warps that read the same keys
  // With larger tiles of short rows in fewer stages, three blocks share a multiprocessor of sm_90 in place of two.
  static constexpr int kRows = 16 * kTeam, kKeys = kWidth <= 64 && !kHasManyRows ? 32 : 16 * kTeam;
  static constexpr int kStages = kWidth > 64 ? 3 : kHasManyRows ? 6 : 2;
  static constexpr int kStage = 2 * kKeys * kWidth;                     // elements
  static constexpr bool kSharesQueries = kWidth > 128 || kHasManyRows;  // else each warp has them in registers
  static constexpr int kQueries = kSharesQueries ? kRows * kWidth : 0;
  static constexpr int kBytes = (kWarps / kTeam * kStages * kStage + kQueries) * 2;
  static_assert(kWarps * 16 * (kWidth + 2) * 4 <= kBytes, "the warps' sums take the stages' place");
};

// Loads two neighbouring elements of a row, from a column on; those beyond its width are 0.
__device__ __forceinline__ uint32_t load_pair(const Half* row, int column, int width) {
  const uint32_t first = column < width ? row[column].bits : 0, second = column + 1 < width ? row[column + 1].bits : 0;
  return first | second << 16;
}

// A is Attention<Half> or ExtendedAttention<Half>.
template <typename S, typename A>
__global__ void __launch_bounds__(S::kThreads)
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
      float* const partial = a.partial_sums(split, b, h, i);
      Half* const to = a.out + a.of_out.offset(b, h, item.s.first_query + i);
      for (int column = lane; column < value_width; column += 32) {
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
        float* const to_stats = a.partial_stats(split, b, h, i);
        to_stats[0] = max, to_stats[1] = sum;
      } else if (lane == 0) {
        a.lse[a.of_lse.offset(b, h, item.s.first_query + i)] = max + logf(sum);
      }
    }
  }
}

}  // namespace msops::flash_attention

#endif
