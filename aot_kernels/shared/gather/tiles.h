// The gradient of a gather adds up, for each point, the terms that were gathered from it. A list's terms are cut into
// tiles, and its points into ranges whose sums fit shared memory. sort_kernel finds, for each tile and range, the
// segments of terms that belong to one point. All channels share these.
#pragma once

#include "../../common/parallel.h"
#include "../../common/sum.h"
#include "gather.h"
#ifdef __CUDACC__
#include "../../common/gpu/tile_sort.h"
#endif

namespace msops::gather {

constexpr int kTermBits = 12;
constexpr int kTerms = 1 << kTermBits;   // terms of a tile, at most
constexpr int64_t kRangePoints = 40960;  // points of a range, at most; their numbers have 16 bits
constexpr int64_t kListPoints = 1024;    // of a list whose terms tiles_kernel adds up, at most
constexpr int kListPlaces = 1024;        // of a tile there
constexpr int kLongSegment = 8;          // terms; lanes of a warp share the segments that have more

// LongSegment has more than kLongSegment terms, from a position of the record's list of terms on.
struct LongSegment {
  uint16_t point, begin, count, unused;
};

// TileRecord holds the segments of a tile's terms that belong to a range. `body` has a word for each term that is the
// only one of its point, in their order: the point, in the upper half, and the term; then the long segments; then a
// word for each other segment, with the begin of its terms and its length less 2 in the lower half; then the terms of
// all segments but the single ones, of 16 bits: a segment's in their order.
struct alignas(16) TileRecord {
  int32_t longs, singles, others, packs;  // packs: of 16 bytes, in the body
  uint32_t body[kTerms];
};

// Tiles says how lists are cut. A tile has a whole number of places; eight times as many places are whole packs.
struct Tiles {
  int64_t places, tiles, ranges, points;  // places: of a tile; points: of a range

  Tiles(const GatherSizes& all, int taps)
      : places(kTerms / taps / 8 * 8),
        tiles((all.places + places - 1) / places),
        ranges(std::max<int64_t>(1, (all.points + kRangePoints - 1) / kRangePoints)),
        points((all.points + ranges - 1) / ranges) {}

  MSOPS_BOTH int64_t record(int64_t list, int64_t tile, int64_t range) const {
    return (list * tiles + tile) * ranges + range;
  }
};

constexpr int64_t kRecordWords = sizeof(TileRecord) / 4;

// SortedTile has the terms of a tile of lists_gpu.h, sorted by their points.
template <int kTaps, typename T>
struct SortedTile {
  uint32_t* bounds;     // where a point's terms begin, and in the upper half, where they end
  uint32_t* terms;      // the first pack of a term's place, and in the upper half, the term
  Compute<T>* weights;  // of the terms; null if there is one tap

  static MSOPS_BOTH int64_t words(int64_t points, int64_t count) {
    const int64_t of_weights = kTaps > 1 ? sizeof(Compute<T>) / 4 : 0;
    return (points + 3) / 4 * 4 + (1 + of_weights) * ((count + 3) / 4 * 4);
  }
  // The tile is at `memory`, which has words(points, count) words.
  MSOPS_BOTH SortedTile(uint32_t* memory, int64_t points, int64_t count)
      : bounds(memory),
        terms(bounds + (points + 3) / 4 * 4),
        weights(kTaps > 1 ? reinterpret_cast<Compute<T>*>(terms + (count + 3) / 4 * 4) : nullptr) {}
};

// Returns how many int32 numbers of scratch the records, or the sorted tiles, need.
inline int64_t tile_words(const GatherSizes& all, int taps) {
  const int64_t ranges = (all.points + kRangePoints - 1) / kRangePoints;
  const int64_t records = size_of({all.lists, Tiles(all, taps).tiles, ranges, kRecordWords});
  const int64_t of_tile = SortedTile<1, double>::words(all.points, kListPlaces);
  const int64_t sorted = size_of({all.lists, (all.places + kListPlaces - 1) / kListPlaces, of_tile});
  return std::max(records, taps == 1 && all.points <= kListPoints ? sorted : 0);
}

#ifdef __CUDACC__
static_assert(kTerms == kTileItems, "a tile is what a block sorts");

// SharedOfRecord is for a block that sorts the words of a tile: a term's point above the term's number.
struct SharedOfRecord : SharedOfSort {
  uint32_t seen[kRangePoints / 32], repeated[kRangePoints / 32];  // bits of points that have a term, and two or more
  int singles[kWarps], rest[kWarps];                              // terms of each warp
  int longs, others, terms;  // the numbers of segments, and of the terms that a record lists
};

// Writes the terms that are the only ones of their points to the record, and the words of the others, in their order.
// Returns the number of single ones, and sets that of the others.
__device__ inline int split_terms(SharedOfRecord& shared, const Indices& index, int64_t at, int terms, int first,
                                  int points, TileRecord& record, int& rest) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < (points + 31) / 32; i += kSortThreads) shared.seen[i] = shared.repeated[i] = 0;
  int point_of[kSortRounds];
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int i = (warp * kSortRounds + r) * 32 + lane, point = i < terms ? index[at + i] - first : -1;
    point_of[r] = 0 <= point && point < points ? point : -1;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    if (point_of[r] < 0) continue;
    const uint32_t bit = uint32_t{1} << point_of[r] % 32;
    if (atomicOr(shared.seen + point_of[r] / 32, bit) & bit) atomicOr(shared.repeated + point_of[r] / 32, bit);
  }
  __syncthreads();
  unsigned singles[kSortRounds], others[kSortRounds];  // bits of the lanes
  int count = 0, other_count = 0;
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int point = point_of[r];
    const bool is_repeated = point >= 0 && shared.repeated[point / 32] >> point % 32 & 1;
    singles[r] = __ballot_sync(~0u, point >= 0 && !is_repeated);
    others[r] = __ballot_sync(~0u, is_repeated);
    count += __popc(singles[r]), other_count += __popc(others[r]);
  }
  if (lane == 0) shared.singles[warp] = count, shared.rest[warp] = other_count;
  __syncthreads();
  int single = 0, other = 0, all_singles = 0;
  rest = 0;
  for (int w = 0; w < SharedOfSort::kWarps; ++w) {
    single += w < warp ? shared.singles[w] : 0, other += w < warp ? shared.rest[w] : 0;
    all_singles += shared.singles[w], rest += shared.rest[w];
  }
  const unsigned below = (1u << lane) - 1;
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const uint32_t term = (warp * kSortRounds + r) * 32 + lane, point = static_cast<uint32_t>(point_of[r]);
    if (singles[r] >> lane & 1) record.body[single + __popc(singles[r] & below)] = point << 16 | term;
    if (others[r] >> lane & 1) shared.words[0][other + __popc(others[r] & below)] = point << kTermBits | term;
    single += __popc(singles[r]), other += __popc(others[r]);
  }
  return all_singles;
}

// Adds the numbers of a warp's lanes to a counter in shared memory, and returns where this lane's part begins.
__device__ inline int take_places(int* counter, int number) {
  const int lane = threadIdx.x % 32;
  const int end = warp_prefix_sum(number);
  int first = 0;
  if (lane == 31) first = atomicAdd(counter, end);
  return __shfl_sync(~0u, first, 31) + end - number;
}

// Writes the segments of more than one term, from the sorted words. Their order depends on the run; sums do not.
__device__ inline void write_segments(SharedOfRecord& shared, int last, int points, int rounds, uint32_t* to) {
  const uint32_t* const words = shared.words[last];
  uint32_t* const begins = shared.words[1 - last];  // where each segment begins
  int before;
  const int segments = find_segments(shared, last, points, rounds, before);

  // Count the segments of each kind. A thread keeps the places of its segments in the record.
  int places[kSortRounds], lists[kSortRounds], counts[kSortRounds];
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    if (r * kSortThreads >= segments) break;
    const int s = r * kSortThreads + static_cast<int>(threadIdx.x);
    counts[r] = s < segments ? segment_size(shared, begins, s, segments) : 0;
    const bool is_long = counts[r] > kLongSegment;
    const int of_longs = take_places(&shared.longs, is_long);
    const int of_others = take_places(&shared.others, counts[r] > 0 && !is_long);
    places[r] = is_long ? of_longs : of_others;
    lists[r] = take_places(&shared.terms, counts[r]);
  }
  __syncthreads();
  uint32_t* const of_others = to + 2 * shared.longs;
  uint16_t* const of_terms = reinterpret_cast<uint16_t*>(of_others + shared.others);
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int s = r * kSortThreads + static_cast<int>(threadIdx.x);
    if (s >= segments) break;
    const uint32_t point = words[begins[s]] >> kTermBits, list = lists[r], count = counts[r];
    if (count > kLongSegment) {
      to[2 * places[r]] = point | list << 16;
      to[2 * places[r] + 1] = count;
    } else {
      of_others[places[r]] = point << 16 | list << 4 | (count - 2);
    }
    begins[s] = list - begins[s];  // what is added to a place of the sorted words gives one of the listed terms
  }
  __syncthreads();
  for_segments(words, points, rounds, before, [&](int i, bool, int segment) {
    if (static_cast<int>(words[i] >> kTermBits) < points)
      of_terms[begins[segment] + static_cast<uint32_t>(i)] = static_cast<uint16_t>(words[i] & (kTerms - 1));
  });
}

// A block sorts the terms of one tile and range.
template <int kTaps>
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(GatherSizes all, Tiles tiles, Indices index, TileRecord* records) {
  __shared__ SharedOfRecord shared;
  const int64_t range = blockIdx.x % tiles.ranges, item = blockIdx.x / tiles.ranges;
  const int64_t tile = item % tiles.tiles, list = item / tiles.tiles;
  const int64_t first = tile * tiles.places, left = all.places - first;
  const int terms = static_cast<int>(left < tiles.places ? left : tiles.places) * kTaps;
  const int64_t first_point = range * tiles.points, points_left = all.points - first_point;
  const int points = static_cast<int>(points_left < tiles.points ? points_left : tiles.points);
  TileRecord& record = records[blockIdx.x];
  if (threadIdx.x == 0) shared.longs = shared.others = shared.terms = 0;
  int rest;
  const int singles = split_terms(shared, index, (list * all.places + first) * kTaps, terms,
                                  static_cast<int>(first_point), points, record, rest);
  if (rest > 0) {
    const int rounds = (rest + kSortThreads - 1) / kSortThreads;
    for (int i = rest + threadIdx.x; i < rounds * kSortThreads; i += kSortThreads)
      shared.words[0][i] = static_cast<uint32_t>(points) << kTermBits;
    __syncthreads();
    write_segments(shared, sort_words(shared, points, rounds), points, rounds, record.body + singles);
  }
  if (threadIdx.x == 0) {
    record.longs = shared.longs, record.singles = singles, record.others = shared.others;
    record.packs = (8 * shared.longs + 4 * (singles + shared.others) + 2 * shared.terms + 15) / 16;
  }
}

template <int kTaps>
void sort_tiles(Call& call, const GatherSizes& all, const Tiles& tiles, Indices index, TileRecord* records) {
  const int64_t blocks = all.lists * tiles.tiles * tiles.ranges;
  launch(call, sort_kernel<kTaps>, blocks, kSortThreads, 0, all, tiles, index, records);
}
#endif

}  // namespace msops::gather
