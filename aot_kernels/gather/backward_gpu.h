// On the GPU, a block adds up the terms of some channels of one list for a range of points, whose sums are in shared
// memory. cp.async copies tile after tile there, with its record (see tiles.h): a thread adds the terms of one point at
// a time. So `dout` is read once for a range and in order, and sums have a fixed order.
//
//   the sums of a range fit shared memory -> sort_kernel, then scatter_kernel for 4, 2 or 1 channels of a block.
//   otherwise (old GPUs, much float64)    -> scatter_add of scatter.h, which reads `dout` in the order of the points.
#pragma once

#include "../common/gpu/cp_async.h"
#include "../common/gpu/occupancy.h"
#include "../common/pack.h"
#include "../common/scatter.h"
#include "tiles.h"

namespace msops {

template <typename T>
struct ScatterTask {
  Gather all;
  Tiles tiles;
  const TileRecord* records;
  const T *dout, *weight;  // weight is null if there is one tap
  T* out;
  int64_t groups;
};

constexpr int kScatterThreads = 1024;  // at most

// SharedOfScatter divides the shared memory of a block: the sums, as packs of the block's channels, then two stages.
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
  MSOPS_BOTH int64_t bytes() const { return sum_bytes() + 2 * stage_bytes(); }

  __device__ Sums* sums() const { return reinterpret_cast<Sums*>(memory); }
  // A stage has the terms of each row, the weights, and the body of the record.
  __device__ T* row(int stage, int row) const {
    return reinterpret_cast<T*>(memory + sum_bytes() + stage * stage_bytes() + row * row_bytes());
  }
  __device__ T* weights(int stage) const { return row(stage, kRows); }
  __device__ uint32_t* body(int stage) const {
    return reinterpret_cast<uint32_t*>(row(stage, kRows + (kTaps > 1 ? kTaps : 0)));
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

// Adds a tile's terms to the sums. No two segments of a tile have the same point.
template <int kTaps, int kRows, typename T, typename C = Compute<T>>
__device__ __forceinline__ void add_tile(const StagedTile<kTaps, kRows, T>& tile, const int4& sizes,
                                         const uint32_t* body, Pack<C, kRows>* sums) {
  constexpr int kBatch = 4;  // single segments of a thread at once
  const int threads = blockDim.x, longs = sizes.x, singles = sizes.y, others = sizes.z;
  const uint32_t *const of_singles = body + 2 * longs, *const of_others = of_singles + singles;
  const uint16_t* const listed = reinterpret_cast<const uint16_t*>(of_others + others);
  for (int first = threadIdx.x; first < singles; first += kBatch * threads) {
    uint32_t words[kBatch];
    Pack<C, kRows> added[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool inside = first + b * threads < singles;
      words[b] = of_singles[inside ? first + b * threads : first];
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
    Pack<C, kRows> added = {};
    for (int k = begin; k < end; ++k) add(added, tile[listed[k]]);
    add(added, sums[word >> 16]);
    sums[word >> 16] = added;
  }
  for (int i = threadIdx.x / 32; i < longs; i += threads / 32) {
    const LongSegment segment = reinterpret_cast<const LongSegment*>(body)[i];
    Pack<C, kRows> added = {};
    for (int k = threadIdx.x % 32; k < segment.count; k += 32) add(added, tile[listed[segment.begin + k]]);
    team_sum(added.values, 32);
    if (threadIdx.x % 32 == 0) {
      add(added, sums[segment.point]);
      sums[segment.point] = added;
    }
  }
}

template <int kTaps, int kRows, typename T>
__global__ void __launch_bounds__(kScatterThreads) scatter_kernel(ScatterTask<T> task, bool packs) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const Tiles& tiles = task.tiles;
  const int64_t range = blockIdx.x % tiles.ranges, item = blockIdx.x / tiles.ranges;
  const int64_t group = item % task.groups, list = item / task.groups, first = range * tiles.points;
  const int64_t row = list * all.channels + group * kRows;
  const int count = static_cast<int>(min(int64_t{kRows}, all.channels - group * kRows)), threads = blockDim.x;
  const int points = static_cast<int>(min(tiles.points, all.points - first));
  const SharedOfScatter<kTaps, kRows, T> shared{static_cast<int>(tiles.points), static_cast<int>(tiles.places), memory};

  const auto record_of = [&](int64_t tile) { return task.records + tiles.record(list, tile, range); };
  const auto sizes_of = [&](int64_t tile) {
    return tile < tiles.tiles ? *reinterpret_cast<const int4*>(record_of(tile)) : make_int4(0, 0, 0, 0);
  };
  const auto start_tile = [&](int64_t tile, const int4& sizes) {
    if (tile < tiles.tiles) {
      const int64_t begin = tile * tiles.places;
      const int places = static_cast<int>(min(tiles.places, all.places - begin)), stage = tile % 2;
      start_copy(shared.body(stage), record_of(tile)->body, 4 * sizes.w, true);
      for (int r = 0; r < count; ++r)
        start_copy(shared.row(stage, r), task.dout + (row + r) * all.places + begin, places, packs);
      if constexpr (kTaps > 1)
        start_copy(shared.weights(stage), task.weight + (list * all.places + begin) * kTaps, places * kTaps, packs);
    }
    cp_async_commit();
  };

  int4 sizes = sizes_of(0), next = sizes_of(1);
  for (int n = threadIdx.x; n < points; n += threads) shared.sums()[n] = {};
  start_tile(0, sizes);
  for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
    start_tile(tile + 1, next);
    const int4 after = sizes_of(tile + 2);
    cp_async_wait<1>();
    __syncthreads();
    const int stage = tile % 2;
    const StagedTile<kTaps, kRows, T> staged{shared.row(stage, 0), shared.weights(stage), shared.places};
    add_tile(staged, sizes, shared.body(stage), shared.sums());
    __syncthreads();
    sizes = next, next = after;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    T* const to = task.out + (row + r) * all.points + first;
    for (int n = threadIdx.x; n < points; n += threads) assign(to[n], shared.sums()[n].values[r]);
  }
}

template <int kTaps, int kRows, typename T>
int64_t scatter_bytes(const Tiles& tiles) {
  return SharedOfScatter<kTaps, kRows, T>{static_cast<int>(tiles.points), static_cast<int>(tiles.places), nullptr}
      .bytes();
}

template <int kTaps, int kRows, typename T>
void launch_scatter(Call& call, ScatterTask<T> task, const Gpu& gpu) {
  constexpr int N = kPackWidth<T>;
  const auto kernel = scatter_kernel<kTaps, kRows, T>;
  const int64_t bytes = scatter_bytes<kTaps, kRows, T>(task.tiles);
  allow_shared_memory(kernel, bytes);
  task.groups = (task.all.channels + kRows - 1) / kRows;
  const int64_t blocks = task.all.lists * task.groups * task.tiles.ranges;
  call.require(blocks <= INT32_MAX, kBadShape, "too many channels for one launch");
  if (!call.ok()) return;
  const bool packs = task.all.places % N == 0 && is_aligned<N>(task.dout) && is_aligned<N>(task.weight);
  // Where two blocks fit a multiprocessor, they hide each other's latency.
  const int threads = 2 * bytes <= gpu.dynamic_bytes() ? kScatterThreads / 2 : kScatterThreads;
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, call.stream()>>>(task, packs);
  call.check_launch();
}

// A term of scatter_add.
template <int kTaps, typename T>
struct TermOf {
  Gather all;
  const T *dout, *weight;

  MSOPS_BOTH Compute<T> operator()(int64_t list, int64_t channel, int64_t term) const {
    const Compute<T> d = Compute<T>(dout[(list * all.channels + channel) * all.places + term / kTaps]);
    return kTaps > 1 ? Compute<T>(weight[list * all.places * kTaps + term]) * d : d;
  }
};

template <int kTaps, typename T, typename Index>
void scatter_on_gpu(Call& call, const Gather& all, const T* dout, const Index* index, const T* weight, int32_t* scratch,
                    T* out) {
  if (all.rows() * all.points == 0) return;
  const Tiles tiles(all, kTaps);
  const Gpu gpu;
  const int64_t most = gpu.dynamic_bytes();
  if (scatter_bytes<kTaps, 1, T>(tiles) > most) {
    const Inverse inverse = invert(call, all.lists, all.points, all.places * kTaps, index, scratch);
    scatter_add(call, inverse, all.channels, ChannelOrder::kFirst, TermOf<kTaps, T>{all, dout, weight}, out);
    return;
  }
  TileRecord* const records = reinterpret_cast<TileRecord*>((reinterpret_cast<uintptr_t>(scratch) + 15) / 16 * 16);
  sort_tiles<kTaps>(call, all, tiles, {index, sizeof(Index) == 8}, records);
  const ScatterTask<T> task{all, tiles, records, dout, weight, out, 0};
  // Channels of a block share the reading of the records, if there are blocks enough for all multiprocessors.
  const auto pays = [&](int rows) {
    return all.channels > rows / 2 && all.lists * (all.channels / rows) * tiles.ranges >= gpu.multiprocessors;
  };
  if constexpr (sizeof(Compute<T>) <= 4)
    if (pays(4) && scatter_bytes<kTaps, 4, T>(tiles) <= most) return launch_scatter<kTaps, 4>(call, task, gpu);
  if (pays(2) && scatter_bytes<kTaps, 2, T>(tiles) <= most) return launch_scatter<kTaps, 2>(call, task, gpu);
  launch_scatter<kTaps, 1>(call, task, gpu);
}

}  // namespace msops
