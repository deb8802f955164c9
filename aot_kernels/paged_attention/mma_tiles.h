// The shapes of the kernels for tensor cores (see mma.h), and how their blocks load tiles of queries and keys.
#pragma once

#include "../common/gpu/divisor.h"
#include "../common/gpu/f16x2.h"
#include "../flash_attention/mma_decode.h"
#include "plan.h"

#ifdef __CUDACC__

namespace msops::paged {

namespace flash = flash_attention;

// kLatent is for values that are the first features of the keys, of up to 512: two warps share rows, each of which has
// half of the columns of values. Both compute all logits.
template <int kWidth_, bool kHasManyRows, bool kHasCodes, bool kLatent = false>
struct MmaShape {
  using Cached = std::conditional_t<kHasCodes, int8_t, Half>;
  static constexpr bool kIsLatent = kLatent;
  static constexpr int kWidth = kWidth_, kWarps = kLatent ? 8 : kWidth <= 128 ? 4 : 2, kThreads = 32 * kWarps;
  static constexpr int kTeam = kHasManyRows ? kWarps : 1, kTeams = kWarps / kTeam;  // a team's warps read the same keys
  static constexpr int kShares = kLatent ? 2 : 1, kValues = kLatent ? 256 : kWidth;  // of columns of values of a warp
  static constexpr int kRows = 16 * kTeam / kShares;
  static constexpr int kKeys = kLatent || (kWidth <= 64 && !kHasManyRows) ? 32 : 16 * kTeam;
  static constexpr int kRounds = (kKeys + 31) / 32;  // of a warp's lanes over the keys of a tile
  static constexpr int kStages = kHasCodes ? 4 : 2;
  static constexpr int kTile = kKeys * kWidth, kTiles = kLatent ? 1 : 2;  // elements of keys; tiles of keys and values
  static constexpr int kStageBytes = kTiles * kTile * static_cast<int>(sizeof(Cached));
  static constexpr int kTeamBytes = kStages * kStageBytes;
  static constexpr int kHalves = kHasCodes ? kTiles * kTile : 0;  // a team's tile of codes as float16
  static constexpr int kBytes = kTeams * (kTeamBytes + kHalves * 2) + kRows * kWidth * 2;
  static constexpr int kRowSums = kWidth + 4;  // of each row the sums, its maximum and its total
  static_assert(kTeams == 1 || kRows * kRowSums * 4 <= kTeamBytes, "a team's sums take the place of its stages");
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

  // Returns the row of a key of the tile, or -1.
  __device__ __forceinline__ int of_key(int key) const {
    int found = __shfl_sync(~0u, row[0], key % 32);
#pragma unroll
    for (int round = 1; round < S::kRounds; ++round) {
      const int other = __shfl_sync(~0u, row[round], key % 32);
      found = key / 32 == round ? other : found;
    }
    return found;
  }

  // Returns where a tile has an element.
  template <typename K>
  static __device__ __forceinline__ K* at(K* tile, int key, int column) {
    if constexpr (std::is_same<K, Half>::value) return flash::Tile<Half, S::kWidth>::at(tile, key, column);
    return tile + key * S::kWidth + column;
  }

  // Begins to copy a tile, whose rows are `stride` bytes apart and have `width` elements, a whole number of packs.
  template <typename K>
  __device__ __forceinline__ void copy(K* tile, const K* from, int stride, int width, int thread) const {
    constexpr int kPack = kPackWidth<K>, kPacks = S::kWidth / kPack, kThreads = 32 * S::kTeam;
    constexpr int kCount = S::kTile / kPack / kThreads;
    static_assert(S::kTile / kPack % kThreads == 0, "threads copy equal numbers of packs");
    const auto copy_pack = [&](K* to, int key, int column) {
      const int own = of_key(key);
      const K* const source = from + column;
      cp_async<16>(to, reinterpret_cast<const char*>(source) + int64_t{own} * stride, own >= 0 && column < width);
    };
    if constexpr (kThreads % kPacks == 0) {  // each thread has a column, and places of its rows differ in few bits
      constexpr int kApart = kThreads / kPacks;
      const int column = thread % kPacks * kPack, first = thread / kPacks;
      const int place = static_cast<int>(at(tile, first, column) - tile);
      constexpr int kTurn = std::is_same<K, Half>::value ? kPack : 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        copy_pack(tile + (place ^ i * kApart % 8 * kTurn) + i * kApart * S::kWidth, first + i * kApart, column);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int index = i * kThreads + thread, key = index / kPacks, column = index % kPacks * kPack;
        copy_pack(at(tile, key, column), key, column);
      }
    }
  }
};

// Turns a tile of codes into float16. With 1024 and 128 added, a code's bits are the low byte of a float16.
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
      constexpr uint32_t k1024 = 0x64646464, k1152 = 0x64806480;  // the high bytes of 1024, and 1152
      const uint32_t word = words[w] ^ 0x80808080;
      halves[w / 2].values[w % 2 * 2] = sub_f16x2(prmt<0x4140>(word, k1024), k1152);
      halves[w / 2].values[w % 2 * 2 + 1] = sub_f16x2(prmt<0x4342>(word, k1024), k1152);
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

}  // namespace msops::paged

#endif
