// On the GPU, the gradient of lists that have few points. A list's terms are cut into tiles and sorted by their points:
// by each block itself if there is one tile, so that there is one launch, else once for all blocks by
// sort_lists_kernel.
//
// A block adds up some channels of a list (see list_tiles_gpu.h).
#pragma once

#include "../../common/gpu/cp_async.h"
#include "../../common/sum.h"
#include "list_tiles_gpu.h"

namespace msops::gather {

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
  const GatherSizes& all = task.all;
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
  const GatherSizes& all = task.all;
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
  const GatherSizes& all = task.all;
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
  const GatherSizes& all = task.all;
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
