// A block sorts words, which hold a key above the number of an item of a tile, and finds the segments of items with one
// key. Items keep their order in a segment. All threads of the block call these functions, for the first `rounds` *
// kSortThreads words.
#pragma once

#include <cstdint>

#include "instructions.h"

namespace msops {

constexpr int kItemBits = 12;
constexpr int kTileItems = 1 << kItemBits;  // items of a tile
constexpr int kSortThreads = 512;
constexpr int kSortRounds = kTileItems / kSortThreads;  // words of a thread, at most

// Keys are below kSortedKeys; an item whose key is the limit of a sort, or above it, is in no segment.
constexpr int64_t kSortedKeys = (int64_t{1} << (32 - kItemBits)) - 1;

struct SharedOfSort {
  static constexpr int kWarps = kSortThreads / 32, kDigits = 16;
  uint32_t words[2][kTileItems];
  int counts[kDigits][kWarps];
  int heads[kWarps];
  int end;  // of the last segment
};

// Replaces counts, in the order of digits and then of warps, by the sums of those before. Warp 0 calls this.
__device__ inline void prefix_counts(SharedOfSort& shared) {
  constexpr int kEach = SharedOfSort::kDigits * SharedOfSort::kWarps / 32;
  int* const counts = &shared.counts[0][0] + threadIdx.x * kEach;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += counts[i];
  int before = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, before, distance);
    if (static_cast<int>(threadIdx.x) >= distance) before += other;
  }
  before -= sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int count = counts[i];
    counts[i] = before;
    before += count;
  }
}

// Sorts the words by four bits from `shift` on, and keeps the order of those that are equal there.
__device__ inline void sort_pass(SharedOfSort& shared, int from, int shift, int rounds) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < SharedOfSort::kDigits * SharedOfSort::kWarps) (&shared.counts[0][0])[threadIdx.x] = 0;
  __syncthreads();
  uint32_t words[kSortRounds];
  int places[kSortRounds];
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    if (r >= rounds) break;
    words[r] = shared.words[from][(warp * rounds + r) * 32 + lane];
    const unsigned digit = words[r] >> shift & 15;
    unsigned same = ~0u;
#pragma unroll
    for (int bit = 0; bit < 4; ++bit) {
      const unsigned ones = __ballot_sync(~0u, digit >> bit & 1);
      same &= digit >> bit & 1 ? ones : ~ones;
    }
    const int before = shared.counts[digit][warp];
    __syncwarp();
    places[r] = before + __popc(same & ((1u << lane) - 1));
    if (lane == __ffs(static_cast<int>(same)) - 1) shared.counts[digit][warp] = before + __popc(same);
    __syncwarp();
  }
  __syncthreads();
  if (warp == 0) prefix_counts(shared);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r)
    if (r < rounds) shared.words[1 - from][shared.counts[words[r] >> shift & 15][warp] + places[r]] = words[r];
  __syncthreads();
}

// Sorts the words by their keys, up to `limit`, and returns which of the two arrays has them then.
__device__ inline int sort_words(SharedOfSort& shared, int limit, int rounds) {
  int from = 0;
  for (int shift = kItemBits; shift < 32 && limit >> (shift - kItemBits) > 0; shift += 4) {
    sort_pass(shared, from, shift, rounds);
    from = 1 - from;
  }
  return from;
}

// Returns whether a segment begins at a place of the sorted words.
__device__ inline bool is_head(const uint32_t* words, int i, int limit) {
  const uint32_t key = words[i] >> kItemBits;
  return static_cast<int>(key) < limit && (i == 0 || words[i - 1] >> kItemBits != key);
}

// Calls f(i, head, segment) for each place i of the sorted words: whether a segment begins there, and the number of the
// segment that i is part of. Each warp takes the same places each time; `before` segments begin before these.
template <typename F>
__device__ void for_segments(const uint32_t* words, int limit, int rounds, int before, const F& f) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = 0; r < rounds; ++r) {
    const int i = (warp * rounds + r) * 32 + lane;
    const bool head = is_head(words, i, limit);
    const unsigned heads = __ballot_sync(~0u, head);
    f(i, head, before + __popc(heads & (~0u >> (31 - lane))) - 1);
    before += __popc(heads);
  }
}

// Writes where each segment of the sorted words begins to the other array, and returns how many there are. `before`
// becomes what for_segments takes.
__device__ inline int find_segments(SharedOfSort& shared, int last, int limit, int rounds, int& before) {
  const uint32_t* const words = shared.words[last];
  uint32_t* const begins = shared.words[1 - last];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int total = 0;
  for (int r = 0; r < rounds; ++r)
    total += __popc(__ballot_sync(~0u, is_head(words, (warp * rounds + r) * 32 + lane, limit)));
  if (lane == 0) shared.heads[warp] = total;
  __syncthreads();
  int segments = 0;
  before = 0;
  for (int w = 0; w < SharedOfSort::kWarps; ++w) {
    before += w < warp ? shared.heads[w] : 0;
    segments += shared.heads[w];
  }
  for_segments(words, limit, rounds, before, [&](int i, bool head, int segment) {
    if (head) begins[segment] = i;
    // The last segment ends where the keys below the limit do.
    const bool inside = static_cast<int>(words[i] >> kItemBits) < limit;
    if (inside && (i == rounds * kSortThreads - 1 || static_cast<int>(words[i + 1] >> kItemBits) >= limit))
      shared.end = i + 1;
  });
  __syncthreads();
  return segments;
}

// Returns how many items a segment has.
__device__ inline int segment_size(const SharedOfSort& shared, const uint32_t* begins, int segment, int segments) {
  return static_cast<int>(segment + 1 < segments ? begins[segment + 1] : shared.end) -
         static_cast<int>(begins[segment]);
}

}  // namespace msops
