// scatter_add() computes the gradient of a gather: for each target, the sum over all sources that were gathered from
// it. It adds in the order of the sources, without floating-point atomics, so that results are reproducible bit for bit
// and equal on both devices.
//
// Source i of a list adds to target index[list][i], or to none if that is out of range. `invert` finds the sources of
// each target by counting; scatter_add then adds a function of them, for any number of channels. For features (B, C,
// N), of which `index` (B, M) gathered (B, C, M), write:
//
//   template <typename T>
//   struct Gathered {
//     const T* dout;
//     int64_t channels, sources;
//
//     MSOPS_BOTH Compute<T> operator()(int64_t list, int64_t channel, int64_t source) const {
//       return Compute<T>(dout[(list * channels + channel) * sources + source]);
//     }
//   };
//
//   const Inverse inverse = invert(call, B, N, M, index.as<const int32_t>(), scratch.as<int32_t>());
//   scatter_add(call, inverse, C, ChannelOrder::kFirst, Gathered<T>{dout.as<T>(), C, M}, dfeatures.as<T>());
#pragma once

#include <algorithm>

#include "scan.h"
#include "scratch.h"
#include "sum.h"
#ifdef __CUDACC__
#include "gpu/tile_sort.h"
#endif

namespace msops {

// Returns in how many parts a list's sources are placed at once, at most.
inline int64_t scatter_parts(int64_t sources) { return std::max<int64_t>(1, std::min<int64_t>(32, sources / 1024)); }

constexpr int64_t kScatterScans = 128;  // parts in which a list's counts are added up at once

// Returns how many numbers of scratch a list needs. MSOPS_SCRATCH of the entry returns it to msops.
inline int64_t scatter_scratch(int64_t targets, int64_t sources) {
  return size_of({sources}) + size_of({scatter_parts(sources), targets}) + kScatterScans;
}

// Inverse holds the sources of each target, for all lists.
struct Inverse {
  int64_t lists, targets, sources, parts;
  int32_t* order;  // (lists, sources): a target's sources are neighbours, in their original order
  int32_t* ends;   // (lists, targets, parts): where in `order` each part's sources of a target end
  int32_t* scans;  // (lists, kScatterScans)

  // Returns the part that a source is in.
  MSOPS_BOTH int64_t part_of(int64_t source) const {
    const int64_t length = sources / parts, longer = sources % parts;
    return source < longer * (length + 1) ? source / (length + 1) : (source - longer) / length;
  }
  MSOPS_BOTH const int32_t* begin(int64_t list, int64_t target) const {
    return order + list * sources + (target > 0 ? ends[(list * targets + target) * parts - 1] : 0);
  }
  MSOPS_BOTH const int32_t* end(int64_t list, int64_t target) const {
    return order + list * sources + ends[(list * targets + target + 1) * parts - 1];
  }
};

// Turns each list's counts into the places where a part's sources of a target begin.
struct PlacesOfCounts {
  using State = SumStep<int32_t>;
  int64_t counts;
  int32_t* ends;

  MSOPS_BOTH State read(int64_t list, int64_t i) const { return {ends[list * counts + i]}; }
  MSOPS_BOTH void write(int64_t list, int64_t i, const State& before) const { ends[list * counts + i] = before.sum; }
};

// Inverts a list on the CPU, as if all sources were in the last part.
template <typename Index>
struct InvertOnCpu {
  Inverse all;
  const Index* index;

  MSOPS_CPU void operator()(int64_t list) const {
    const Index* const from = index + list * all.sources;
    int32_t* const order = all.order + list * all.sources;
    int32_t* const ends = all.ends + list * all.targets * all.parts + all.parts - 1;  // one for each target
    for (int64_t t = 0; t < all.targets; ++t) ends[t * all.parts] = 0;
    for (int64_t i = 0; i < all.sources; ++i)
      if (is_target(from[i])) ++ends[from[i] * all.parts];
    int32_t before = 0;
    for (int64_t t = 0; t < all.targets; ++t) {
      const int32_t count = ends[t * all.parts];
      ends[t * all.parts] = before;
      before += count;
    }
    for (int64_t i = 0; i < all.sources; ++i)
      if (is_target(from[i])) order[ends[from[i] * all.parts]++] = static_cast<int32_t>(i);
  }

 private:
  MSOPS_CPU bool is_target(Index i) const { return 0 <= i && static_cast<int64_t>(i) < all.targets; }
};

#ifdef __CUDACC__
constexpr int kPlaceThreads = 128;

// Counts the sources of each part and target. The lanes of a warp that have one target and part count together.
template <typename Index>
__global__ void __launch_bounds__(kPlaceThreads) count_kernel(Inverse all, const Index* index) {
  const int64_t i = blockIdx.x * int64_t{kPlaceThreads} + threadIdx.x;
  const int64_t list = i / all.sources, source = i - list * all.sources;
  const int64_t target = list < all.lists ? static_cast<int64_t>(index[i]) : -1;
  const bool inside = 0 <= target && target < all.targets;
  const int64_t place = inside ? (list * all.targets + target) * all.parts + all.part_of(source) : -1;
  const unsigned same = __match_any_sync(~0u, static_cast<unsigned long long>(place));
  if (inside && static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(same)) - 1)
    atomicAdd(all.ends + place, __popc(same));
}

// A block sorts one part of a list's sources by their targets, tile after tile, and writes them where they belong.
template <typename Index>
__global__ void __launch_bounds__(kSortThreads) place_kernel(Inverse all, const Index* index) {
  __shared__ SharedOfSort shared;
  const int64_t list = blockIdx.x / all.parts, part = blockIdx.x % all.parts;
  const int limit = static_cast<int>(all.targets);
  int32_t* const ends = all.ends + list * all.targets * all.parts + part;  // one for each target
  const int64_t end = part_begin(all.sources, part + 1, all.parts);
  for (int64_t first = part_begin(all.sources, part, all.parts); first < end; first += kTileItems) {
    const int items = static_cast<int>(min(end - first, int64_t{kTileItems}));
    const int rounds = (items + kSortThreads - 1) / kSortThreads;
    for (int i = threadIdx.x; i < rounds * kSortThreads; i += kSortThreads) {
      const int64_t target = i < items ? static_cast<int64_t>(index[list * all.sources + first + i]) : -1;
      const bool inside = 0 <= target && target < all.targets;
      shared.words[0][i] = static_cast<uint32_t>(inside ? target : all.targets) << kItemBits | i;
    }
    __syncthreads();
    const int last = sort_words(shared, limit, rounds);
    const uint32_t* const words = shared.words[last];
    uint32_t* const begins = shared.words[1 - last];
    int before, sizes[kSortRounds];
    const int segments = find_segments(shared, last, limit, rounds, before);
#pragma unroll
    for (int r = 0; r < kSortRounds; ++r) {
      const int s = r * kSortThreads + static_cast<int>(threadIdx.x);
      sizes[r] = s < segments ? segment_size(shared, begins, s, segments) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kSortRounds; ++r) {
      const int s = r * kSortThreads + static_cast<int>(threadIdx.x);
      if (s >= segments) break;
      int32_t* const place = ends + static_cast<int64_t>(words[begins[s]] >> kItemBits) * all.parts;
      const int32_t begin = *place;
      *place = begin + sizes[r];
      // What is added to a place of the sorted words gives the place in `order`.
      begins[s] = static_cast<uint32_t>(begin) - begins[s];
    }
    __syncthreads();
    for_segments(words, limit, rounds, before, [&](int i, bool, int segment) {
      if (static_cast<int>(words[i] >> kItemBits) < limit)
        all.order[list * all.sources + (begins[segment] + static_cast<uint32_t>(i))] =
            static_cast<int32_t>(first + (words[i] & (kTileItems - 1)));
    });
    __syncthreads();
  }
}

// Writes sources where they belong if there are more targets than place_kernel takes: a warp takes one part of a list's
// sources, in their order.
template <typename Index>
__global__ void __launch_bounds__(kPlaceThreads) place_of_many_kernel(Inverse all, const Index* index) {
  const int64_t item = blockIdx.x * int64_t{kPlaceThreads / 32} + threadIdx.x / 32;
  const int64_t list = item / all.parts, part = item % all.parts;
  const unsigned lane = threadIdx.x % 32;
  if (list >= all.lists) return;
  int32_t* const ends = all.ends + list * all.targets * all.parts + part;  // one for each target
  const int64_t end = part_begin(all.sources, part + 1, all.parts);
  for (int64_t first = part_begin(all.sources, part, all.parts); first < end; first += 32) {
    const int64_t source = first + lane;
    const int64_t target = source < end ? static_cast<int64_t>(index[list * all.sources + source]) : -1;
    const bool inside = 0 <= target && target < all.targets;
    // The lanes with one target take neighbouring places, in their order; the first of them moves the end.
    const unsigned same = __match_any_sync(~0u, inside ? target : -1);
    const int leader = __ffs(static_cast<int>(same)) - 1;
    int place = 0;
    if (inside && static_cast<int>(lane) == leader) place = atomicAdd(ends + target * all.parts, __popc(same));
    place = __shfl_sync(~0u, place, leader) + __popc(same & ((1u << lane) - 1));
    if (inside) all.order[list * all.sources + place] = static_cast<int32_t>(source);
    __syncwarp();
  }
}

#endif

// Finds the sources of each target. Index is int32_t or int64_t; `scratch` has room for lists *
// scatter_scratch(targets, sources) numbers.
template <typename Index>
Inverse invert(Call& call, int64_t lists, int64_t targets, int64_t sources, const Index* index, int32_t* scratch) {
  // More parts have more counts to add up. Fewer leave most of a GPU idle if there are few lists.
  const int64_t few = std::max<int64_t>(1, 8 / std::max<int64_t>(1, lists));
  const int64_t most = std::max(few, 4 * sources / std::max<int64_t>(1, targets));
  const int64_t parts = std::min(scatter_parts(sources), most);
  int32_t* const ends = scratch + lists * sources;
  const Inverse all{lists, targets, sources, parts, scratch, ends, ends + lists * targets * parts};
  call.require(sources <= INT32_MAX, kBadShape, "more than 2^31 - 1 sources in a list");
  if (!call.ok() || lists * targets == 0) return all;
  if (call.is_on_cpu()) {
    on_cpu(call, lists, InvertOnCpu<Index>{all, index}, 8 * static_cast<double>(sources + targets));
    return all;
  }
#ifdef __CUDACC__
  const int64_t counts = targets * parts;
  cudaMemsetAsync(ends, 0, lists * counts * sizeof(int32_t), call.stream());
  const int64_t blocks = (lists * sources + kPlaceThreads - 1) / kPlaceThreads;
  launch(call, count_kernel<Index>, blocks, kPlaceThreads, 0, all, index);
  Scan places{lists, counts, ScanOrder::kAlong};
  places.exclusive = true;
  places.parts = kScatterScans;
  scan(call, places, PlacesOfCounts{counts, ends}, all.scans);
  constexpr int kWarps = kPlaceThreads / 32;
  if (targets < kSortedKeys) {
    launch(call, place_kernel<Index>, lists * parts, kSortThreads, 0, all, index);
  } else {
    launch(call, place_of_many_kernel<Index>, (lists * parts + kWarps - 1) / kWarps, kPlaceThreads, 0, all, index);
  }
#endif
  return all;
}

// ChannelOrder says where the channels are in `out`: (lists, channels, targets), or (lists, targets, channels).
enum class ChannelOrder { kFirst, kLast };

// Computes one number of `out`.
template <typename F, typename T>
struct ScatterAdd {
  Inverse inverse;
  int64_t channels;
  ChannelOrder order;
  F f;
  T* out;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const I inner = static_cast<I>(order == ChannelOrder::kFirst ? inverse.targets : channels);
    const I middle = static_cast<I>(order == ChannelOrder::kFirst ? channels : inverse.targets);
    const I outer = i / inner, at_inner = i - outer * inner, list = outer / middle, at_middle = outer - list * middle;
    const int64_t channel = order == ChannelOrder::kFirst ? at_middle : at_inner;
    const int64_t target = order == ChannelOrder::kFirst ? at_inner : at_middle;
    Sum<T> sum;
    const int32_t* const end = inverse.end(list, target);
    for (const int32_t* source = inverse.begin(list, target); source < end; ++source)
      sum += f(int64_t{list}, channel, int64_t{*source});
    assign(out[i], sum.total());
  }
};

// out = sum of f(list, channel, source) over the sources of each target, or 0 if it has none. A thread adds up a
// target's sources of one channel, so that a target with far more sources than the others takes longer.
template <typename F, typename T>
void scatter_add(Call& call, const Inverse& inverse, int64_t channels, ChannelOrder order, const F& f, T* out) {
  const int64_t size = inverse.lists * channels * inverse.targets;
  const double terms =
      static_cast<double>(inverse.sources) / static_cast<double>(std::max<int64_t>(1, inverse.targets));
  parallel_for(call, size, size, ScatterAdd<F, T>{inverse, channels, order, f, out}, 1 + 4 * terms);
}

}  // namespace msops
