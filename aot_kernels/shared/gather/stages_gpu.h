// On the GPU, rows of features pass through shared memory. A block takes some channels of a list, and some of its
// places, whose indices its threads keep in registers. While they gather from one stage, which holds a group of
// channels, cp.async fills the others.
#pragma once

#include "../../common/gpu/cp_async.h"
#include "../../common/pack.h"
#include "../../common/parallel.h"
#include "gather.h"

namespace msops::gather {

constexpr int kRowThreads = 1024;  // at most
constexpr int kMostStages = 3;

// Staging says how blocks share the work.
template <typename T>
struct Staging {
  GatherSizes all;
  const T* features;
  Indices index;
  bool packs;                     // whether rows of features are whole packs of 16 bytes
  int stages = 0;                 // of shared memory
  int64_t groups = 0, parts = 0;  // of channels, of groups
  int64_t chunks = 0, chunk = 0;  // of a list's places; chunk: places of one
};

// StageShape says what a thread holds: kRuns runs of kPack neighbouring places. A stage has packs of kChannels.
template <int taps, int channels, int pack, int runs>
struct StageShape {
  static constexpr int kTaps = taps, kChannels = channels, kPack = pack, kRuns = runs;
  static constexpr int kOfRun = taps * pack;  // terms
};

// Copies the elements of a run through packs, as f converts them.
template <int kPack, int kSize, typename To, typename From, typename F>
__device__ __forceinline__ void read_run(To (&to)[kSize], const From* from, const F& f) {
  constexpr int kWide = kPack < kPackWidth<From> ? kPack : kPackWidth<From>;
#pragma unroll
  for (int i = 0; i < kSize; i += kWide) {
    const Pack<From, kWide> pack = load<kWide>(from + i);
#pragma unroll
    for (int j = 0; j < kWide; ++j) to[i + j] = f(pack.values[j]);
  }
}

// Copies kRun points of each row at once to a stage, as packs of kChannels.
template <int kRun, int kChannels, typename T>
__device__ __forceinline__ void interleave_rows(T* stage, const T* from, int points, int64_t stride, int count) {
  constexpr int kAtOnce = kRun > 1 ? 1 : 2, kSize = kRun * kChannels;
  const int step = static_cast<int>(blockDim.x) * kRun;
#pragma unroll kAtOnce
  for (int n = static_cast<int>(threadIdx.x) * kRun; n < points; n += step) {
    Pack<T, kRun> rows[kChannels] = {};
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
      if (c < count) rows[c] = load<kRun>(from + c * stride + n);
    Pack<T, kSize> packs;
#pragma unroll
    for (int i = 0; i < kSize; ++i) packs.values[i] = rows[i % kChannels].values[i / kChannels];
    store(stage + n * kChannels, packs);
  }
}

// Begins to copy `points` elements of `count` rows, which are `stride` apart, to a stage, as packs of kChannels. What
// is left of the packs is not written. Elements of 2 bytes, which cp.async cannot copy, are there after this.
template <int kChannels, typename T>
__device__ __forceinline__ void stage_rows(T* stage, const T* from, int points, int64_t stride, int count, bool packs) {
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
    const T* const row = from + c * stride;
    if (c >= count) return;
    for (int n = threadIdx.x / 32 * kRun + threadIdx.x % kRun; n < points; n += threads / kChannels)
      cp_async<sizeof(T)>(stage + n * kChannels + c, row + n);
  } else {
    constexpr int kRun = 16 / kChannels;  // two packs of 16 bytes
    packs ? interleave_rows<kRun, kChannels>(stage, from, points, stride, count)
          : interleave_rows<1, kChannels>(stage, from, points, stride, count);
  }
}

// BlockOfStages is what a thread knows of its block. Its own places begin at `own`, and its runs are `step` places
// apart, as far as these are below own + owned.
template <typename Shape, typename T>
class BlockOfStages {
 public:
  static constexpr int kTaps = Shape::kTaps, kChannels = Shape::kChannels;

  __device__ __forceinline__ explicit BlockOfStages(const Staging<T>& task) : task_(task) {
    const int64_t chunk = blockIdx.x % task.chunks, item = blockIdx.x / task.chunks;
    const int64_t first = chunk * task.chunk, end = min(first + task.chunk, task.all.places);
    part = item % task.parts, list = item / task.parts;
    own = first + static_cast<int>(threadIdx.x) * Shape::kPack;
    step = static_cast<int>(blockDim.x) * Shape::kPack, owned = static_cast<int>(end - own);
  }

  int64_t part, list, own;
  int step, owned;

  // Reads the thread's indices. One that is out of range becomes `points`, where a stage has zeros.
  __device__ __forceinline__ void read_indices() {
    const int points = static_cast<int>(task_.all.points);
    const Indices& index = task_.index;
#pragma unroll
    for (int r = 0; r < Shape::kRuns; ++r) {
      if (r * step >= owned) break;
      int of_run[Shape::kOfRun];
      const int64_t at = (list * task_.all.places + own + r * step) * kTaps;
      if (index.is_long) {
        read_run<Shape::kPack>(of_run, static_cast<const int64_t*>(index.data) + at,
                               [](int64_t i) { return Indices::narrow(i); });
      } else {
        read_run<Shape::kPack>(of_run, static_cast<const int32_t*>(index.data) + at, [](int32_t i) { return i; });
      }
#pragma unroll
      for (int i = 0; i < Shape::kOfRun; ++i) {
        const uint32_t point = 0 <= of_run[i] && of_run[i] < points ? of_run[i] : points;
        const int k = r * Shape::kOfRun + i;
        words_[k / 2] = k % 2 ? words_[k / 2] | point << 16 : point;
      }
    }
  }
  // Returns index i of run r.
  __device__ __forceinline__ int point(int r, int i) const {
    const int k = r * Shape::kOfRun + i;
    return static_cast<int>(k % 2 ? words_[k / 2] >> 16 : words_[k / 2] & 0xffff);
  }

  // Calls prepare(group, count) and, when the group is there, f(group, count, stage) for each of the block's groups, of
  // `count` channels.
  template <typename Prepare, typename F>
  __device__ __forceinline__ void for_groups(const Prepare& prepare, const F& f) const {
    extern __shared__ __align__(16) char memory[];
    const GatherSizes& all = task_.all;
    const int points = static_cast<int>(all.points), stages = task_.stages;
    const int64_t end = part_begin(task_.groups, part + 1, task_.parts);
    T* const staged = reinterpret_cast<T*>(memory);  // (stages, points and a pack of zeros, kChannels)
    const int stage_size = (points * kChannels + kChannels + kPackWidth<T> - 1) / kPackWidth<T> * kPackWidth<T>;
    const auto stage_of = [&](int64_t group) { return staged + static_cast<int>(group % stages) * stage_size; };
    const auto count_of = [&](int64_t group) {
      return static_cast<int>(min(all.channels - group * kChannels, int64_t{kChannels}));
    };
    const auto start = [&](int64_t group) {
      if (group < end) {
        const T* const from = task_.features + (list * all.channels + group * kChannels) * all.points;
        stage_rows<kChannels>(stage_of(group), from, points, all.points, count_of(group), task_.packs);
      }
      cp_async_commit();
    };

    int64_t group = part_begin(task_.groups, part, task_.parts);
    for (int s = 0; s + 1 < stages; ++s) start(group + s);
    for (int i = threadIdx.x; i < stages * kChannels; i += blockDim.x)
      staged[i / kChannels * stage_size + points * kChannels + i % kChannels] = T(0.0f);
    for (; group < end; ++group) {
      if (stages == 1) {
        __syncthreads();  // all have gathered from the group before
        start(group);
      }
      prepare(group, count_of(group));
      stages > 2 ? cp_async_wait<kMostStages - 2>() : cp_async_wait<0>();
      __syncthreads();
      if (stages > 1) start(group + stages - 1);
      f(group, count_of(group), stage_of(group));
    }
  }

 private:
  const Staging<T>& task_;
  uint32_t words_[(Shape::kOfRun * Shape::kRuns + 1) / 2];  // indices of 16 bits
};

// Chooses the parts of the channels, at most `most`, and the chunks of places: few waves of blocks, whose cost is what
// they stage and gather.
template <typename Shape, typename T>
void choose_blocks(Staging<T>& task, int threads, int64_t slots, int64_t most) {
  constexpr int64_t kStart = 64 << 10;  // bytes that a block could move while it starts
  const GatherSizes& all = task.all;
  double best = -1;
  Staging<T> chosen = task;
  for (int runs = Shape::kRuns; runs > 0; runs /= 2) {
    task.chunk = int64_t{threads} * Shape::kPack * runs;
    task.chunks = (all.places + task.chunk - 1) / task.chunk;
    const int64_t items = all.lists * task.chunks;
    for (int waves = 1; waves <= 4; ++waves) {
      task.parts = std::max<int64_t>(1, std::min({task.groups, most, waves * slots / items}));
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

// Packs of a stage have 16 bytes if two stages of them fit, else 4 bytes, or one element.
template <typename T>
constexpr int kWideChannels = 16 / sizeof(T);
template <typename T>
constexpr int kNarrowChannels = sizeof(T) < 4 ? 4 / sizeof(T) : 1;

// Launches a kernel of a task that is a Staging, for at most `most` parts, and returns for how many.
template <typename Shape, typename Task>
int64_t launch_staged(Call& call, void (*kernel)(Task), Task task, const Gpu& gpu, int64_t most) {
  using T = typename Task::Element;
  constexpr int kWarp = 32;
  const GatherSizes& all = task.all;
  // To copy float16 by wide packs takes longer than by single elements where there are several taps and many points.
  if (Shape::kTaps > 1 && sizeof(T) < 4 && Shape::kChannels == kWideChannels<T> && all.points > 1024)
    task.packs = false;
  task.groups = (all.channels + Shape::kChannels - 1) / Shape::kChannels;
  const int64_t of_stage = stage_bytes<Shape::kChannels, T>(all.points);
  task.stages = static_cast<int>(std::min<int64_t>({kMostStages, gpu.dynamic_bytes() / of_stage, task.groups}));
  const int64_t bytes = task.stages * of_stage;
  // Threads without places help to copy rows.
  const int64_t wanted = std::max((all.places + Shape::kPack - 1) / Shape::kPack, all.points / 4);
  const int threads = static_cast<int>(std::min<int64_t>(kRowThreads, (wanted + kWarp - 1) / kWarp * kWarp));
  choose_blocks<Shape, T>(task, threads, std::max(1, blocks_at_once(gpu, kernel, threads, bytes)), most);
  const int64_t blocks = all.lists * task.chunks * task.parts;
  launch(call, kernel, blocks, threads, bytes, task);
  return task.parts;
}

template <typename T>
bool fits_wide(const GatherSizes& all, const Gpu& gpu) {
  return 2 * stage_bytes<kWideChannels<T>, T>(all.points) <= gpu.dynamic_bytes() && all.channels > kNarrowChannels<T>;
}
template <typename T>
bool fits_narrow(const GatherSizes& all, const Gpu& gpu) {
  return stage_bytes<kNarrowChannels<T>, T>(all.points) <= gpu.dynamic_bytes() && all.points < UINT16_MAX;
}

}  // namespace msops::gather
