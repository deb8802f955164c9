// The gradient of a gather adds up, for each point, the terms that were gathered from it. A list's terms are cut into
// tiles, and its points into ranges whose sums fit shared memory. sort_kernel finds, for each tile and range, the
// segments of terms that belong to one point. All channels share these.
#pragma once

#include "../common/parallel.h"
#include "gather.h"

namespace msops {

constexpr int kTerms = 4096;             // terms of a tile, at most
constexpr int64_t kRangePoints = 49152;  // points of a range, at most; their numbers have 16 bits
constexpr int kLongSegment = 16;         // terms; the lanes of a warp share the segments that have more
constexpr int kSortThreads = 512;

// Segment is a run of a tile's sorted terms that belong to one point.
struct alignas(8) Segment {
  uint16_t point;  // in the range
  uint16_t begin, count;
  uint16_t term;  // the first one
};

// TileRecord holds the terms of a tile that belong to a range, sorted by their points, in their original order.
struct TileRecord {
  Segment segments[kTerms];
  uint16_t terms[kTerms];
  uint16_t longs[kTerms / kLongSegment];  // the numbers of long segments, in any order
  int32_t segment_count, long_count;
};

// Tiles says how lists are cut. A tile has a whole number of places; eight times as many places are whole packs.
struct Tiles {
  int64_t places, tiles, ranges;  // places: of a tile

  Tiles(const Gather& all, int taps)
      : places(kTerms / taps / 8 * 8),
        tiles((all.places + places - 1) / places),
        ranges((all.points + kRangePoints - 1) / kRangePoints) {}

  MSOPS_BOTH int64_t record(int64_t list, int64_t tile, int64_t range) const {
    return (list * tiles + tile) * ranges + range;
  }
};

constexpr int64_t kRecordWords = sizeof(TileRecord) / 4;

// Returns how many int32 numbers of scratch the records need.
inline int64_t tile_words(const Gather& all, int taps) {
  const Tiles tiles(all, taps);
  return size_of({all.lists, tiles.tiles, tiles.ranges, kRecordWords}) + 2;  // 2: to align the records
}

#ifdef __CUDACC__
// The words that a block sorts: a term's point above the term's number in the tile.
struct SharedOfSort {
  static constexpr int kWarps = kSortThreads / 32, kDigits = 16;
  uint32_t words[2][kTerms];
  int counts[kDigits][kWarps];
  int heads[kWarps + 1];
  int longs;
};

constexpr int kTermBits = 12;
static_assert(1 << kTermBits == kTerms, "a term's number has kTermBits");

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
__device__ inline void sort_pass(SharedOfSort& shared, int from, int shift) {
  constexpr int kRounds = kTerms / kSortThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < SharedOfSort::kDigits * SharedOfSort::kWarps) (&shared.counts[0][0])[threadIdx.x] = 0;
  __syncthreads();
  uint32_t words[kRounds];
  int places[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    words[r] = shared.words[from][(warp * kRounds + r) * 32 + lane];
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
  for (int r = 0; r < kRounds; ++r)
    shared.words[1 - from][shared.counts[words[r] >> shift & 15][warp] + places[r]] = words[r];
  __syncthreads();
}

// Reads the indices of a tile's terms. A term that does not belong to the range gets the point `points`.
__device__ inline void read_terms(SharedOfSort& shared, const Indices& index, int64_t at, int terms, int first,
                                  int points) {
  for (int i = threadIdx.x; i < kTerms; i += kSortThreads) {
    const int point = i < terms ? index[at + i] - first : -1;
    const bool inside = 0 <= point && point < points;
    shared.words[0][i] = static_cast<uint32_t>(inside ? point : points) << kTermBits | i;
  }
  __syncthreads();
}

// Returns whether a segment begins at a place of the sorted words.
__device__ inline bool is_head(const uint32_t* words, int i, int points) {
  const uint32_t point = words[i] >> kTermBits;
  return static_cast<int>(point) < points && (i == 0 || words[i - 1] >> kTermBits != point);
}

// Writes the record from the sorted words.
__device__ inline void write_record(SharedOfSort& shared, int last, int points, TileRecord& record) {
  constexpr int kRounds = kTerms / kSortThreads;
  const uint32_t* const words = shared.words[last];
  uint32_t* const begins = shared.words[1 - last];  // where each segment begins
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int total = 0;
  for (int r = 0; r < kRounds; ++r)
    total += __popc(__ballot_sync(~0u, is_head(words, (warp * kRounds + r) * 32 + lane, points)));
  if (lane == 0) shared.heads[warp] = total;
  if (threadIdx.x == 0) shared.longs = 0;
  __syncthreads();
  int before = 0, segments = 0;
  for (int w = 0; w < SharedOfSort::kWarps; ++w) {
    before += w < warp ? shared.heads[w] : 0;
    segments += shared.heads[w];
  }
  for (int r = 0; r < kRounds; ++r) {
    const int i = (warp * kRounds + r) * 32 + lane;
    const bool head = is_head(words, i, points);
    const unsigned heads = __ballot_sync(~0u, head);
    if (head) begins[before + __popc(heads & ((1u << lane) - 1))] = i;
    before += __popc(heads);
    record.terms[i] = static_cast<uint16_t>(words[i] & (kTerms - 1));
    // The last segment ends where the terms of the range do.
    const bool inside = static_cast<int>(words[i] >> kTermBits) < points;
    if (inside && (i == kTerms - 1 || static_cast<int>(words[i + 1] >> kTermBits) >= points))
      shared.heads[SharedOfSort::kWarps] = i + 1;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < segments; s += kSortThreads) {
    const int begin = begins[s], end = s + 1 < segments ? begins[s + 1] : shared.heads[SharedOfSort::kWarps];
    record.segments[s] = {static_cast<uint16_t>(words[begin] >> kTermBits), static_cast<uint16_t>(begin),
                          static_cast<uint16_t>(end - begin), static_cast<uint16_t>(words[begin] & (kTerms - 1))};
    if (end - begin > kLongSegment) record.longs[atomicAdd(&shared.longs, 1)] = static_cast<uint16_t>(s);
  }
  __syncthreads();
  if (threadIdx.x == 0) record.segment_count = segments, record.long_count = shared.longs;
}

// A block sorts the terms of one tile and range.
template <int kTaps>
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(Gather all, Tiles tiles, Indices index, TileRecord* records) {
  __shared__ SharedOfSort shared;
  const int64_t range = blockIdx.x % tiles.ranges, item = blockIdx.x / tiles.ranges;
  const int64_t tile = item % tiles.tiles, list = item / tiles.tiles;
  const int64_t first = tile * tiles.places, left = all.places - first;
  const int terms = static_cast<int>(left < tiles.places ? left : tiles.places) * kTaps;
  const int64_t first_point = range * kRangePoints, points_left = all.points - first_point;
  const int points = static_cast<int>(points_left < kRangePoints ? points_left : kRangePoints);
  read_terms(shared, index, (list * all.places + first) * kTaps, terms, static_cast<int>(first_point), points);
  int from = 0;
  for (int shift = kTermBits; points >> (shift - kTermBits) > 0; shift += 4) {
    sort_pass(shared, from, shift);
    from = 1 - from;
  }
  write_record(shared, from, points, records[blockIdx.x]);
}

template <int kTaps>
void sort_tiles(Call& call, const Gather& all, const Tiles& tiles, Indices index, TileRecord* records) {
  const int64_t blocks = all.lists * tiles.tiles * tiles.ranges;
  call.require(blocks <= INT32_MAX, kBadShape, "too many indices for one launch");
  if (!call.ok() || blocks == 0) return;
  sort_kernel<kTaps><<<static_cast<unsigned>(blocks), kSortThreads, 0, call.stream()>>>(all, tiles, index, records);
  call.check_launch();
}
#endif

}  // namespace msops
