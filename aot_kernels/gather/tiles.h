// The gradient of a gather adds up, for each point, the terms that were gathered from it. A list's terms are cut into
// tiles, and its points into ranges whose sums fit shared memory. sort_kernel finds, for each tile and range, the
// segments of terms that belong to one point. All channels share these.
#pragma once

#include "../common/parallel.h"
#include "gather.h"
#ifdef __CUDACC__
#include "../common/gpu/tile_sort.h"
#endif

namespace msops {

constexpr int kTermBits = 12;
constexpr int kTerms = 1 << kTermBits;   // terms of a tile, at most
constexpr int64_t kRangePoints = 40960;  // points of a range, at most; their numbers have 16 bits
constexpr int kLongSegment = 17;         // terms; the lanes of a warp share the segments that have more

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
static_assert(kTerms == kTileItems, "a tile is what a block sorts");

// SharedOfRecord is for a block that sorts the words of a tile: a term's point above the term's number.
struct SharedOfRecord : SharedOfSort {
  uint16_t point_of[kTerms];          // of each term that is the only one of its point
  int longs, singles, others, terms;  // the numbers of segments, and of the terms that a record lists
};
constexpr uint16_t kNoPoint = 0xffff;

// Reads the indices of a tile's terms. A term that does not belong to the range gets the point `points`.
__device__ inline void read_terms(SharedOfRecord& shared, const Indices& index, int64_t at, int terms, int first,
                                  int points) {
  for (int i = threadIdx.x; i < kTerms; i += kSortThreads) {
    const int point = i < terms ? index[at + i] - first : -1;
    const bool inside = 0 <= point && point < points;
    shared.words[0][i] = static_cast<uint32_t>(inside ? point : points) << kTermBits | i;
  }
  __syncthreads();
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

// Writes the record from the sorted words. The order of a record's longer segments depends on the run; sums do not.
__device__ inline void write_record(SharedOfRecord& shared, int last, int points, TileRecord& record) {
  constexpr int kRounds = kTerms / kSortThreads;
  const uint32_t* const words = shared.words[last];
  uint32_t* const begins = shared.words[1 - last];  // where each segment begins
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared.longs = shared.singles = shared.others = shared.terms = 0;
  for (int i = threadIdx.x; i < kTerms; i += kSortThreads) shared.point_of[i] = kNoPoint;
  int before;
  const int segments = find_segments(shared, last, points, before);

  // Count the segments of each kind. A thread keeps the places of its segments in the record.
  int places[kRounds], lists[kRounds], counts[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int s = r * kSortThreads + static_cast<int>(threadIdx.x),
              count = counts[r] = s < segments ? segment_size(shared, begins, s, segments) : 0;
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
  __shared__ SharedOfRecord shared;
  const int64_t range = blockIdx.x % tiles.ranges, item = blockIdx.x / tiles.ranges;
  const int64_t tile = item % tiles.tiles, list = item / tiles.tiles;
  const int64_t first = tile * tiles.places, left = all.places - first;
  const int terms = static_cast<int>(left < tiles.places ? left : tiles.places) * kTaps;
  const int64_t first_point = range * tiles.points, points_left = all.points - first_point;
  const int points = static_cast<int>(points_left < tiles.points ? points_left : tiles.points);
  read_terms(shared, index, (list * all.places + first) * kTaps, terms, static_cast<int>(first_point), points);
  write_record(shared, sort_words(shared, points), points, records[blockIdx.x]);
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
