// On the GPU, rows of features pass through shared memory. A block takes some channels of a list, and some of its
// places, whose indices and weights its threads keep in registers. While they gather from one stage, which holds a
// group of channels, cp.async fills the others.
#pragma once

#include "../common/gpu/cp_async.h"
#include "../common/gpu/occupancy.h"
#include "../common/pack.h"
#include "gather.h"

namespace msops {

constexpr int kRowThreads = 1024;  // at most
constexpr int kMostStages = 3;

template <typename T>
struct RowTask {
  Gather all;
  const T* features;
  Indices index;
  const T* weight;  // null if there is one tap
  T* out;
  int64_t groups, parts, chunks, chunk;  // of channels, of groups, of places; chunk: places of a chunk
  int stages;
  bool packs;  // whether rows of features are whole packs of 16 bytes
};

// RowShape says what a thread holds: kRuns runs of kPack neighbouring places. A stage has packs of kChannels.
template <int taps, int channels, int pack, int runs>
struct RowShape {
  static constexpr int kTaps = taps, kChannels = channels, kPack = pack, kRuns = runs;
};

// HeldTaps keeps the indices of a thread's places in 16 bits each, and their weights. An index that is out of range
// becomes `points`, where a stage has zeros.
template <typename Shape, typename T>
class HeldTaps {
 public:
  static constexpr int kTaps = Shape::kTaps, kOfRun = kTaps * Shape::kPack, kCount = kOfRun * Shape::kRuns;

  // Reads run r of places, whose terms begin at `at`.
  __device__ __forceinline__ void read(int r, const Indices& indices, const T* weights, int64_t at, int points) {
    int of_run[kOfRun];
    if (indices.is_long) {
      copy(of_run, static_cast<const int64_t*>(indices.data) + at, [](int64_t i) { return Indices::narrow(i); });
    } else {
      copy(of_run, static_cast<const int32_t*>(indices.data) + at, [](int32_t i) { return i; });
    }
    Compute<T> scales[kOfRun];
    if constexpr (kTaps > 1) copy(scales, weights + at, [](T w) { return Compute<T>(w); });
#pragma unroll
    for (int i = 0; i < kOfRun; ++i) {
      const bool inside = 0 <= of_run[i] && of_run[i] < points;
      const uint32_t point = inside ? of_run[i] : points;
      const int k = r * kOfRun + i;
      words_[k / 2] = k % 2 ? words_[k / 2] | point << 16 : point;
      if constexpr (kTaps > 1) weights_[k] = inside ? scales[i] : Compute<T>(0);
    }
  }
  __device__ __forceinline__ int point(int r, int i) const {
    const int k = r * kOfRun + i;
    return k % 2 ? words_[k / 2] >> 16 : words_[k / 2] & 0xffff;
  }
  __device__ __forceinline__ Compute<T> weight(int r, int i) const { return weights_[r * kOfRun + i]; }

 private:
  template <typename To, typename From, typename F>
  static __device__ __forceinline__ void copy(To* to, const From* from, const F& f) {
    constexpr int kWide = Shape::kPack < kPackWidth<From> ? Shape::kPack : kPackWidth<From>;
#pragma unroll
    for (int i = 0; i < kOfRun; i += kWide) {
      const Pack<From, kWide> pack = load<kWide>(from + i);
#pragma unroll
      for (int j = 0; j < kWide; ++j) to[i + j] = f(pack.values[j]);
    }
  }

  uint32_t words_[(kCount + 1) / 2];
  Compute<T> weights_[kTaps > 1 ? kCount : 1];
};

// Begins to copy the rows of `count` channels to a stage, as packs of kChannels. What is left of the packs is not
// written. Elements of 2 bytes, which cp.async cannot copy, are there after this.
template <int kChannels, typename T>
__device__ __forceinline__ void stage_rows(T* stage, const T* from, int points, int count, bool packs) {
  const int threads = blockDim.x;
  if constexpr (kChannels == 1) {
    if (packs) {
      constexpr int N = kPackWidth<T>;
      for (int n = threadIdx.x * N; n < points; n += threads * N) cp_async<16>(stage + n, from + n);
      return;
    }
  }
  if constexpr (sizeof(T) >= 4) {
    // The lanes of a warp take kRun points of each channel, so that they write to different banks.
    constexpr int kRun = 32 / kChannels;
    const int c = threadIdx.x % 32 / kRun;
    const T* const row = from + static_cast<int64_t>(c) * points;
    if (c >= count) return;
    for (int n = threadIdx.x / 32 * kRun + threadIdx.x % kRun; n < points; n += threads / kChannels)
      cp_async<sizeof(T)>(stage + n * kChannels + c, row + n);
  } else {
#pragma unroll 2
    for (int n = threadIdx.x; n < points; n += threads) {
      Pack<T, kChannels> pack = {};
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (c < count) pack.values[c] = from[static_cast<int64_t>(c) * points + n];
      store(stage + n * kChannels, pack);
    }
  }
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(kRowThreads) row_kernel(RowTask<T> task) {
  constexpr int kTaps = Shape::kTaps, kChannels = Shape::kChannels, kPack = Shape::kPack, kRuns = Shape::kRuns;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const int points = static_cast<int>(all.points), stages = task.stages, threads = blockDim.x;
  const int64_t chunk = blockIdx.x % task.chunks, item = blockIdx.x / task.chunks;
  const int64_t part = item % task.parts, list = item / task.parts;
  const int64_t first = chunk * task.chunk, end = min(first + task.chunk, all.places);
  const int64_t last_group = part_begin(task.groups, part + 1, task.parts);
  // (stages, points and a pack of zeros, kChannels)
  T* const staged = reinterpret_cast<T*>(memory);
  const int stage_size = (points * kChannels + kChannels + kPackWidth<T> - 1) / kPackWidth<T> * kPackWidth<T>;

  const auto stage_of = [&](int64_t group) { return staged + static_cast<int>(group % stages) * stage_size; };
  const auto count_of = [&](int64_t group) {
    return static_cast<int>(min(all.channels - group * kChannels, int64_t{kChannels}));
  };
  const auto start = [&](int64_t group) {
    if (group < last_group) {
      const T* const from = task.features + (list * all.channels + group * kChannels) * all.points;
      stage_rows<kChannels>(stage_of(group), from, points, count_of(group), task.packs);
    }
    cp_async_commit();
  };

  int64_t group = part_begin(task.groups, part, task.parts);
  for (int s = 0; s + 1 < stages; ++s) start(group + s);
  for (int i = threadIdx.x; i < stages * kChannels; i += threads)
    staged[i / kChannels * stage_size + points * kChannels + i % kChannels] = T(0.0f);
  // A thread's places begin at `own`, and its runs are `step` places apart.
  const int64_t own = first + static_cast<int>(threadIdx.x) * kPack;
  const int step = threads * kPack, owned = static_cast<int>(end - own);
  HeldTaps<Shape, T> taps;
#pragma unroll
  for (int r = 0; r < kRuns; ++r)
    if (r * step < owned) taps.read(r, task.index, task.weight, (list * all.places + own + r * step) * kTaps, points);
  for (; group < last_group; ++group) {
    if (stages == 1) {
      __syncthreads();  // all have gathered from the group before
      start(group);
    }
    stages > 2 ? cp_async_wait<kMostStages - 2>() : cp_async_wait<0>();
    __syncthreads();
    if (stages > 1) start(group + stages - 1);
    const T* const stage = stage_of(group);
    const int count = count_of(group);
    T* to = task.out + (list * all.channels + group * kChannels) * all.places + own;
    int left = owned;
#pragma unroll
    for (int r = 0; r < kRuns; ++r, left -= step, to += step) {
      if (left <= 0) break;
      Pack<T, kPack> rows[kChannels];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if constexpr (kTaps > 1) {
          Compute<T> sums[kChannels] = {};
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            const Pack<T, kChannels> taken = load<kChannels>(stage + taps.point(r, j * kTaps + k) * kChannels);
#pragma unroll
            for (int c = 0; c < kChannels; ++c) sums[c] += taps.weight(r, j * kTaps + k) * Compute<T>(taken.values[c]);
          }
#pragma unroll
          for (int c = 0; c < kChannels; ++c) assign(rows[c].values[j], sums[c]);
        } else {
          const Pack<T, kChannels> taken = load<kChannels>(stage + taps.point(r, j) * kChannels);
#pragma unroll
          for (int c = 0; c < kChannels; ++c) rows[c].values[j] = taken.values[c];
        }
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (c < count) store(to + c * all.places, rows[c]);
    }
  }
}

// Chooses the parts of the channels and the chunks of places: few waves of blocks, whose cost is what they stage and
// write.
template <typename Shape, typename T>
void choose_blocks(RowTask<T>& task, int threads, int64_t slots) {
  constexpr int64_t kStart = 64 << 10;  // bytes that a block could move while it starts
  const Gather& all = task.all;
  double best = -1;
  RowTask<T> chosen = task;
  for (int runs = Shape::kRuns; runs > 0; runs /= 2) {
    task.chunk = int64_t{threads} * Shape::kPack * runs;
    task.chunks = (all.places + task.chunk - 1) / task.chunk;
    const int64_t items = all.lists * task.chunks;
    for (int waves = 1; waves <= 4; ++waves) {
      task.parts = std::max<int64_t>(1, std::min(task.groups, waves * slots / items));
      const int64_t groups = (task.groups + task.parts - 1) / task.parts;
      const int64_t moved = (all.points + task.chunk) * Shape::kChannels * static_cast<int64_t>(sizeof(T));
      const double cost =
          static_cast<double>((items * task.parts + slots - 1) / slots) * static_cast<double>(kStart + groups * moved);
      if (best < 0 || cost < best) best = cost, chosen = task;
    }
  }
  task = chosen;
}

// Returns the bytes of a stage.
template <int kChannels, typename T>
int64_t stage_bytes(int64_t points) {
  return (points + 1) * kChannels * static_cast<int64_t>(sizeof(T)) / 16 * 16 + 16;
}

template <typename Shape, typename T>
void launch_rows(Call& call, RowTask<T> task, const Gpu& gpu) {
  constexpr int kWarp = 32;
  const auto kernel = row_kernel<Shape, T>;
  const Gather& all = task.all;
  task.groups = (all.channels + Shape::kChannels - 1) / Shape::kChannels;
  const int64_t of_stage = stage_bytes<Shape::kChannels, T>(all.points);
  task.stages = static_cast<int>(std::min<int64_t>({kMostStages, gpu.dynamic_bytes() / of_stage, task.groups}));
  const int64_t bytes = task.stages * of_stage, wanted = (all.places + Shape::kPack - 1) / Shape::kPack;
  const int threads = static_cast<int>(std::min<int64_t>(kRowThreads, (wanted + kWarp - 1) / kWarp * kWarp));
  allow_shared_memory(kernel, bytes);
  choose_blocks<Shape>(task, threads, std::max(1, blocks_at_once(gpu, kernel, threads, bytes)));
  const int64_t blocks = all.lists * task.chunks * task.parts;
  call.require(blocks <= INT32_MAX, kBadShape, "too many channels for one launch");
  if (!call.ok()) return;
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, call.stream()>>>(task);
  call.check_launch();
}

// Gathers through shared memory, by packs of 16 bytes if two stages of them fit, else by packs of 4 bytes or single
// elements. Returns whether one stage of these fits.
template <int kTaps, int kPack, typename T>
bool gather_rows(Call& call, RowTask<T> task) {
  constexpr int kWide = 16 / sizeof(T), kNarrow = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  // Registers are enough for the indices and weights of so many places of a thread.
  constexpr int kWideRuns = (kTaps > 1 ? 4 : 16) / kPack;
  constexpr int kNarrowRuns = (kTaps == 1 ? 32 : sizeof(T) > 4 ? 4 : 8) / kPack;
  const Gpu gpu;
  const int64_t room = gpu.dynamic_bytes();
  task.packs = task.all.points % kPackWidth<T> == 0 && is_aligned<kPackWidth<T>>(task.features);
  if (2 * stage_bytes<kWide, T>(task.all.points) <= room && task.all.channels > kNarrow) {
    launch_rows<RowShape<kTaps, kWide, kPack, kWideRuns>>(call, task, gpu);
    return true;
  }
  if (stage_bytes<kNarrow, T>(task.all.points) > room) return false;
  launch_rows<RowShape<kTaps, kNarrow, kPack, kNarrowRuns>>(call, task, gpu);
  return true;
}

}  // namespace msops
