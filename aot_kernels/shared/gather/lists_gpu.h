// On the GPU, the gradient of lists that have few points. A list's terms are cut into tiles and sorted by their points:
// by each block itself if there is one tile, so that there is one launch, else once for all blocks by
// sort_lists_kernel.
//
// A block adds up some channels of a list. Their rows of `dout` pass through shared memory, where a place has kLanes
// packs of 16 bytes, of neighbouring channels. A team of kLanes lanes has a point, and reads all packs of a term at
// once, so that few banks conflict. It has the point's features, too, whose product with the term is a term of the
// gradient of the weights.
#pragma once

#include "../../common/gpu/cp_async.h"
#include "../../common/gpu/tile_sort.h"
#include "../../common/pack.h"
#include "../../common/parallel.h"
#include "../../common/sum.h"
#include "tiles.h"

namespace msops::gather {

constexpr int kLongList = 16;  // terms of a point; a warp adds up more than that together

template <typename T>
struct ListTask {
  Gather all;
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

// SharedOfList divides the shared memory of a block whose list has one tile.
template <int kTaps, int kLanes, typename T>
struct SharedOfList {
  using C = Compute<T>;
  using Stage = PlacePacks<kLanes, T>;
  static constexpr int kPlaces = std::min(kTileItems / kTaps, (64 << 10) / (16 * kLanes));  // at most
  static constexpr bool kProducts = kTaps > 1 && kLanes > 1;
  int64_t points, places;
  char* memory;

  // The words that are sorted have the place of the stage.
  MSOPS_BOTH int64_t stage_bytes() const {
    return std::max<int64_t>(Stage::bytes(places), (sizeof(SharedOfSort) + 15) / 16 * 16);
  }
  MSOPS_BOTH int64_t product_bytes() const { return kProducts ? places * kTaps * static_cast<int64_t>(sizeof(C)) : 0; }
  MSOPS_BOTH int64_t bytes() const {
    return stage_bytes() + 4 * SortedTile<kTaps, T>::words(points, places * kTaps) + product_bytes();
  }

  __device__ SharedOfSort& sort() const { return *reinterpret_cast<SharedOfSort*>(memory); }
  __device__ Stage stage() const { return {reinterpret_cast<T*>(memory)}; }
  __device__ SortedTile<kTaps, T> tile() const {
    return {reinterpret_cast<uint32_t*>(memory + stage_bytes()), points, places * kTaps};
  }
  __device__ C* products() const { return reinterpret_cast<C*>(memory + bytes() - product_bytes()); }
};

template <int kTaps, int kLanes, typename T>
__global__ void __launch_bounds__(kSortThreads, 2) list_kernel(ListTask<T> task) {
  using C = Compute<T>;
  using Shared = SharedOfList<kTaps, kLanes, T>;
  using Points = PointSums<kTaps, kLanes, Shared::kProducts, T>;
  constexpr int kWidth = Points::kWidth, kChannels = Points::kChannels;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const int points = static_cast<int>(all.points), places = static_cast<int>(all.places), terms = places * kTaps;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t part = blockIdx.x % task.parts, list = blockIdx.x / task.parts;
  const int64_t end = part_begin(task.groups, part + 1, task.parts);
  const Shared shared{all.points, all.places, memory};
  const SortedTile<kTaps, T> tile = shared.tile();
  C* const products = shared.products();
  for (int i = threadIdx.x; Shared::kProducts && i < terms; i += kSortThreads) products[i] = 0;
  sort_list<kTaps, kLanes>(shared.sort(), task, list * terms, terms, tile);
  for (int64_t group = part_begin(task.groups, part, task.parts); group < end; ++group) {
    const int64_t channel = list * all.channels + group * kChannels;
    const int count = static_cast<int>(min(all.channels - group * kChannels, int64_t{kChannels}));
    __syncthreads();  // no thread reads the words, or the stage, any more
    stage_places(shared.stage(), task.dout + channel * all.places, places, all.places, count, task.runs);
    __syncthreads();
    const int channels = count - lane * kWidth;  // of this lane
    const int64_t at = (channel + lane * kWidth) * all.points;
    Points::for_runs(points, [&](int n) {
      typename Points::Own own = {};
      if constexpr (Shared::kProducts) Points::read(own, task.features + at + n, points, channels, points - n);
      typename Points::Sums sums = {};
      Points::add(sums, shared.stage(), tile, n, points, own, products);
      Points::write(task.out + at + n, sums, points, channels, points - n);
    });
  }
  if constexpr (Shared::kProducts) {
    __syncthreads();
    C* const to = task.partial + (part * all.lists + list) * terms;
    for (int i = threadIdx.x; i < terms; i += kSortThreads) to[i] = products[i];
  }
}

// Launches the kernel and returns the number of parts, or returns 0 if it does not fit or does not pay. Products with
// the features have at most `most` parts.
template <int kTaps, int kLanes, typename T>
int64_t launch_lists(Call& call, ListTask<T> task, int64_t most, const Gpu& gpu) {
  using Shared = SharedOfList<kTaps, kLanes, T>;
  constexpr int kChannels = Shared::Stage::kChannels;
  const Gather& all = task.all;
  const int64_t bytes = Shared{all.points, all.places, nullptr}.bytes();
  task.groups = (all.channels + kChannels - 1) / kChannels;
  if (all.places > Shared::kPlaces || bytes > gpu.dynamic_bytes()) return 0;
  if constexpr (kLanes > 1) {
    // Teams pay where two blocks of a multiprocessor hide each other's latency, and there are blocks enough.
    const bool enough = Shared::kProducts ? all.lists > 1 : 2 * all.lists * task.groups >= gpu.multiprocessors;
    if (bytes > gpu.dynamic_bytes() / 2 || all.channels < kChannels || !enough) return 0;
  }
  const int64_t slots = blocks_at_once(gpu, list_kernel<kTaps, kLanes, T>, kSortThreads, bytes);
  task.parts = std::max<int64_t>(1, std::min({task.groups, Shared::kProducts ? most : task.groups, slots / all.lists}));
  launch(call, list_kernel<kTaps, kLanes, T>, all.lists * task.parts, kSortThreads, bytes, task);
  return task.parts;
}

// SharedOfTiles divides the shared memory of a block whose list has several tiles, of one tap.
template <int kLanes, typename T>
struct SharedOfTiles {
  using Stage = PlacePacks<kLanes, T>;
  using Sums = Pack<Compute<T>, Stage::kWidth>;
  int64_t points;
  char* memory;

  static MSOPS_BOTH int64_t words(int64_t points) { return SortedTile<1, T>::words(points, kListPlaces); }
  MSOPS_BOTH int64_t packs() const { return (points + 1) / 2 * 2 * kLanes; }  // of the sums
  MSOPS_BOTH int64_t sum_bytes() const { return packs() * static_cast<int64_t>(sizeof(Sums)); }
  MSOPS_BOTH int64_t bytes() const { return Stage::bytes(kListPlaces) + sum_bytes() + 4 * words(points); }

  __device__ Stage stage() const { return {reinterpret_cast<T*>(memory)}; }
  __device__ Sums* sums() const { return reinterpret_cast<Sums*>(memory + Stage::bytes(kListPlaces)); }
  __device__ uint32_t* tile() const { return reinterpret_cast<uint32_t*>(memory + bytes() - 4 * words(points)); }
};

template <int kLanes, typename T>
__global__ void __launch_bounds__(kSortThreads) sort_lists_kernel(ListTask<T> task, int64_t tiles, uint32_t* sorted) {
  __shared__ SharedOfSort shared;
  const int64_t list = blockIdx.x / tiles, first = blockIdx.x % tiles * kListPlaces;
  const int places = static_cast<int>(min(task.all.places - first, int64_t{kListPlaces}));
  const int64_t words = SharedOfTiles<kLanes, T>::words(task.all.points);
  sort_list<1, kLanes>(shared, task, list * task.all.places + first, places,
                       {sorted + blockIdx.x * words, task.all.points, kListPlaces});
}

template <int kLanes, typename T>
__global__ void __launch_bounds__(kSortThreads, 2)
    tiles_kernel(ListTask<T> task, int64_t tiles, const uint32_t* sorted) {
  using Shared = SharedOfTiles<kLanes, T>;
  using Points = PointSums<1, kLanes, false, T>;
  constexpr int kWidth = Points::kWidth, kChannels = Points::kChannels;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const int points = static_cast<int>(all.points), lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t group = blockIdx.x % task.groups, list = blockIdx.x / task.groups;
  const int64_t channel = list * all.channels + group * kChannels;
  const int count = static_cast<int>(min(all.channels - group * kChannels, int64_t{kChannels}));
  const Shared shared{all.points, memory};
  const int64_t words = Shared::words(all.points);
  const SortedTile<1, T> tile{shared.tile(), all.points, kListPlaces};
  const auto sums_of = [&](int n) { return shared.sums() + n * kLanes + lane * Points::kRun; };
  for (int i = threadIdx.x; i < shared.packs(); i += kSortThreads) shared.sums()[i] = {};
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = t * kListPlaces;
    const uint32_t* const from = sorted + (list * tiles + t) * words;
    __syncthreads();  // no thread reads the tile before any more
    for (int i = 4 * static_cast<int>(threadIdx.x); i < words; i += 4 * kSortThreads)
      cp_async<16>(shared.tile() + i, from + i);
    cp_async_commit();
    stage_places(shared.stage(), task.dout + channel * all.places + first,
                 static_cast<int>(min(all.places - first, int64_t{kListPlaces})), all.places, count, task.runs);
    cp_async_wait<0>();
    __syncthreads();
    Points::for_runs(points, [&](int n) {
      typename Points::Sums sums = {};
      if (n < points) memcpy(sums, sums_of(n), sizeof sums);
      Points::add(sums, shared.stage(), tile, n, points, typename Points::Own{}, nullptr);
      if (n < points) memcpy(sums_of(n), sums, sizeof sums);
    });
  }
  Points::for_runs(points, [&](int n) {
    typename Points::Sums sums;
    if (n < points) memcpy(sums, sums_of(n), sizeof sums);
    Points::write(task.out + (channel + lane * kWidth) * all.points + n, sums, points, count - lane * kWidth,
                  points - n);
  });
}

// Adds up the terms of lists of few points and one tap by tiles, and returns whether that fits and pays. `scratch` has
// room for the sorted tiles.
template <typename T>
bool scatter_tiles(Call& call, ListTask<T> task, void* scratch, const Gpu& gpu) {
  constexpr int kLanes = sizeof(T) / 2;
  using Shared = SharedOfTiles<kLanes, T>;
  constexpr int kChannels = Shared::Stage::kChannels;
  const Gather& all = task.all;
  const int64_t bytes = Shared{all.points, nullptr}.bytes();
  task.groups = (all.channels + kChannels - 1) / kChannels;
  if (all.points > kListPoints || all.channels < kChannels) return false;
  if (2 * bytes > gpu.dynamic_bytes() || all.lists * task.groups < gpu.multiprocessors) return false;
  const int64_t tiles = (all.places + kListPlaces - 1) / kListPlaces;
  uint32_t* const sorted = static_cast<uint32_t*>(scratch);
  launch(call, sort_lists_kernel<kLanes, T>, all.lists * tiles, kSortThreads, 0, task, tiles, sorted);
  launch(call, tiles_kernel<kLanes, T>, all.lists * task.groups, kSortThreads, bytes, task, tiles, sorted);
  return true;
}

// Adds up the terms of lists that have one tile, and returns whether that fits and pays.
template <int kTaps, typename T>
bool scatter_lists(Call& call, const ListTask<T>& task, const Gpu& gpu) {
  if constexpr (kTaps == 1)
    if (launch_lists<kTaps, 4>(call, task, 0, gpu) > 0 || launch_lists<kTaps, 2>(call, task, 0, gpu) > 0) return true;
  return launch_lists<kTaps, 1>(call, task, 0, gpu) > 0;
}

// Does the same for both gradients of an interpolation.
template <int kTaps, typename T>
bool scatter_lists_and_weights(Call& call, const ListTask<T>& task, const WeightGradient<T>& weights, const Gpu& gpu) {
  const int64_t parts = launch_lists<kTaps, 4>(call, task, weights.most, gpu);
  if (parts == 0) return false;
  const int64_t size = task.all.lists * task.all.places * kTaps;
  sum_rows(call, parts, size, size, static_cast<const Compute<T>*>(weights.partial), weights.dweight);
  return true;
}

}  // namespace msops::gather
