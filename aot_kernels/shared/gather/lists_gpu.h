// On the GPU, the gradient of lists whose terms fit one tile: a block sorts the terms of a list by their points, and
// then adds up some of the list's channels. Their rows of `dout` pass through shared memory, where each thread gathers
// the terms of its points. So there is one launch. (Lists of more tiles took longer than by the kernels of
// backward_gpu.h.)
#pragma once

#include "../../common/gpu/tile_sort.h"
#include "../../common/sum.h"
#include "stages_gpu.h"

namespace msops::gather {

template <typename T>
struct ListTask {
  Gather all;
  Indices index;
  const T *dout, *weight;  // weight is null if there is one tap
  T* out;
  int64_t groups, parts;  // of channels, of groups
  int stages;             // of shared memory: 2, or 1 if a block has one group
};

constexpr int kLongList = 16;  // terms of a point; a warp adds up more than that together

// SharedOfList divides the shared memory of a block.
template <int kTaps, typename T>
struct SharedOfList {
  using C = Compute<T>;
  static constexpr int kChannels = kWideChannels<T>, kPlaces = kTileItems / kTaps;  // of a stage
  static constexpr int kStage = kPlaces * kChannels;
  static constexpr int64_t kSortBytes = (sizeof(SharedOfSort) + 15) / 16 * 16;
  static constexpr int64_t kWeightBytes = kTaps > 1 ? kTileItems * sizeof(C) : 0;
  int64_t points, stages;
  char* memory;

  MSOPS_BOTH int64_t stage_bytes() const { return stages * kStage * static_cast<int64_t>(sizeof(T)); }
  MSOPS_BOTH int64_t bytes() const { return kSortBytes + stage_bytes() + kWeightBytes + 4 * points + 2 * kTileItems; }

  __device__ SharedOfSort& sort() const { return *reinterpret_cast<SharedOfSort*>(memory); }
  // A stage has the packs of all places, (kPlaces, kChannels).
  __device__ T* stage(int64_t i) const { return reinterpret_cast<T*>(memory + kSortBytes) + i * kStage; }
  // The weights and places are those of the sorted terms.
  __device__ C* weights() const { return reinterpret_cast<C*>(memory + kSortBytes + stage_bytes()); }
  // Where a point's terms begin, and in the upper half, where they end.
  __device__ uint32_t* bounds() const {
    return reinterpret_cast<uint32_t*>(memory + kSortBytes + stage_bytes() + kWeightBytes);
  }
  __device__ uint16_t* places() const { return reinterpret_cast<uint16_t*>(bounds() + points); }
};

// Sorts the terms of a list by their points.
template <int kTaps, typename T>
__device__ __forceinline__ void sort_list(const SharedOfList<kTaps, T>& shared, const ListTask<T>& task, int64_t list) {
  const int64_t at = list * task.all.places * kTaps;
  const int points = static_cast<int>(task.all.points), terms = static_cast<int>(task.all.places) * kTaps;
  const int rounds = (terms + kSortThreads - 1) / kSortThreads, size = rounds * kSortThreads;
  SharedOfSort& sort = shared.sort();
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += kSortThreads) {
    const int point = i < terms ? task.index[at + i] : points;
    sort.words[0][i] = static_cast<uint32_t>(0 <= point && point < points ? point : points) << kItemBits | i;
  }
  uint16_t* const bounds = reinterpret_cast<uint16_t*>(shared.bounds());
  for (int n = threadIdx.x; n < 2 * points; n += kSortThreads) bounds[n] = 0;
  __syncthreads();
  const uint32_t* const words = sort.words[sort_words(sort, points, rounds)];
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += kSortThreads) {
    const int point = words[i] >> kItemBits, term = words[i] & (kTileItems - 1);
    if (point >= points) continue;
    shared.places()[i] = static_cast<uint16_t>(term / kTaps);
    if (kTaps > 1) shared.weights()[i] = Compute<T>(task.weight[at + term]);
    if (is_head(words, i, points)) bounds[2 * point] = static_cast<uint16_t>(i);
    if (i + 1 == size || static_cast<int>(words[i + 1] >> kItemBits) != point)
      bounds[2 * point + 1] = static_cast<uint16_t>(i + 1);
  }
  __syncthreads();
}

template <int kTaps, typename T>
__global__ void __launch_bounds__(kSortThreads, 2) list_kernel(ListTask<T> task) {
  using C = Compute<T>;
  using Shared = SharedOfList<kTaps, T>;
  constexpr int kChannels = Shared::kChannels;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const int points = static_cast<int>(all.points), lane = threadIdx.x % 32;
  const int64_t part = blockIdx.x % task.parts, list = blockIdx.x / task.parts;
  const int64_t end = part_begin(task.groups, part + 1, task.parts);
  const Shared shared{all.points, task.stages, memory};
  const auto count_of = [&](int64_t group) {
    return static_cast<int>(min(all.channels - group * kChannels, int64_t{kChannels}));
  };
  const int64_t begin = part_begin(task.groups, part, task.parts);
  const auto stage_of = [&](int64_t group) { return shared.stage((group - begin) % 2); };
  const auto start = [&](int64_t group) {
    if (group < end)
      stage_rows<kChannels>(stage_of(group), task.dout + (list * all.channels + group * kChannels) * all.places,
                            static_cast<int>(all.places), all.places, count_of(group), false);
    cp_async_commit();
  };
  start(begin);  // the first rows are copied while the block sorts
  sort_list<kTaps>(shared, task, list);
  const uint32_t* const bounds_of = shared.bounds();
  const uint16_t* const places = shared.places();
  const C* const weights = shared.weights();
  for (int64_t group = begin; group < end; ++group) {
    cp_async_wait<0>();
    __syncthreads();
    start(group + 1);
    const T* const staged = stage_of(group);
    const int count = count_of(group);
    T* const to = task.out + (list * all.channels + group * kChannels) * all.points;
    const auto add_terms = [&](C(&sums)[kChannels], int i, int last, int step) {
#pragma unroll 2
      for (; i < last; i += step) {
        const Pack<T, kChannels> taken = load<kChannels>(staged + places[i] * kChannels);
        const C weight = kTaps > 1 ? weights[i] : C(1);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sums[c] += kTaps > 1 ? weight * C(taken.values[c]) : C(taken.values[c]);
      }
    };
    // All lanes of a warp take part in each turn.
    for (int n = threadIdx.x; n - lane < points; n += kSortThreads) {
      const uint32_t bounds = n < points ? bounds_of[n] : 0;
      const int first = bounds & 0xffff, last = bounds >> 16;
      const bool is_long = last - first > kLongList;
      C sums[kChannels] = {};
      add_terms(sums, first, is_long ? first : last, 1);
      for (unsigned longs = __ballot_sync(~0u, is_long); longs; longs &= longs - 1) {
        const int owner = __ffs(static_cast<int>(longs)) - 1;
        C shares[kChannels] = {};
        add_terms(shares, __shfl_sync(~0u, first, owner) + lane, __shfl_sync(~0u, last, owner), 32);
        team_sum(shares, 32);
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
          if (lane == owner) sums[c] += shares[c];
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (n < points && c < count) assign(to[c * all.points + n], sums[c]);
      }
    }
  }
}

// Adds up the terms of lists that fit a tile, and returns whether they do, and shared memory has room.
template <int kTaps, typename T>
bool scatter_lists(Call& call, const Gather& all, const T* dout, Indices index, const T* weight, T* out) {
  using Shared = SharedOfList<kTaps, T>;
  if (all.places > Shared::kPlaces) return false;
  const int64_t groups = (all.channels + Shared::kChannels - 1) / Shared::kChannels;
  const Gpu gpu;
  const int stages = groups > 1 ? 2 : 1;
  const int64_t bytes = Shared{all.points, stages, nullptr}.bytes();
  if (bytes > gpu.dynamic_bytes()) return false;
  const int64_t slots = blocks_at_once(gpu, list_kernel<kTaps, T>, kSortThreads, bytes);
  const int64_t parts = std::max<int64_t>(1, std::min(groups, slots / all.lists));
  const ListTask<T> task{all, index, dout, weight, out, groups, parts, stages};
  launch(call, list_kernel<kTaps, T>, all.lists * parts, kSortThreads, bytes, task);
  return true;
}

}  // namespace msops::gather
