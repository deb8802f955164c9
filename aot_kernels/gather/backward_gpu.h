// On the GPU, a block adds up the terms of some channels of one list for a range of points, whose sums are in shared
// memory. It copies tile after tile there, and a thread adds up a segment at a time: the terms of one point in the tile
// (see tiles.h). So `dout` is read once and in order, and sums have a fixed order.
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

constexpr int kScatterThreads = 1024;

// SharedOfScatter divides the shared memory of a block.
template <int kTaps, int kRows, typename T>
struct SharedOfScatter {
  using C = Compute<T>;
  int64_t points, places;
  char* memory;

  MSOPS_BOTH int64_t sum_bytes() const { return (kRows * points * static_cast<int64_t>(sizeof(C)) + 15) / 16 * 16; }
  MSOPS_BOTH int64_t stage_elements() const { return (kRows + (kTaps > 1 ? kTaps : 0)) * places; }
  MSOPS_BOTH int64_t bytes() const { return sum_bytes() + 2 * stage_elements() * static_cast<int64_t>(sizeof(T)); }

  __device__ C* sums(int row) const { return reinterpret_cast<C*>(memory) + row * points; }
  // The terms of a row, and the weights, of a tile. Two stages take turns.
  __device__ T* row(int stage, int row) const {
    return reinterpret_cast<T*>(memory + sum_bytes()) + stage * stage_elements() + row * places;
  }
  __device__ T* weights(int stage) const { return row(stage, kRows); }
};

// Begins to copy elements to shared memory: packs of 16 bytes if kPacks, else single elements, at once.
template <bool kPacks, typename T>
__device__ void start_copy(T* to, const T* from, int size) {
  if constexpr (kPacks) {
    constexpr int N = kPackWidth<T>;
    for (int i = threadIdx.x * N; i < size; i += kScatterThreads * N) cp_async<16>(to + i, from + i);
  } else {
    for (int i = threadIdx.x; i < size; i += kScatterThreads) to[i] = from[i];
  }
}

template <int kTaps, int kRows, bool kPacks, typename T>
__global__ void __launch_bounds__(kScatterThreads) scatter_kernel(ScatterTask<T> task) {
  using C = Compute<T>;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const Tiles& tiles = task.tiles;
  const int64_t range = blockIdx.x % tiles.ranges, item = blockIdx.x / tiles.ranges;
  const int64_t group = item % task.groups, list = item / task.groups, first = range * kRangePoints;
  const int64_t row = list * all.channels + group * kRows, channels_left = all.channels - group * kRows;
  const int count = static_cast<int>(channels_left < kRows ? channels_left : kRows);
  const int points = static_cast<int>(all.points - first < kRangePoints ? all.points - first : kRangePoints);
  const int most = static_cast<int>(all.points < kRangePoints ? all.points : kRangePoints);
  const SharedOfScatter<kTaps, kRows, T> shared{most, tiles.places, memory};

  const auto start_tile = [&](int64_t tile) {
    if (tile < tiles.tiles) {
      const int64_t begin = tile * tiles.places, left = all.places - begin;
      const int places = static_cast<int>(left < tiles.places ? left : tiles.places), stage = tile % 2;
      for (int r = 0; r < count; ++r)
        start_copy<kPacks>(shared.row(stage, r), task.dout + (row + r) * all.places + begin, places);
      if constexpr (kTaps > 1)
        start_copy<kPacks>(shared.weights(stage), task.weight + (list * all.places + begin) * kTaps, places * kTaps);
    }
    cp_async_commit();
  };

  // Returns the sums of every step-th of a segment's terms.
  const auto add_terms = [&](const TileRecord& record, const Segment& segment, int stage, int begin, int step,
                             C(&sums)[kRows]) {
    for (int i = begin; i < segment.count; i += step) {
      const int term = i == 0 ? segment.term : record.terms[segment.begin + i];
      const C weight = kTaps > 1 ? C(shared.weights(stage)[term]) : C(1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const C d = r < count ? C(shared.row(stage, r)[term / kTaps]) : C(0);
        sums[r] += kTaps > 1 ? weight * d : d;
      }
    }
  };

  for (int r = 0; r < kRows; ++r)
    for (int n = threadIdx.x; n < points; n += kScatterThreads) shared.sums(r)[n] = C(0);
  start_tile(0);
  for (int64_t tile = 0; tile < tiles.tiles; ++tile) {
    start_tile(tile + 1);
    cp_async_wait<1>();
    __syncthreads();
    const TileRecord& record = task.records[tiles.record(list, tile, range)];
    const int stage = tile % 2, segments = record.segment_count, longs = record.long_count;
    for (int s = threadIdx.x; s < segments; s += kScatterThreads) {
      const Segment segment = record.segments[s];
      if (segment.count > kLongSegment) continue;
      C sums[kRows] = {};
      add_terms(record, segment, stage, 0, 1, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) shared.sums(r)[segment.point] += sums[r];
    }
    for (int l = threadIdx.x / 32; l < longs; l += kScatterThreads / 32) {
      const Segment segment = record.segments[record.longs[l]];
      C sums[kRows] = {};
      add_terms(record, segment, stage, threadIdx.x % 32, 32, sums);
      team_sum(sums, 32);
      if (threadIdx.x % 32 == 0)
        for (int r = 0; r < kRows; ++r) shared.sums(r)[segment.point] += sums[r];
    }
    __syncthreads();
  }
  for (int r = 0; r < count; ++r) {
    T* const to = task.out + (row + r) * all.points + first;
    for (int n = threadIdx.x; n < points; n += kScatterThreads) assign(to[n], shared.sums(r)[n]);
  }
}

template <int kTaps, int kRows, typename T>
int64_t scatter_bytes(const Gather& all, const Tiles& tiles) {
  return SharedOfScatter<kTaps, kRows, T>{std::min(all.points, kRangePoints), tiles.places, nullptr}.bytes();
}

template <int kTaps, int kRows, bool kPacks, typename T>
void launch_scatter(Call& call, ScatterTask<T> task) {
  const auto kernel = scatter_kernel<kTaps, kRows, kPacks, T>;
  const int64_t bytes = scatter_bytes<kTaps, kRows, T>(task.all, task.tiles);
  if (bytes > 48 << 10) allow_shared_memory(kernel, bytes);
  task.groups = (task.all.channels + kRows - 1) / kRows;
  const int64_t blocks = task.all.lists * task.groups * task.tiles.ranges;
  call.require(blocks <= INT32_MAX, kBadShape, "too many channels for one launch");
  if (!call.ok()) return;
  kernel<<<static_cast<unsigned>(blocks), kScatterThreads, bytes, call.stream()>>>(task);
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
  const int64_t most = Gpu().dynamic_bytes();
  const int64_t four = scatter_bytes<kTaps, 4, T>(all, tiles), two = scatter_bytes<kTaps, 2, T>(all, tiles);
  if (scatter_bytes<kTaps, 1, T>(all, tiles) > most) {
    const Inverse inverse = invert(call, all.lists, all.points, all.places * kTaps, index, scratch);
    scatter_add(call, inverse, all.channels, ChannelOrder::kFirst, TermOf<kTaps, T>{all, dout, weight}, out);
    return;
  }
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(scratch) + 7) / 8 * 8;
  TileRecord* const records = reinterpret_cast<TileRecord*>(aligned);
  sort_tiles<kTaps>(call, all, tiles, {index, sizeof(Index) == 8}, records);
  const ScatterTask<T> task{all, tiles, records, dout, weight, out, 0};
  constexpr int N = kPackWidth<T>;
  const bool packs = all.places % N == 0 && is_aligned<N>(dout) && is_aligned<N>(weight);
  const auto launch = [&](auto rows) {
    constexpr int kRows = rows;
    packs ? launch_scatter<kTaps, kRows, true>(call, task) : launch_scatter<kTaps, kRows, false>(call, task);
  };
  // Channels of a block share the reading of the records. Two blocks of four channels hide each other's latency.
  if (all.channels > 2 && 2 * four <= most) return launch(Constant<4>{});
  if (all.channels > 1 && two <= most) return launch(Constant<2>{});
  launch(Constant<1>{});
}

}  // namespace msops
