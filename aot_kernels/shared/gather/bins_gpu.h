// On the GPU, the terms of each list are sorted by the bins that their points are in: blocks count the terms of a part
// of a list in each bin, and then write them where they belong, in their order.
#pragma once

#include "../../common/gpu/tile_sort.h"
#include "sums.h"

namespace msops::gather {

// BinnedTerms holds the terms of each bin, in their order. The last bin has those whose index is out of range, and
// which are not listed.
template <typename T>
struct BinnedTerms {
  int64_t lists, terms, points, bins, bin_points, parts;
  Indices index;
  const T* weight;            // null if there is one tap
  int32_t* begins;            // (lists, bins + 1, parts): where a part's terms of a bin begin in the arrays below
  int32_t *order, *point_of;  // (lists, terms)
  T* weight_of;               // (lists, terms)

  __device__ int bin_of(int64_t term) const {
    const int point = index[term];
    const bool inside = 0 <= point && point < points;
    return static_cast<int>(inside ? static_cast<uint32_t>(point) / static_cast<uint32_t>(bin_points) : bins);
  }
  // The begin of the last bin is how many terms the list has in the others.
  MSOPS_BOTH int32_t& begin(int64_t list, int64_t bin, int64_t part = 0) const {
    return begins[(list * (bins + 1) + bin) * parts + part];
  }
};

constexpr int kBinThreads = kSortThreads;

template <typename T>
__global__ void __launch_bounds__(kBinThreads) count_bins_kernel(BinnedTerms<T> all) {
  __shared__ int counts[kMostBins + 1];
  const int64_t list = blockIdx.x / all.parts, part = blockIdx.x % all.parts;
  for (int b = threadIdx.x; b <= all.bins; b += kBinThreads) counts[b] = 0;
  __syncthreads();
  const int64_t end = part_begin(all.terms, part + 1, all.parts);
#pragma unroll 4
  for (int64_t i = part_begin(all.terms, part, all.parts) + threadIdx.x; i < end; i += kBinThreads)
    atomicAdd(counts + all.bin_of(list * all.terms + i), 1);
  __syncthreads();
  for (int b = threadIdx.x; b <= all.bins; b += kBinThreads) all.begin(list, b, part) = counts[b];
}

template <int kTaps, typename T>
__global__ void __launch_bounds__(kBinThreads) place_bins_kernel(BinnedTerms<T> all) {
  __shared__ SharedOfSort shared;
  __shared__ int begins[kMostBins];  // where the tile's terms of a bin go, less where they are in the tile
  const int64_t list = blockIdx.x / all.parts, part = blockIdx.x % all.parts;
  const int bins = static_cast<int>(all.bins);
  for (int b = threadIdx.x; b < bins; b += kBinThreads) begins[b] = all.begin(list, b, part);
  const int64_t end = part_begin(all.terms, part + 1, all.parts);
  for (int64_t first = part_begin(all.terms, part, all.parts); first < end; first += kTileItems) {
    const int items = static_cast<int>(min(end - first, int64_t{kTileItems}));
    const int rounds = (items + kSortThreads - 1) / kSortThreads;
#pragma unroll 4
    for (int i = threadIdx.x; i < rounds * kSortThreads; i += kSortThreads)
      shared.words[0][i] =
          static_cast<uint32_t>(i < items ? all.bin_of(list * all.terms + first + i) : bins) << kItemBits | i;
    __syncthreads();
    const uint32_t* const words = shared.words[sort_words(shared, bins, rounds)];
    for (int i = threadIdx.x; i < items; i += kSortThreads)
      if (is_head(words, i, bins)) begins[words[i] >> kItemBits] -= i;
    __syncthreads();
    for (int i = threadIdx.x; i < items; i += kSortThreads) {
      const int bin = words[i] >> kItemBits;
      if (bin >= bins) continue;
      const int64_t term = first + (words[i] & (kTileItems - 1)), to = list * all.terms + begins[bin] + i;
      all.order[to] = static_cast<int32_t>(term);
      all.point_of[to] = all.index[list * all.terms + term];
      if constexpr (kTaps > 1) all.weight_of[to] = all.weight[list * all.terms + term];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < items; i += kSortThreads) {
      const int bin = words[i] >> kItemBits;
      if (bin < bins && (i + 1 == items || static_cast<int>(words[i + 1] >> kItemBits) != bin)) begins[bin] += i + 1;
    }
    __syncthreads();
  }
}

// Sorts the terms into bins. `scratch` begins at a pack.
template <int kTaps, typename T>
BinnedTerms<T> bin_terms(Call& call, const GatherSizes& all, const SumSizes& sizes, Indices index, const T* weight,
                         void* scratch) {
  const int64_t terms = all.places * kTaps, size = all.lists * terms, counts = (sizes.bins + 1) * sizes.parts;
  T* const weight_of = static_cast<T*>(scratch);
  int32_t* const order = reinterpret_cast<int32_t*>(weight_of + sizes.weight_elements(all, kTaps));
  int32_t* const begins = order + 2 * size;
  const BinnedTerms<T> binned{all.lists, terms,  all.points, sizes.bins, sizes.bin_points, sizes.parts,
                              index,     weight, begins,     order,      order + size,     weight_of};
  launch(call, count_bins_kernel<T>, all.lists * sizes.parts, kBinThreads, 0, binned);
  Scan places{all.lists, counts, ScanOrder::kAlong};
  places.exclusive = true;
  places.parts = kScatterScans;
  scan(call, places, PlacesOfCounts{counts, begins}, begins + all.lists * counts);
  launch(call, place_bins_kernel<kTaps, T>, all.lists * sizes.parts, kBinThreads, 0, binned);
  return binned;
}

}  // namespace msops::gather
