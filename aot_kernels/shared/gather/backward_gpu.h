// On the GPU:
//
//   a list has one tile of terms          -> list_kernel of lists_gpu.h: a block sorts, and adds up some channels.
//   SumSizes says that it pays (sums.h)   -> sum_kernel of sums_gpu.h, for both gradients.
//   one tap, few points, not float16      -> sort_lists_kernel, then tiles_kernel of lists_gpu.h.
//   the sums of a range fit shared memory -> sort_kernel, then scatter_kernel for 4, 2 or 1 channels of a block.
//   otherwise (old GPUs, much float64)    -> sum_kernel, with little scratch.
//
// A block of scatter_kernel adds up the terms of some channels of one list for a range of points, whose sums are in
// shared memory. cp.async copies tile after tile there, with its record (see tiles.h): a thread adds the terms of one
// point at a time. So `dout` is read once for a range and in order, and sums have a fixed order.
#pragma once

#include "../../common/gpu/cp_async.h"
#include "../../common/pack.h"
#include "lists_gpu.h"
#include "sums_gpu.h"
#include "tiles.h"
#include "weights_gpu.h"

namespace msops::gather {

template <typename T>
struct ScatterTask {
  GatherSizes all;
  Tiles tiles;
  const TileRecord* records;
  const T *dout, *weight;  // weight is null if there is one tap
  T* out;
  int64_t groups;
};

constexpr int kScatterThreads = 1024;  // at most
constexpr int kMostTiles = 4;          // stages of shared memory

// SharedOfScatter divides the shared memory of a block: the sums, as packs of the block's channels, then the stages.
template <int kTaps, int kRows, typename T>
struct SharedOfScatter {
  using Sums = Pack<Compute<T>, kRows>;
  int points, places;  // of a range and of a tile, at most
  char* memory;

  MSOPS_BOTH int64_t sum_bytes() const { return (points * static_cast<int64_t>(sizeof(Sums)) + 15) / 16 * 16; }
  // Tiles have a multiple of 8 places.
  MSOPS_BOTH int64_t row_bytes() const { return places * static_cast<int64_t>(sizeof(T)); }
  MSOPS_BOTH int64_t stage_bytes() const {
    return (kRows + (kTaps > 1 ? kTaps : 0)) * row_bytes() + static_cast<int64_t>(sizeof(TileRecord));
  }
  MSOPS_BOTH int64_t bytes(int stages) const { return sum_bytes() + stages * stage_bytes(); }

  __device__ Sums* sums() const { return reinterpret_cast<Sums*>(memory); }
  // A stage has the terms of each row, the weights, and the record.
  __device__ T* row(int stage, int row) const {
    return reinterpret_cast<T*>(memory + sum_bytes() + stage * stage_bytes() + row * row_bytes());
  }
  __device__ T* weights(int stage) const { return row(stage, kRows); }
  __device__ TileRecord* record(int stage) const {
    return reinterpret_cast<TileRecord*>(row(stage, kRows + (kTaps > 1 ? kTaps : 0)));
  }
};

// Begins to copy elements to shared memory: packs of 16 bytes if `packs`, else single elements. Elements of 2 bytes,
// which cp.async cannot copy, are there after this.
template <typename T>
__device__ void start_copy(T* to, const T* from, int size, bool packs) {
  constexpr int N = kPackWidth<T>;
  const int threads = blockDim.x;
  if (packs) {
    for (int i = threadIdx.x * N; i < size; i += threads * N) cp_async<16>(to + i, from + i);
  } else if constexpr (sizeof(T) >= 4) {
    for (int i = threadIdx.x; i < size; i += threads) cp_async<sizeof(T)>(to + i, from + i);
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < size; i += threads) to[i] = from[i];
  }
}

// StagedTile is a tile in shared memory.
template <int kTaps, int kRows, typename T>
struct StagedTile {
  using C = Compute<T>;
  const T *rows, *weights;
  int places;  // between rows

  // Returns a term of each row.
  __device__ __forceinline__ Pack<C, kRows> operator[](int term) const {
    const C weight = kTaps > 1 ? C(weights[term]) : C(1);
    Pack<C, kRows> terms;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const C d = C(rows[r * places + term / kTaps]);
      terms.values[r] = kTaps > 1 ? weight * d : d;
    }
    return terms;
  }
};

template <int kRows, typename C>
__device__ __forceinline__ void add(Pack<C, kRows>& sums, const Pack<C, kRows>& terms) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums.values[r] += terms.values[r];
}

// Adds the terms of long segments to the sums: `lanes` lanes of a warp share one.
template <int kTaps, int kRows, typename T, typename C = Compute<T>>
__device__ __forceinline__ void add_longs(const StagedTile<kTaps, kRows, T>& tile, const uint32_t* of_longs, int longs,
                                          const uint16_t* listed, int lanes, Pack<C, kRows>* sums) {
  const int teams = static_cast<int>(blockDim.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  // All lanes of a warp take part in each turn, since they add up together.
  for (int first = 0; first < longs; first += teams) {
    const int i = first + static_cast<int>(threadIdx.x) / lanes;
    const bool inside = i < longs;
    const LongSegment segment = reinterpret_cast<const LongSegment*>(of_longs)[inside ? i : 0];
    Pack<C, kRows> added = {};
    for (int k = inside ? lane : segment.count; k < segment.count; k += lanes)
      add(added, tile[listed[segment.begin + k]]);
    team_sum(added.values, static_cast<unsigned>(lanes));
    if (inside && lane == 0) {
      add(added, sums[segment.point]);
      sums[segment.point] = added;
    }
  }
}

// Adds a tile's terms to the sums. No two segments of a tile have the same point.
template <int kTaps, int kRows, typename T, typename C = Compute<T>>
__device__ __forceinline__ void add_tile(const StagedTile<kTaps, kRows, T>& tile, const TileRecord& record,
                                         Pack<C, kRows>* sums) {
  constexpr int kBatch = 4;       // single segments of a thread at once
  constexpr int kManyLongs = 64;  // a tile with so many has few terms for each
  const int threads = blockDim.x, singles = record.singles, others = record.others;
  const uint32_t *const of_singles = record.body, *const of_longs = of_singles + singles;
  const uint32_t* const of_others = of_longs + 2 * record.longs;
  const uint16_t* const listed = reinterpret_cast<const uint16_t*>(of_others + others);
  for (int first = threadIdx.x; first < singles; first += kBatch * threads) {
    uint32_t words[kBatch];
    Pack<C, kRows> added[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * threads < singles) words[b] = of_singles[first + b * threads];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * threads >= singles) continue;
      added[b] = sums[words[b] >> 16];
      add(added[b], tile[words[b] & 0xffff]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * threads < singles) sums[words[b] >> 16] = added[b];
  }
  for (int i = threadIdx.x; i < others; i += threads) {
    const uint32_t word = of_others[i];
    const int begin = word >> 4 & (kTerms - 1), end = begin + static_cast<int>(word & 15) + 2;
    Pack<C, kRows> added = tile[listed[begin]];
    for (int k = begin + 1; k < end; ++k) add(added, tile[listed[k]]);
    add(added, sums[word >> 16]);
    sums[word >> 16] = added;
  }
  add_longs(tile, of_longs, record.longs, listed, record.longs < kManyLongs ? 32 : 8, sums);
}

template <int kTaps, int kRows, typename T>
__global__ void __launch_bounds__(kScatterThreads) scatter_kernel(ScatterTask<T> task, bool packs, int stages) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char memory[];
  const GatherSizes& all = task.all;
  const Tiles& tiles = task.tiles;
  const int64_t range = blockIdx.x % tiles.ranges, item = blockIdx.x / tiles.ranges;
  const int64_t group = item % task.groups, list = item / task.groups, first = range * tiles.points;
  const int64_t row = list * all.channels + group * kRows;
  const int count = static_cast<int>(min(int64_t{kRows}, all.channels - group * kRows)), threads = blockDim.x;
  const int points = static_cast<int>(min(tiles.points, all.points - first));
  const SharedOfScatter<kTaps, kRows, T> shared{static_cast<int>(tiles.points), static_cast<int>(tiles.places), memory};

  const auto record_of = [&](int64_t tile) { return task.records + tiles.record(list, tile, range); };
  const auto packs_of = [&](int64_t tile) { return tile < tiles.tiles ? record_of(tile)->packs : 0; };
  // Begins to copy a tile, whose record's body has `body` packs of 16 bytes.
  const auto start_tile = [&](int64_t tile, int stage, int body) {
    if (tile < tiles.tiles) {
      const int64_t begin = tile * tiles.places;
      const int places = static_cast<int>(min(tiles.places, all.places - begin));
      start_copy(reinterpret_cast<uint32_t*>(shared.record(stage)), reinterpret_cast<const uint32_t*>(record_of(tile)),
                 4 * (body + 1), true);
      for (int r = 0; r < count; ++r)
        start_copy(shared.row(stage, r), task.dout + (row + r) * all.places + begin, places, packs);
      if constexpr (kTaps > 1)
        start_copy(shared.weights(stage), task.weight + (list * all.places + begin) * kTaps, places * kTaps, packs);
    }
    cp_async_commit();
  };

  int bodies[kMostTiles];
#pragma unroll
  for (int t = 0; t < kMostTiles; ++t) bodies[t] = packs_of(t);
  int next = bodies[kMostTiles - 1];
#pragma unroll
  for (int t = 0; t < kMostTiles - 1; ++t) {
    if (t < stages - 1) start_tile(t, t, bodies[t]);
    if (t == stages - 1) next = bodies[t];
  }
  for (int n = threadIdx.x; n < points; n += threads) shared.sums()[n] = {};
  int stage = 0;
  for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
    const int after = packs_of(tile + stages);
    if (stages == 4) cp_async_wait<2>();
    if (stages == 3) cp_async_wait<1>();
    if (stages == 2) cp_async_wait<0>();
    __syncthreads();
    start_tile(tile + stages - 1, stage > 0 ? stage - 1 : stages - 1, next);
    const StagedTile<kTaps, kRows, T> staged{shared.row(stage, 0), shared.weights(stage), shared.places};
    add_tile(staged, *shared.record(stage), shared.sums());
    next = after, stage = stage + 1 < stages ? stage + 1 : 0;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    T* const to = task.out + (row + r) * all.points + first;
    for (int n = threadIdx.x; n < points; n += threads) assign(to[n], shared.sums()[n].values[r]);
  }
}

template <int kTaps, int kRows, typename T>
int64_t scatter_bytes(const Tiles& tiles, int stages = 2) {
  return SharedOfScatter<kTaps, kRows, T>{static_cast<int>(tiles.points), static_cast<int>(tiles.places), nullptr}
      .bytes(stages);
}

template <int kTaps, int kRows, typename T>
void launch_scatter(Call& call, ScatterTask<T> task, const Gpu& gpu) {
  constexpr int N = kPackWidth<T>;
  const auto bytes_of = [&](int stages) { return scatter_bytes<kTaps, kRows, T>(task.tiles, stages); };
  // Where two blocks fit a multiprocessor, they hide each other's latency.
  const bool two_blocks = 2 * bytes_of(2) <= gpu.dynamic_bytes();
  const int64_t most = two_blocks ? gpu.dynamic_bytes() / 2 : gpu.dynamic_bytes();
  const int threads = two_blocks ? kScatterThreads / 2 : kScatterThreads;
  int stages = 2;
  while (stages < kMostTiles && bytes_of(stages + 1) <= most) ++stages;
  task.groups = (task.all.channels + kRows - 1) / kRows;
  const int64_t blocks = task.all.lists * task.groups * task.tiles.ranges;
  const bool packs = task.all.places % N == 0 && is_aligned<N>(task.dout) && is_aligned<N>(task.weight);
  launch(call, scatter_kernel<kTaps, kRows, T>, blocks, threads, bytes_of(stages), task, packs, stages);
}

// Computes the gradient of the features alone, without sum_kernel, or returns false if that does not fit. `scratch`
// begins at a pack.
template <int kTaps, typename T>
bool scatter_features(Call& call, const ListTask<T>& lists, void* scratch, const Gpu& gpu) {
  const GatherSizes& all = lists.all;
  if (scatter_lists<kTaps>(call, lists, gpu)) return true;
  // In float16, tiles_kernel takes longer than scatter_kernel.
  if constexpr (kTaps == 1 && sizeof(T) > 2)
    if (scatter_tiles(call, lists, scratch, gpu)) return true;
  const Tiles tiles(all, kTaps);
  const int64_t most = gpu.dynamic_bytes();
  if (scatter_bytes<kTaps, 1, T>(tiles) > most) return false;
  TileRecord* const records = static_cast<TileRecord*>(scratch);
  sort_tiles<kTaps>(call, all, tiles, lists.index, records);
  const ScatterTask<T> task{all, tiles, records, lists.dout, lists.weight, lists.out, 0};
  // Channels of a block share the reading of the records, if there are blocks enough for all multiprocessors.
  const auto pays = [&](int rows) {
    return all.channels > rows / 2 && all.lists * (all.channels / rows) * tiles.ranges >= gpu.multiprocessors;
  };
  if constexpr (sizeof(Compute<T>) <= 4)
    if (pays(4) && scatter_bytes<kTaps, 4, T>(tiles) <= most) return launch_scatter<kTaps, 4>(call, task, gpu), true;
  if (pays(2) && scatter_bytes<kTaps, 2, T>(tiles) <= most) return launch_scatter<kTaps, 2>(call, task, gpu), true;
  launch_scatter<kTaps, 1>(call, task, gpu);
  return true;
}

// Computes the gradient of the features and, if there are several taps, that of the weights. `scratch` has room for
// scatter_words().
template <int kTaps, typename T, typename Index>
void scatter_on_gpu(Call& call, const GatherSizes& all, const SumSizes& sizes, const T* dout, const Index* index,
                    const T* weight, int32_t* scratch, T* out, const WeightGradient<T>& weights) {
  const Gpu gpu;
  const Indices indices{index, sizeof(Index) == 8};
  constexpr int kRun = PlacePacks<1, T>::kRun;
  const bool empty = all.rows() * all.points == 0, runs = all.places % kRun == 0 && is_aligned<kRun>(dout);
  const ListTask<T> lists{all, indices, dout, weight, out, runs, weights.features, weights.partial};
  void* const aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch) + 15) / 16 * 16);
  if constexpr (kTaps > 1)
    if (!empty && scatter_lists_and_weights<kTaps>(call, lists, weights, gpu)) return;
  if (!empty && (sizes.pays || !scatter_features<kTaps>(call, lists, aligned, gpu)))
    return sum_sorted<kTaps>(call, all, sizes, dout, indices, weight, aligned, out, weights);
  if constexpr (kTaps > 1) weights_on_gpu<kTaps>(call, all, dout, indices, weights);
}

}  // namespace msops::gather
