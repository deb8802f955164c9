// What the kernels of lists_gpu.h do with a tile of a list: stage the rows of `dout`, sort the terms, and add them up.
//
// A block adds up some channels of a list. Their rows of `dout` pass through shared memory, where a place has kLanes
// packs of 16 bytes, of neighbouring channels. A team of kLanes lanes has a point, and reads all packs of a term at
// once, so that few banks conflict. It has the point's features, too, whose product with the term is a term of the
// gradient of the weights.
#pragma once

#include "../../common/gpu/tile_sort.h"
#include "../../common/pack.h"
#include "../../common/parallel.h"
#include "../../common/sum.h"
#include "tiles.h"

namespace msops::gather {

constexpr int kLongList = 16;  // terms of a point; a warp adds up more than that together

template <typename T>
struct ListTask {
  GatherSizes all;
  Indices index;
  const T *dout, *weight;  // weight is null if there is one tap
  T* out;
  bool runs;                      // whether rows of `dout` consist of runs (see PlacePacks)
  const T* features;              // null if there is one tap
  Compute<T>* partial;            // takes the sums of WeightGradient
  int64_t groups = 0, parts = 0;  // of channels, of groups
};

// PlacePacks are the packs of each place in shared memory, in an order for which neither the writes of stage_places nor
// the reads of a team conflict.
template <int kLanes, typename T>
struct PlacePacks {
  static constexpr int kWidth = kPackWidth<T>, kChannels = kLanes * kWidth;
  static constexpr int kRun = kWidth < 4 ? kWidth : 4;  // places that a thread writes
  T* packs;

  static MSOPS_BOTH int64_t bytes(int64_t places) { return (places + 15) / 16 * 16 * kLanes * 16; }

  // Pack `lane` of a place is number first_of(place) ^ lane.
  static __device__ __forceinline__ int first_of(int place) {
    const int pack = place * kLanes;
    constexpr int kPacks = kRun * kLanes;
    return pack ^ (kPacks < 8 ? pack / 8 % kPacks : pack / kPacks % 8);
  }
  __device__ __forceinline__ T* at(int first, int lane) const { return packs + (first ^ lane) * kWidth; }
};

// Copies `places` elements of `count` rows, which are `stride` apart, to a stage. A thread takes kRun neighbours of
// each of a lane's rows at once. Rows that do not consist of such runs, as `runs` says, are read by single elements.
template <int kLanes, typename T>
__device__ __forceinline__ void stage_places(const PlacePacks<kLanes, T>& stage, const T* from, int places,
                                             int64_t stride, int count, bool runs) {
  constexpr int kWidth = kPackWidth<T>, kRun = PlacePacks<kLanes, T>::kRun;
  const int columns = (places + kRun - 1) / kRun;
#pragma unroll 1
  for (int unit = threadIdx.x; unit < columns * kLanes; unit += blockDim.x) {
    const int lane = unit / columns, first = (unit - lane * columns) * kRun;
    Pack<T, kRun> rows[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const T* const row = from + (lane * kWidth + c) * stride + first;
      rows[c] = {};
      if (lane * kWidth + c >= count) continue;
      if (runs) {
        rows[c] = load<kRun>(row);
      } else {
#pragma unroll
        for (int j = 0; j < kRun; ++j)
          if (first + j < places) rows[c].values[j] = row[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      Pack<T, kWidth> pack;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) pack.values[c] = rows[c].values[j];
      store(stage.at(stage.first_of(first + j), lane), pack);
    }
  }
}

// Sorts `size` terms of a list, from `at` on in all terms. A block of kSortThreads threads calls this.
template <int kTaps, int kLanes, typename T>
__device__ __forceinline__ void sort_list(SharedOfSort& sort, const ListTask<T>& task, int64_t at, int size,
                                          const SortedTile<kTaps, T>& tile) {
  const int points = static_cast<int>(task.all.points), rounds = (size + kSortThreads - 1) / kSortThreads;
#pragma unroll 4
  for (int i = threadIdx.x; i < rounds * kSortThreads; i += kSortThreads) {
    const int point = i < size ? task.index[at + i] : points;
    sort.words[0][i] = static_cast<uint32_t>(0 <= point && point < points ? point : points) << kItemBits | i;
  }
  for (int n = threadIdx.x; n < points; n += kSortThreads) tile.bounds[n] = 0;
  __syncthreads();
  const uint32_t* const words = sort.words[sort_words(sort, points, rounds)];
  uint16_t* const bounds = reinterpret_cast<uint16_t*>(tile.bounds);
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += kSortThreads) {
    const int point = words[i] >> kItemBits, term = words[i] & (kTileItems - 1);
    tile.terms[i] = static_cast<uint32_t>(term) << 16 | PlacePacks<kLanes, T>::first_of(term / kTaps);
    if (kTaps > 1) tile.weights[i] = Compute<T>(task.weight[at + term]);
    if (point >= points) continue;
    if (is_head(words, i, points)) bounds[2 * point] = static_cast<uint16_t>(i);
    if (i + 1 == size || static_cast<int>(words[i + 1] >> kItemBits) != point)
      bounds[2 * point + 1] = static_cast<uint16_t>(i + 1);
  }
}

// PointSums adds up the terms of points: a team has kRun neighbouring points, so that a warp writes whole sectors.
template <int kTaps, int kLanes, bool kProducts, typename T>
class PointSums {
 public:
  using C = Compute<T>;
  static constexpr int kWidth = kPackWidth<T>, kChannels = kLanes * kWidth, kRun = sizeof(T) < 4 ? 2 : 1;
  using Sums = C[kRun][kWidth];
  using Own = Pack<T, kRun>[kWidth];  // features of the team's points

  // Calls f(first point) for each run of points of this thread. All lanes of a warp take part in each turn, so that
  // this may not be one of `points`.
  template <typename F>
  static __device__ __forceinline__ void for_runs(int points, const F& f) {
    const int runs = static_cast<int>(blockDim.x) / kLanes, team = static_cast<int>(threadIdx.x) / kLanes;
    const int before = team % (32 / kLanes);  // teams of the warp before this one
    for (int run = team; (run - before) * kRun < points; run += runs) f(run * kRun);
  }

  // Reads or writes a run of each of the lane's channels, as far as there are `channels` and `points`.
  static __device__ __forceinline__ void read(Own& own, const T* from, int stride, int channels, int points) {
    for_elements(channels, points, [&](int c, int r) { own[c].values[r] = from[c * stride + r]; });
  }
  static __device__ __forceinline__ void write(T* to, const Sums& sums, int stride, int channels, int points) {
    for_elements(channels, points, [&](int c, int r) { assign(to[c * stride + r], sums[r][c]); });
  }

  // Adds the terms of points n to n + kRun - 1 to the sums. If kProducts, products with `own` are added to `products`.
  static __device__ __forceinline__ void add(Sums& sums, const PlacePacks<kLanes, T>& stage,
                                             const SortedTile<kTaps, T>& tile, int n, int points, const Own& own,
                                             C* products) {
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      const uint32_t bounds = n + r < points ? tile.bounds[n + r] : 0;
      const int first = bounds & 0xffff, last = bounds >> 16;
      const bool is_long = last - first > kLongList;
      C numbers[kWidth];
#pragma unroll
      for (int c = 0; c < kWidth; ++c) numbers[c] = C(own[c].values[r]);
      add_terms(sums[r], numbers, stage, tile, first, is_long ? first : last, 1, products);
      for (unsigned longs = __ballot_sync(~0u, is_long); longs;) {
        const int owner = (__ffs(static_cast<int>(longs)) - 1) / kLanes * kLanes;
        longs &= ~(((1u << kLanes) - 1) << owner);
        const int lane = threadIdx.x % 32, from = owner + lane % kLanes;
        C shares[kWidth] = {}, of_owner[kWidth];
#pragma unroll
        for (int c = 0; c < kWidth; ++c) of_owner[c] = kProducts ? __shfl_sync(~0u, numbers[c], from) : C(0);
        add_terms(shares, of_owner, stage, tile, __shfl_sync(~0u, first, owner) + lane / kLanes,
                  __shfl_sync(~0u, last, owner), 32 / kLanes, products);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          const C share = team_sum<32, kLanes>(shares[c]);
          if (lane / kLanes * kLanes == owner) sums[r][c] += share;
        }
      }
    }
  }

 private:
  template <typename F>
  static __device__ __forceinline__ void for_elements(int channels, int points, const F& f) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c)
#pragma unroll
      for (int r = 0; r < kRun; ++r)
        if (c < channels && r < points) f(c, r);
  }

  // Adds terms first, first + step, ... below last. All lanes of the warp call this.
  static __device__ __forceinline__ void add_terms(C (&sums)[kWidth], const C (&own)[kWidth],
                                                   const PlacePacks<kLanes, T>& stage, const SortedTile<kTaps, T>& tile,
                                                   int first, int last, int step, C* products) {
    constexpr int kBatch = sizeof(T) < 4 && kProducts ? 1 : 2;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    for (int i = first; __any_sync(~0u, i < last); i += kBatch * step) {
      uint32_t terms[kBatch] = {};
      Pack<T, kWidth> taken[kBatch] = {};
      C weights[kBatch] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (i + b * step < last) {
          terms[b] = tile.terms[i + b * step];
          weights[b] = kTaps > 1 ? tile.weights[i + b * step] : C(1);
        }
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (i + b * step < last) taken[b] = load<kWidth>(stage.at(static_cast<int>(terms[b] & 0xffff), lane));
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        C product = 0;
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          const C d = C(taken[b].values[c]);
          sums[c] += kTaps > 1 ? weights[b] * d : d;
          if (kProducts) product += own[c] * d;
        }
        if constexpr (kProducts) {
          product = team_sum<kLanes>(product);
          if (lane == 0 && i + b * step < last) products[terms[b] >> 16] += product;
        }
      }
    }
  }
};

}  // namespace msops::gather
