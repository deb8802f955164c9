// What the gradient of a table on the GPU is made of (slices.h): records of what points add to the table, and where
// they are in the scratch.
#pragma once

#include "fixed_point.h"
#include "interpolate.h"

namespace msops::hash_encoding {

constexpr int kFeatures = 2;                         // that a record has
constexpr int kBinBits = 7, kBins = 1 << kBinBits;   // of a sorter's records
constexpr int kCoarse = 1 << 17;                     // levels of at most so many entries have few slices
constexpr int kMaximaWords = 2 * (kMostLevels + 1);  // doubles
constexpr int kPairs = 4096;                         // of a sorter's points
constexpr int kSortThreads = 512, kSliceThreads = 512;

// The registers are bounded such that so many threads of a multiprocessor run at once.
constexpr int kThreadsAtOnce = 1024;
template <typename T, int kThreadsOfBlock>
constexpr int kBlocksAtOnce = sizeof(T) == 8 ? 1 : kThreadsAtOnce / kThreadsOfBlock;

// Record is what two corners, neighbours along the first axis, add to their entries.
template <typename C>
struct alignas(16) Record {
  C gradient[kFeatures];  // of both together, in steps
  C far;                  // the far side's part
  uint32_t entries;  // the near side's entry in its range, and the number of low bits in which the far side's differs

  static constexpr int kBits = 5;  // of that number. It is 0 if there is no far side.
  using Words = Pack<uint32_t, sizeof(C) == 8 ? 8 : 4>;

  // A record is moved as packs of 16 bytes, since nvcc would move each member by itself.
  MSOPS_BOTH Words words() const {
    Words words;
    memcpy(&words, this, sizeof words);
    return words;
  }
#ifdef __CUDACC__
  static __device__ __forceinline__ Record load(const Words* from) {
    uint32_t words[sizeof(Record) / 16][4];
    for (int i = 0; i < static_cast<int>(sizeof(Record) / 16); ++i) ld_global_v4(words[i], from->values + 4 * i);
    Record record;
    memcpy(&record, words, sizeof record);
    return record;
  }
#endif
};

// Layout says where everything is in the scratch, in words of 4 bytes.
struct Layout {
  // A sorter has room for so many records: two of each pair whose sides are in different slices.
  static constexpr int64_t kRoom = 2 * kPairs;
  int64_t sorters, groups, tasks_at_once, coarse, totals, ends, records, words;

  Layout(const Grids& grids, int64_t axes, int64_t count, int64_t features, int bytes) {
    constexpr int64_t kMostBytes = int64_t{1} << 29;  // of records at once
    const int64_t points = kPairs >> (axes - 1),
                  of_record = bytes == 8 ? sizeof(Record<double>) : sizeof(Record<float>);
    sorters = (count + points - 1) / points;
    groups = (features + kFeatures - 1) / kFeatures;
    const int64_t of_task = std::max<int64_t>(1, of_record * kRoom * sorters);
    tasks_at_once = std::clamp<int64_t>(kMostBytes / of_task, 1, std::clamp<int64_t>(grids.levels * groups, 1, 65535));
    coarse = 0;
    for (int l = 0; l < grids.levels; ++l) coarse += grids.level[l].size <= kCoarse ? grids.level[l].size : 0;
    const int64_t sums = size_of({coarse, features});
    totals = kMaximaWords;
    ends = totals + (bytes == 8 ? FixedLayout<double>::words(sums) : FixedLayout<float>::words(sums));
    records = (ends + size_of({tasks_at_once, sorters, kBins}) + 3) / 4 * 4;
    words = records + size_of({tasks_at_once, sorters, kRoom, of_record / 4}) + 3;  // 3: to align the scratch
  }
};

#ifdef __CUDACC__
template <typename T>
struct SliceProblem {
  using C = Compute<T>;
  Problem<T> all;
  const T* dout;
  T* dtable;
  uint32_t* maxima;  // of each level, and of the directions, as doubles
  FixedSums<C> totals;
  Pack<uint16_t, 2>* ends;             // (tasks at once, kBins, sorters): where a bin begins and ends
  typename Record<C>::Words* records;  // (tasks at once, sorters, Layout::kRoom)
  int64_t sorters;
  int groups, first_task, slice_bits, staged;  // staged: records that a sorter has shared memory for
  bool are_packs;                              // the features of dout that a record has

  // Entries are in ranges of one or, in large levels, several slices. Where there are few ranges, each has several
  // bins, one for each of some lanes, since atomics on few addresses are slow. These functions return the bits of an
  // entry in its range, and the logarithm of how many bins a range has.
  __device__ int range_bits(const Level& level) const { return max(slice_bits, bits_of(level) - kBinBits); }
  __device__ int lane_bits(const Level& level) const {
    return min(5, kBinBits - max(0, bits_of(level) - range_bits(level)));
  }
  MSOPS_BOTH int slices(const Level& level) const { return static_cast<int>(((level.size - 1) >> slice_bits) + 1); }
  // Returns how many blocks share a slice.
  MSOPS_BOTH int parts(const Level& level) const {
    const int most = level.size > kCoarse ? 1 : 2 * kCoarse / static_cast<int>(level.size), few = most < 64 ? most : 64;
    return few < sorters ? few : static_cast<int>(sorters);
  }
  static __device__ int bits_of(const Level& level) { return 32 - __clz(static_cast<int>(level.size - 1)); }
  // Returns how many features a task has from its first one on.
  __device__ int features_from(int64_t feature) const {
    return static_cast<int>(all.features - feature < kFeatures ? all.features - feature : kFeatures);
  }
  // Returns the first of a coarse level's totals.
  __device__ int64_t first_total(int l) const {
    int64_t first = 0;
    for (int i = 0; i < l; ++i) first += all.grids.level[i].size <= kCoarse ? all.grids.level[i].size : 0;
    return first;
  }
  // Returns the steps of a level's sums. All corners together count 1 at each point, or change by up to 3 scale |u|.
  template <bool kAlong>
  __device__ Steps<C> steps(int l) const {
    const double* const largest = reinterpret_cast<const double*>(maxima);
    const double of_shares = kAlong ? 3 * (all.grids.level[l].scale + 1) * largest[kMostLevels] : 1;
    const int exponent = exponent_of(largest[l]) + exponent_of(of_shares) + exponent_of(static_cast<double>(all.count));
    return Steps<C>(max(exponent, -1500));  // products that are smaller underflow
  }
};
#endif

}  // namespace msops::hash_encoding
