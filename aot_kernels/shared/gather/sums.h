// How the gradient of a gather is cut where lists have many points or terms: their points into ranges, and `dout` into
// items, whose rows are transposed into scratch (sums_gpu.h).
#pragma once

#include "../../common/scatter.h"
#include "tiles.h"

namespace msops::gather {

constexpr int kGroupChannels = 64;                   // of a group, at most; the last group has a multiple of 16
constexpr int kFewChannels = 16;                     // of the groups where there are few, or rows are long
constexpr int64_t kPackedBytes = int64_t{96} << 20;  // of the transposed rows, unless one item has more
constexpr int64_t kMostBins = 2048;                  // of the points of a list
constexpr int kSumThreads = 256;                     // of a block that adds up terms

// SumSizes says how the work is cut. Items are the groups of channels of all lists, in their order.
struct SumSizes {
  bool pays;  // else the sums are for lists and GPUs that leave no other way, and take little scratch
  int64_t element_bytes = 8, group_channels, groups, range_points, bins, bin_points, parts, item_size;
  int64_t items, slots;  // that are transposed at once; for sums over groups, which are apart in one launch

  SumSizes(const GatherSizes& all, int taps, const Tensor& dout) {
    with_type<Half, float, double>(dout, [&](auto type) { element_bytes = sizeof(typename decltype(type)::type); });
    const int64_t terms = size_of({all.places, taps});
    // Kernels of one tap read `dout` once for each range.
    pays = taps > 1 ? all.channels >= kFewChannels && terms > kTerms
                    : all.points > kRangePoints && all.places >= all.points;
    const int64_t most_bytes = pays ? kPackedBytes : kPackedBytes / 16;
    const bool few = all.channels <= kFewChannels || size_of({all.places, kGroupChannels, element_bytes}) > most_bytes;
    group_channels = few ? kFewChannels : kGroupChannels;
    groups = (all.channels + group_channels - 1) / group_channels;
    range_points = bin_points = points_of_range(group_channels, element_bytes);
    while ((bins = (all.points + bin_points - 1) / bin_points) > kMostBins) bin_points *= 2;
    const int64_t most_parts = std::max<int64_t>(32, 512 / std::max<int64_t>(1, all.lists));
    parts = std::max<int64_t>(1, std::min(most_parts, terms / 1024));
    item_size = size_of({all.places, group_channels});
    const int64_t at_once = most_bytes / element_bytes / std::max<int64_t>(1, item_size);
    items = std::max<int64_t>(1, std::min(at_once, all.lists * groups));
    slots = std::min(groups, items);
  }

  // Returns how many points a block adds up the terms of. A team has one or, in float16, two.
  static constexpr int points_of_range(int64_t group_channels, int64_t element_bytes) {
    const bool two = element_bytes == 2 && group_channels > kFewChannels;
    return static_cast<int>(kSumThreads * 8 / group_channels * (two ? 2 : 1));
  }
  // Returns how many elements the transposed rows and the sorted weights have, in whole packs.
  int64_t packed_elements() const { return in_packs(size_of({items, item_size})); }
  int64_t weight_elements(const GatherSizes& all, int taps) const {
    return taps > 1 ? in_packs(size_of({all.lists, all.places, taps})) : 0;
  }
  // Returns the bytes of these, of two numbers for each term, and of the counts.
  int64_t bytes(const GatherSizes& all, int taps) const {
    return size_of({packed_elements() + weight_elements(all, taps), element_bytes}) +
           size_of({all.lists, all.places, taps, 8}) +
           size_of({all.lists, size_of({bins + 1, parts}) + kScatterScans, 4});
  }

 private:
  static int64_t in_packs(int64_t elements) { return (elements + 7) / 8 * 8; }
};

}  // namespace msops::gather
