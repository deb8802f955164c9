// Paged attention of float16 on tensor cores, for sm_80 and later: rows of up to 256 features in whole packs of 16
// bytes, and caches of float16 or of codes.
//
// Sequences with up to 16 rows (see plan.h): a block's warps take turns at tiles of keys, which each of them copies for
// itself, some tiles ahead; they add what they have summed at the end. Other sequences: each warp has 16 rows of its
// own, and all of them read the same keys. A tile's entries of the block table are loaded one tile before its keys.
//
// Codes are copied as they are, and turned into float16, exactly, when their tile's turn comes. The scales of keys are
// factors of the queries, whose rows are scaled by powers of 2 so that they fit float16.
#pragma once

#include "../common/gpu/divisor.h"
#include "../flash_attention/mma_decode.h"
#include "plan.h"

#ifdef __CUDACC__

namespace msops::paged {

namespace flash = flash_attention;

template <int kWidth_, bool kHasManyRows, bool kHasCodes>
struct MmaShape {
  using Cached = std::conditional_t<kHasCodes, int8_t, Half>;
  static constexpr int kWidth = kWidth_, kWarps = kWidth <= 128 ? 4 : 2, kThreads = 32 * kWarps;
  static constexpr int kTeam = kHasManyRows ? kWarps : 1, kTeams = kWarps / kTeam;  // a team's warps read the same keys
  static constexpr int kRows = 16 * kTeam, kKeys = kWidth <= 64 && !kHasManyRows ? 32 : 16 * kTeam;
  static constexpr int kRounds = (kKeys + 31) / 32;  // of a warp's lanes over the keys of a tile
  static constexpr int kStages = kHasCodes ? 4 : kHasManyRows ? 2 : 3;
  static constexpr int kTile = kKeys * kWidth;  // elements of keys, or of values
  static constexpr int kStageBytes = 2 * kTile * static_cast<int>(sizeof(Cached));
  static constexpr int kTeamBytes = kStages * kStageBytes;
  static constexpr int kHalves = kHasCodes ? 2 * kTile : 0;  // a team's tile of codes as float16
  static constexpr int kBytes = kTeams * (kTeamBytes + kHalves * 2) + kRows * kWidth * 2;
  static constexpr int kRowSums = kWidth + 4;  // of each row the sums, its maximum and its total
  static_assert(kRows * kRowSums * 4 <= kTeamBytes, "a team's sums take the place of its stages");
};

// RowFacts are what a thread knows of the two rows whose sums it has: which keys they see.
struct RowFacts {
  int64_t head[2];
  int token[2], begin[2], end[2];  // token -1: there is no such row
  int all_begin, all_end;          // keys that all rows of the warp see

  template <typename P>
  __device__ RowFacts(const P& p, const Item& item, int first) {
    all_begin = 0, all_end = INT32_MAX;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + 8 * half + threadIdx.x % 32 / 4;
      token[half] = -1, head[half] = 0, begin[half] = 0, end[half] = 0;
      if (!item.has(r)) continue;
      token[half] = static_cast<int>(item.token_of(r)), head[half] = item.head_of(p, r);
      const Span seen = p.keys_of_token(item.s, token[half]);
      begin[half] = static_cast<int>(least(seen.begin, INT32_MAX)), end[half] = static_cast<int>(most(0, seen.end));
      all_begin = std::max(all_begin, begin[half]), all_end = std::min(all_end, end[half]);
    }
    for (int apart = 4; apart < 32; apart *= 2) {
      all_begin = std::max(all_begin, __shfl_xor_sync(~0u, all_begin, apart));
      all_end = std::min(all_end, __shfl_xor_sync(~0u, all_end, apart));
    }
  }

  // Hides keys that rows do not see, or that have no row in the caches, and adds what is added to logits.
  template <typename P, int kN>
  __device__ __forceinline__ void finish(float (&x)[1][kN][4], const P& p, const Item& item, int j0,
                                         const uint32_t (&valid)[(kN + 3) / 4]) const {
    constexpr int kKeys = 8 * kN;
    const uint32_t whole = kKeys < 32 ? (1u << kKeys % 32) - 1 : ~0u;
    bool is_inside = all_begin <= j0 && j0 + kKeys <= all_end && !p.has_terms();
#pragma unroll
    for (int round = 0; round < (kN + 3) / 4; ++round) is_inside &= valid[round] == whole;
    if (is_inside) return;
    unrolled<kN, 4>([&](int n, int i) {
      const int key = 8 * n + threadIdx.x % 4 * 2 + i % 2, half = i / 2, j = j0 + key;
      const bool is_seen = valid[key / 32] >> key % 32 & 1 && begin[half] <= j && j < end[half];
      float& of_key = x[0][n][i];
      if (!is_seen || token[half] < 0)
        of_key = -INFINITY;
      else if (p.has_terms())
        of_key = p.logit(of_key, item.s, item.b, head[half], token[half], j);
    });
  }
};

// KeyRows finds the rows of the caches that the keys of a warp's tiles have: lane `lane` those of keys lane + 32 n.
template <typename S>
struct KeyRows {
  int row[S::kRounds];

  template <typename P>
  __device__ __forceinline__ void find(const P& p, const Item& item, const Divisor& block_size, int j0, int end) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int round = 0; round < S::kRounds; ++round) {
      const int j = j0 + 32 * round + lane;
      row[round] = -1;
      if (j >= end || (S::kKeys < 32 && lane >= S::kKeys)) continue;
      int rest;
      const int column = block_size.divide(j, &rest), block = p.block_tables[item.b * p.columns + column];
      if (0 <= block && block < p.blocks) row[round] = block * block_size.value() + rest;
    }
  }

  // Begins to copy a tile, whose rows have `width` elements, a whole number of packs.
  template <typename K>
  __device__ __forceinline__ void copy(K* tile, const K* from, int64_t stride, int width, int thread) const {
    constexpr int kPack = kPackWidth<K>, kPacks = S::kWidth / kPack, kThreads = 32 * S::kTeam;
    static_assert(S::kTile / kPack % kThreads == 0, "threads copy equal numbers of packs");
#pragma unroll
    for (int i = 0; i < S::kTile / kPack / kThreads; ++i) {
      const int index = i * kThreads + thread, key = index / kPacks, column = index % kPacks * kPack;
      int of_key = __shfl_sync(~0u, row[0], key % 32);
#pragma unroll
      for (int round = 1; round < S::kRounds; ++round) {
        const int other = __shfl_sync(~0u, row[round], key % 32);
        of_key = key / 32 == round ? other : of_key;
      }
      K* to = tile + key * S::kWidth + column;
      if constexpr (std::is_same<K, Half>::value) to = flash::Tile<Half, S::kWidth>::at(tile, key, column);
      const bool inside = of_key >= 0 && column < width;
      cp_async<16>(to, inside ? from + of_key * stride + column : from, inside);
    }
  }
};

// Turns a tile of codes into float16. With 2^23 and 128 added, a code's bits are those of the last byte of a float.
template <typename S>
__device__ __forceinline__ void convert(Half* to, const int8_t* codes, int thread) {
  constexpr int kPacks = S::kWidth / 16, kThreads = 32 * S::kTeam;
#pragma unroll 2
  for (int index = thread; index < S::kKeys * kPacks; index += kThreads) {
    const int key = index / kPacks, column = index % kPacks * 16;
    uint32_t words[4];
    memcpy(words, __builtin_assume_aligned(codes + key * S::kWidth + column, 16), 16);
    Pack<uint32_t, 4> halves[2];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t word = words[w] ^ 0x80808080;
      float numbers[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) numbers[k] = __uint_as_float(0x4b000000 | (word >> 8 * k & 0xff)) - 8388736.0f;
      halves[w / 2].values[w % 2 * 2] = flash::pair_of(numbers[0], numbers[1]);
      halves[w / 2].values[w % 2 * 2 + 1] = flash::pair_of(numbers[2], numbers[3]);
    }
    using T = flash::Tile<Half, S::kWidth>;
    store(reinterpret_cast<uint32_t*>(T::at(to, key, column)), halves[0]);
    store(reinterpret_cast<uint32_t*>(T::at(to, key, column + 8)), halves[1]);
  }
}

// Loads the queries of an item to a tile of kRows. Rows beyond the item's, and what is beyond the rows' width, become
// 0.
template <typename S, typename P>
__device__ __forceinline__ void load_queries(Half* tile, const P& p, const Item& item) {
  using T = flash::Tile<Half, S::kWidth>;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kRows * T::kPacks; i += S::kThreads) {
    const int r = i / T::kPacks, column = i % T::kPacks * T::kPack;
    const bool inside = item.has(r) && column < p.width;
    const Half* from = p.q;
    if (inside) from = p.query(item.s.first + item.token_of(r), item.head_of(p, r)) + column;
    cp_async<16>(T::at(tile, r, column), from, inside);
  }
}

// Does the same for caches of codes: row r of the tile has q times the scales of keys, over factor[r], a power of 2.
// offset[r] is their product with the zeros, times the factor.
template <typename S, typename P>
__device__ __forceinline__ void load_scaled_queries(Half* tile, float* factor, float* offset, const P& p,
                                                    const Item& item) {
  using T = flash::Tile<Half, S::kWidth>;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < S::kRows; r += S::kWarps) {
    float value[S::kWidth / 32], largest = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < S::kWidth / 32; ++k) {
      const int d = 32 * k + lane;
      value[k] = 0;
      if (item.has(r) && d < p.width)
        value[k] = float(p.query(item.s.first + item.token_of(r), item.head_of(p, r))[d]) * p.of_k.scale(item.head, d);
      largest = fmaxf(largest, fabsf(value[k]));
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
    const bool is_normal = 1e-30f < largest && largest < 1e30f;
    const float power = is_normal ? __uint_as_float(__float_as_uint(largest) & 0x7f800000) : 1;
#pragma unroll
    for (int k = 0; k < S::kWidth / 32; ++k) {
      const int d = 32 * k + lane;
      const Half rounded = Half(value[k] / power);
      *T::at(tile, r, d) = rounded;
      if (d < p.width) sum += float(rounded) * p.of_k.zero(item.head, d);
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (lane == 0) factor[r] = power, offset[r] = sum * power;
  }
}

template <typename S, typename P>
__global__ void __launch_bounds__(S::kThreads) mma_paged(const P p, const Plan plan, const Divisor block_size) {
  if (!has_instructions_of(80)) return;
  using T = flash::Tile<Half, S::kWidth>;
  using K = typename P::Cached;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint32_t valid_keys[S::kTeams][S::kStages][S::kRounds];
  __shared__ float factors[S::kRows], offsets[S::kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, value_width = static_cast<int>(p.value_width);
  const int team = warp / S::kTeam, part = warp % S::kTeam;  // `part` is which 16 of the rows the warp has
  const int thread = threadIdx.x % (32 * S::kTeam);
  K* const stages = reinterpret_cast<K*>(shared + team * S::kTeamBytes);  // (kStages, 2, kKeys, kWidth)
  Half* const halves = reinterpret_cast<Half*>(shared + S::kTeams * S::kTeamBytes) + team * S::kHalves;
  Half* const q_tile = reinterpret_cast<Half*>(shared + S::kTeams * S::kTeamBytes) + S::kTeams * S::kHalves;
  const unsigned q_address = T::left(q_tile, 16 * part);
  const flash::Logits<Half> logits(p);
  const auto sync_team = [] { S::kTeam > 1 ? __syncthreads() : __syncwarp(); };
  const int64_t count = plan.first[p.batch];

  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const Item item = Item::of(p, plan, number);
    const int begin = static_cast<int>(item.keys.begin), end = static_cast<int>(item.keys.end);
    const int tiles = begin < end ? (end - begin + S::kKeys - 1) / S::kKeys : 0;
    const auto first_key = [&](int t) { return begin + (t * S::kTeams + team) * S::kKeys; };
    const K *const keys = p.key(0, item.head), *const values = p.value(0, item.head);
    KeyRows<S> rows;
    const auto begin_copy = [&](int t) {
      if (t * S::kTeams + team >= tiles) return;
      K* const stage = stages + t % S::kStages * (2 * S::kTile);
      rows.copy(stage, keys, p.kv_heads * p.width, static_cast<int>(p.width), thread);
      rows.copy(stage + S::kTile, values, p.kv_heads * p.v_width, value_width, thread);
#pragma unroll
      for (int round = 0; round < S::kRounds; ++round) {
        const uint32_t valid = __ballot_sync(~0u, rows.row[round] >= 0);
        if (part == 0 && lane == 0) valid_keys[team][t % S::kStages][round] = valid;
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
    float out[1][S::kWidth / 8][4];
    flash::clear(out);
    cp_async_wait<S::kStages - 1>();
    __syncthreads();
    for (int t = 0; t * S::kTeams + team < tiles; ++t) {
      const int j0 = first_key(t);
      cp_async_wait<S::kStages - 1>();
      sync_team();
      const K* const stage = stages + t % S::kStages * (2 * S::kTile);
      const Half *k_tile = nullptr, *v_tile = nullptr;
      if constexpr (P::kHasCodes) {
        convert<S>(halves, stage, thread);
        convert<S>(halves + S::kTile, stage + S::kTile, thread);
        sync_team();
        k_tile = halves, v_tile = halves + S::kTile;
      } else {
        k_tile = stage, v_tile = stage + S::kTile;
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
      T::multiply(out, weights, T::transposed(v_tile), value_width);
      sync_team();
      begin_copy(t + S::kStages);
      cp_async_commit();
    }
    softmax.finish();
    cp_async_wait_all();

    // Each warp writes what it has summed of its rows, in place of its stages.
    float* const sums_of_teams = reinterpret_cast<float*>(shared);
    constexpr int kTeamSums = S::kTeamBytes / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * part + 8 * half + lane / 4;
      if (!item.has(row)) continue;
      float* const to = sums_of_teams + team * kTeamSums + row * S::kRowSums;
#pragma unroll
      for (int n = 0; n < S::kWidth / 8; ++n)
        store(to + 8 * n + lane % 4 * 2, Pack<float, 2>{out[0][n][2 * half], out[0][n][2 * half + 1]});
      if (lane % 4 == 0)
        store(to + S::kWidth, Pack<float, 4>{softmax.max[0][half] * logits.factor, softmax.sum[0][half], 0, 0});
    }
    __syncthreads();

    // A thread adds what the teams have summed of four columns of a row.
    constexpr int kQuads = S::kWidth / 4;
    const bool is_whole = p.parts_of_sequence(item.s) == 1;
    for (int place = threadIdx.x; place < S::kRows * kQuads; place += S::kThreads) {
      const int row = place / kQuads, first = place % kQuads * 4;
      if (!item.has(row)) break;
      if (first >= value_width) continue;
      flash::RowSums sums =
          flash::merged<S::kTeams>(S::kTeams, [&](int of_team, Pack<float, 4>& stats, Pack<float, 4>& columns) {
            const float* const from = sums_of_teams + of_team * kTeamSums + row * S::kRowSums;
            stats = load<4>(from + S::kWidth), columns = load<4>(from + first);
          });
      const int64_t i = item.token_of(row), head = item.head_of(p, row), token = item.s.first + i;
      if constexpr (P::kHasCodes) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sums.total[e] =
              (sums.total[e] - sums.sum * p.of_v.zero(item.head, first + e)) * p.of_v.scale(item.head, first + e);
      }
      if (is_whole) {
        sums.store_to(p.out + (token * p.heads + head) * value_width + first, value_width - first,
                      first == 0 ? p.lse + head * p.tokens + token : nullptr);
        continue;
      }
      float* const to = p.partial_sums(item.part, item.s, item.b, i, head) + first;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (first + e < value_width) to[e] = sums.total[e];
      if (first == 0) {
        float* const stats = p.partial_stats(item.part, item.s, item.b, i, head);
        stats[0] = sums.max, stats[1] = sums.sum;
      }
    }
  }
}

constexpr int64_t kFewRows = 16;

// Computes what sequences with least_rows to most_rows rows have.
template <typename S, typename P>
bool launch_mma(Call& call, const P& p, int64_t* first, int64_t least_rows, int64_t most_rows) {
  [[maybe_unused]] static FactOfGpu<> fact;
  const auto kernel = mma_paged<S, P>;
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < S::kBytes) return false;
  const Plan plan{first, S::kRows, least_rows, most_rows};
  launch(call, plan_kernel<P>, 1, kPlanThreads, 0, p, plan);
  const int64_t at_once = fact.get([&] { return blocks_at_once(Gpu(), kernel, S::kThreads, S::kBytes); });
  const int64_t items = (parts_of(p.tokens * p.group, S::kRows) + p.batch) * p.kv_heads * p.parts;
  launch(call, kernel, least(most(1, at_once), items), S::kThreads, S::kBytes, p, plan, Divisor(p.block_size));
  return true;
}

// Computes out and lse, or what parts of keys have summed, or returns false and does nothing. `first` is scratch of two
// plans. Which kernel computes a sequence depends on its number of tokens alone.
template <typename P>
bool launch_on_tensor_cores(Call& call, const P& p, int64_t* first) {
  using K = typename P::Cached;
  constexpr int64_t kMost = 1 << 28;
  const int64_t width = most(p.width, p.value_width), packs = kPackWidth<K>;
  if (width > 256 || least(p.width, p.value_width) < 1 || p.width % packs || p.value_width % packs || p.v_width % packs)
    return false;
  if (!is_aligned<kPackWidth<K>>(p.k) || !is_aligned<kPackWidth<K>>(p.v) || !is_aligned<8>(p.q)) return false;
  if (size_of({p.columns, p.block_size}) > kMost || size_of({p.blocks, p.block_size}) > INT32_MAX ||
      size_of({p.tokens, p.group}) > kMost)
    return false;
  const auto with_width = [&](auto constant) {
    constexpr int kWidth = decltype(constant)::value;
    using Few = MmaShape<kWidth, false, P::kHasCodes>;
    using Many = MmaShape<kWidth, true, P::kHasCodes>;
    const bool has_few = p.group <= kFewRows, has_many = p.has_starts || !has_few;
    if (Gpu().dynamic_bytes() < std::max(Few::kBytes, Many::kBytes)) return false;
    if (has_few && !launch_mma<Few>(call, p, first, 1, kFewRows)) return false;
    return !has_many || launch_mma<Many>(call, p, first + p.batch + 1, has_few ? kFewRows + 1 : 1, INT64_MAX);
  };
  if (width <= 64) return with_width(Constant<64>{});
  if (width <= 128) return with_width(Constant<128>{});
  return with_width(Constant<256>{});
}

}  // namespace msops::paged

#endif
