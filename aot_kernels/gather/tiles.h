// The gradient of a gather adds up, for each point, the terms that were gathered from it. A list's terms are cut into
// tiles, and its points into ranges whose sums fit shared memory. sort_kernel finds, for each tile and range, the
// segments of terms that belong to one point. All channels share these.
#pragma once

#include "../common/parallel.h"
#include "gather.h"

namespace msops {

constexpr int kTermBits = 12;
constexpr int kTerms = 1 << kTermBits;   // terms of a tile, at most
constexpr int64_t kRangePoints = 40960;  // points of a range, at most; their numbers have 16 bits
constexpr int kLongSegment = 17;         // terms; the lanes of a warp share the segments that have more
constexpr int kSortThreads = 512;

// LongSegment has more than kLongSegment terms, from a position of the record's list of terms on.
struct LongSegment {
  uint16_t point, begin, count, unused;
};

// TileRecord holds the segments of a tile's terms that belong to a range. `body` has the long segments; then a word for
// each term that is the only one of its point, in their order: the point, in the upper half, and the term; then a word
// for each other segment, with the begin of its terms and its length less 2 in the lower half; then the terms of all
// segments but the single ones, of 16 bits: a segment's in their order.
struct alignas(16) TileRecord {
  int32_t longs, singles, others, packs;  // packs: of 16 bytes, in the body
  uint32_t body[kTerms];
};

// Tiles says how lists are cut. A tile has a whole number of places; eight times as many places are whole packs.
struct Tiles {
  int64_t places, tiles, ranges, points;  // places: of a tile; points: of a range

  Tiles(const Gather& all, int taps)
      : places(kTerms / taps / 8 * 8),
        tiles((all.places + places - 1) / places),
        ranges(std::max<int64_t>(1, (all.points + kRangePoints - 1) / kRangePoints)),
        points((all.points + ranges - 1) / ranges) {}

  MSOPS_BOTH int64_t record(int64_t list, int64_t tile, int64_t range) const {
    return (list * tiles + tile) * ranges + range;
  }
};

constexpr int64_t kRecordWords = sizeof(TileRecord) / 4;

// Returns how many int32 numbers of scratch the records need.
inline int64_t tile_words(const Gather& all, int taps) {
  const int64_t ranges = (all.points + kRangePoints - 1) / kRangePoints;
  return size_of({all.lists, Tiles(all, taps).tiles, ranges, kRecordWords}) + 4;  // 4: to align the records
}

#ifdef __CUDACC__
// The words that a block sorts: a term's point above the term's number in the tile.
struct SharedOfSort {
  static constexpr int kWarps = kSortThreads / 32, kDigits = 16;
  uint32_t words[2][kTerms];
  uint16_t point_of[kTerms];  // of each term that is the only one of its point
  int counts[kDigits][kWarps];
  int heads[kWarps + 1];
  int longs, singles, others, terms;  // the numbers of segments, and of the terms that a record lists
};
constexpr uint16_t kNoPoint = 0xffff;

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

// Adds the numbers of a warp's lanes to a counter in shared memory, and returns where this lane's part begins.
__device__ inline int take_places(int* counter, int number) {
  const int lane = threadIdx.x % 32;
  int end = number, first = 0;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, end, distance);
    if (lane >= distance) end += other;
  }
  if (lane == 31) first = atomicAdd(counter, end);
  return __shfl_sync(~0u, first, 31) + end - number;
}

// Calls f(i, head, segment) for each place i of the sorted words: whether a segment begins there, and the number of the
// segment that i is part of. Each warp takes the same places each time; `before` segments begin before these.
template <typename F>
__device__ void for_segments(const uint32_t* words, int points, int before, const F& f) {
  constexpr int kRounds = kTerms / kSortThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = 0; r < kRounds; ++r) {
    const int i = (warp * kRounds + r) * 32 + lane;
    const bool head = is_head(words, i, points);
    const unsigned heads = __ballot_sync(~0u, head);
    f(i, head, before + __popc(heads & (~0u >> (31 - lane))) - 1);
    before += __popc(heads);
  }
}

// Writes the record from the sorted words. The order of a record's longer segments depends on the run; sums do not.
__device__ inline void write_record(SharedOfSort& shared, int last, int points, TileRecord& record) {
  constexpr int kRounds = kTerms / kSortThreads;
  const uint32_t* const words = shared.words[last];
  uint32_t* const begins = shared.words[1 - last];  // where each segment begins
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int total = 0;
  for (int r = 0; r < kRounds; ++r)
    total += __popc(__ballot_sync(~0u, is_head(words, (warp * kRounds + r) * 32 + lane, points)));
  if (lane == 0) shared.heads[warp] = total;
  if (threadIdx.x == 0) shared.longs = shared.singles = shared.others = shared.terms = 0;
  for (int i = threadIdx.x; i < kTerms; i += kSortThreads) shared.point_of[i] = kNoPoint;
  __syncthreads();
  int before = 0, segments = 0;
  for (int w = 0; w < SharedOfSort::kWarps; ++w) {
    before += w < warp ? shared.heads[w] : 0;
    segments += shared.heads[w];
  }
  for_segments(words, points, before, [&](int i, bool head, int segment) {
    if (head) begins[segment] = i;
    // The last segment ends where the terms of the range do.
    const bool inside = static_cast<int>(words[i] >> kTermBits) < points;
    if (inside && (i == kTerms - 1 || static_cast<int>(words[i + 1] >> kTermBits) >= points))
      shared.heads[SharedOfSort::kWarps] = i + 1;
  });
  __syncthreads();

  // Count the segments of each kind. A thread keeps the places of its segments in the record.
  const auto count_of = [&](int s) {
    return s >= segments ? 0
                         : static_cast<int>(s + 1 < segments ? begins[s + 1] : shared.heads[SharedOfSort::kWarps]) -
                               static_cast<int>(begins[s]);
  };
  int places[kRounds], lists[kRounds], counts[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int s = r * kSortThreads + static_cast<int>(threadIdx.x), count = counts[r] = count_of(s);
    const bool is_long = count > kLongSegment, is_other = count > 1 && !is_long;
    if (count == 1)
      shared.point_of[words[begins[s]] & (kTerms - 1)] = static_cast<uint16_t>(words[begins[s]] >> kTermBits);
    places[r] = lists[r] = 0;
    if (r * kSortThreads >= segments) continue;
    const int of_longs = take_places(&shared.longs, is_long), of_others = take_places(&shared.others, is_other);
    places[r] = is_long ? of_longs : of_others;
    lists[r] = take_places(&shared.terms, count > 1 ? count : 0);
  }
  __syncthreads();

  // Write the single segments in the order of their terms.
  int singles = 0;
  for (int r = 0; r < kRounds; ++r)
    singles += __popc(__ballot_sync(~0u, shared.point_of[(warp * kRounds + r) * 32 + lane] != kNoPoint));
  if (lane == 0) shared.heads[warp] = singles;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    // What is added to a place of the sorted words gives one of the listed terms; single ones are not listed.
    const int s = r * kSortThreads + static_cast<int>(threadIdx.x);
    if (counts[r] > 0) {
      const uint32_t point = words[begins[s]] >> kTermBits;
      const int list = lists[r], count = counts[r];
      if (count > kLongSegment)
        reinterpret_cast<LongSegment*>(record.body)[places[r]] = {
            static_cast<uint16_t>(point), static_cast<uint16_t>(list), static_cast<uint16_t>(count), 0};
      lists[r] = count == 1 ? kTerms : list - static_cast<int>(begins[s]);
      counts[r] = static_cast<int>(point << 16 | static_cast<uint32_t>(list) << 4 | static_cast<uint32_t>(count - 2));
      if (count == 1 || count > kLongSegment) places[r] = -1;
    } else {
      places[r] = -1, lists[r] = kTerms;
    }
  }
  __syncthreads();
  int single = 0, all_singles = 0;
  for (int w = 0; w < SharedOfSort::kWarps; ++w) {
    single += w < warp ? shared.heads[w] : 0;
    all_singles += shared.heads[w];
  }
  uint32_t* const of_singles = record.body + 2 * shared.longs;
  uint32_t* const of_others = of_singles + all_singles;
  uint16_t* const of_terms = reinterpret_cast<uint16_t*>(of_others + shared.others);
  for (int r = 0; r < kRounds; ++r) {
    const int term = (warp * kRounds + r) * 32 + lane;
    const uint16_t point = shared.point_of[term];
    const unsigned found = __ballot_sync(~0u, point != kNoPoint);
    if (point != kNoPoint) of_singles[single + __popc(found & ((1u << lane) - 1))] = uint32_t{point} << 16 | term;
    single += __popc(found);
  }
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int s = r * kSortThreads + static_cast<int>(threadIdx.x);
    if (places[r] >= 0) of_others[places[r]] = static_cast<uint32_t>(counts[r]);
    if (s < segments) begins[s] = static_cast<uint32_t>(lists[r]);
  }
  __syncthreads();
  for_segments(words, points, before, [&](int i, bool, int segment) {
    if (static_cast<int>(words[i] >> kTermBits) >= points) return;
    const int shift = static_cast<int>(begins[segment]);
    if (shift < kTerms) of_terms[i + shift] = static_cast<uint16_t>(words[i] & (kTerms - 1));
  });
  if (threadIdx.x == 0) {
    const int bytes = 8 * shared.longs + 4 * (all_singles + shared.others) + 2 * shared.terms;
    record.longs = shared.longs, record.singles = all_singles, record.others = shared.others;
    record.packs = (bytes + 15) / 16;
  }
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
  const int64_t first_point = range * tiles.points, points_left = all.points - first_point;
  const int points = static_cast<int>(points_left < tiles.points ? points_left : tiles.points);
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
