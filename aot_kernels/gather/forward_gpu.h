// On the GPU, a block takes a group of channels of one list, and a part of its places. Packs hold the group's channels
// of one point, so that one load takes them all:
//
//   points * 8 bytes fit shared memory -> the block stages the packs there: features are read once, in order.
//   otherwise, with room in scratch    -> a kernel before writes the packs to scratch, where a point is one sector.
//   otherwise                          -> each element is read by itself (take_kernel).
//
// A thread takes kPlaces neighbouring places, and stores as many neighbouring elements in each channel's row.
#pragma once

#include "../common/gpu/occupancy.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "gather.h"

namespace msops {

template <typename T>
struct GatherTask {
  Gather all;
  const T* features;
  Indices index;
  const T* weight;  // null if there is one tap
  T* out;
  void* packs;  // (lists, groups, points) packs in scratch, or null
  int64_t groups, parts;
};

// PlaceTaps holds the indices and weights of a thread's places.
template <int kTaps, int kPlaces, typename T>
struct PlaceTaps {
  static constexpr int kCount = kTaps * kPlaces;
  int index[kCount];
  T weight[kTaps > 1 ? kCount : 1];

  // Reads those from the term `at` on.
  __device__ void read(const Indices& indices, const T* weights, int64_t at) {
    if (indices.is_long) {
      copy<kCount>(index, static_cast<const int64_t*>(indices.data) + at, [](int64_t i) { return Indices::narrow(i); });
    } else {
      copy<kCount>(index, static_cast<const int32_t*>(indices.data) + at, [](int32_t i) { return i; });
    }
    if constexpr (kTaps > 1) copy<kCount>(weight, weights + at, [](T w) { return w; });
  }

 private:
  template <int kSize, typename To, typename From, typename F>
  static __device__ void copy(To* to, const From* from, const F& f) {
    constexpr int kWide = kPlaces < kPackWidth<From> ? kPlaces : kPackWidth<From>;
#pragma unroll
    for (int i = 0; i < kSize; i += kWide) {
      const Pack<From, kWide> pack = load<kWide>(from + i);
#pragma unroll
      for (int j = 0; j < kWide; ++j) to[i + j] = f(pack.values[j]);
    }
  }
};

constexpr int kGatherThreads = 512;

template <int kTaps, int kChannels, int kPlaces, bool kStaged, typename T>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(GatherTask<T> task) {
  using Channels = Pack<T, kChannels>;
  extern __shared__ __align__(16) char memory[];
  const Gather& all = task.all;
  const int64_t part = blockIdx.x % task.parts, item = blockIdx.x / task.parts;
  const int64_t group = item % task.groups, list = item / task.groups, first = group * kChannels;
  const int64_t row = list * all.channels + first;
  const int count = static_cast<int>(all.channels - first < kChannels ? all.channels - first : kChannels);
  const Channels* packs = static_cast<const Channels*>(task.packs) + item * all.points;
  if constexpr (kStaged) {
    Channels* const staged = reinterpret_cast<Channels*>(memory);
    const T* const from = task.features + row * all.points;
#pragma unroll 2
    for (int n = threadIdx.x; n < all.points; n += kGatherThreads) {
      Channels pack = {};
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (c < count) pack.values[c] = from[c * all.points + n];
      staged[n] = pack;
    }
    __syncthreads();
    packs = staged;
  }
  const int64_t runs = all.places / kPlaces, end = part_begin(runs, part + 1, task.parts);
  for (int64_t run = part_begin(runs, part, task.parts) + threadIdx.x; run < end; run += kGatherThreads) {
    PlaceTaps<kTaps, kPlaces, T> taps;
    taps.read(task.index, task.weight, (list * all.places + run * kPlaces) * kTaps);
    Pack<T, kPlaces> rows[kChannels];
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      Compute<T> sums[kTaps > 1 ? kChannels : 1] = {};
      Channels taken = {};
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        const int point = taps.index[j * kTaps + k];
        const bool inside = 0 <= point && point < all.points;
        if (inside) taken = packs[point];
        if constexpr (kTaps > 1) {
          const Compute<T> weight = inside ? Compute<T>(taps.weight[j * kTaps + k]) : Compute<T>(0);
#pragma unroll
          for (int c = 0; c < kChannels; ++c) sums[c] += inside ? weight * Compute<T>(taken.values[c]) : Compute<T>(0);
        }
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if constexpr (kTaps > 1) {
          assign(rows[c].values[j], sums[c]);
        } else {
          rows[c].values[j] = taken.values[c];
        }
      }
    }
    T* const to = task.out + row * all.places + run * kPlaces;
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
      if (c < count) store(to + c * all.places, rows[c]);
  }
}

// Writes the packs of all groups to scratch. Index i is one pack.
template <int kChannels, typename T>
struct PackChannels {
  Gather all;
  int64_t groups;
  const T* features;
  void* packs;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const I points = static_cast<I>(all.points), item = i / points, list = item / static_cast<I>(groups);
    const int64_t first = static_cast<int64_t>(item - list * static_cast<I>(groups)) * kChannels;
    const T* const from = features + (list * all.channels + first) * all.points + (i - item * points);
    Pack<T, kChannels> pack = {};
    for (int c = 0; c < kChannels; ++c)
      if (first + c < all.channels) pack.values[c] = from[c * all.points];
    static_cast<Pack<T, kChannels>*>(packs)[i] = pack;
  }
};

// Computes an element of `out`. Index i is the element.
template <int kTaps, typename T>
struct TakeElement {
  GatherTask<T> task;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const Gather& all = task.all;
    const I places = static_cast<I>(all.places), row = i / places, list = row / static_cast<I>(all.channels);
    const int64_t at = (static_cast<int64_t>(list) * all.places + (i - row * places)) * kTaps;
    const T* const from = task.features + static_cast<int64_t>(row) * all.points;
    Compute<T> sum = 0;
    T taken = T(0.0f);
    for (int k = 0; k < kTaps; ++k) {
      const int point = task.index[at + k];
      const bool inside = 0 <= point && point < all.points;
      taken = inside ? from[point] : T(0.0f);
      if (kTaps > 1 && inside) sum += Compute<T>(task.weight[at + k]) * Compute<T>(taken);
    }
    task.out[i] = kTaps > 1 ? T(sum) : taken;
  }
};

// A group of packs in scratch has the channels that fit a sector of 32 bytes.
template <typename T>
constexpr int kChannelsOfSector = 32 / sizeof(T);
template <int kTaps, int kChannels, int kPlaces, bool kStaged, typename T>
void launch_gather(Call& call, GatherTask<T> task, const Gpu& gpu) {
  const auto kernel = gather_kernel<kTaps, kChannels, kPlaces, kStaged, T>;
  const int64_t bytes = kStaged ? task.all.points * static_cast<int64_t>(sizeof(Pack<T, kChannels>)) : 0;
  if (bytes > 48 << 10) allow_shared_memory(kernel, bytes);
  task.groups = (task.all.channels + kChannels - 1) / kChannels;
  // Parts of a group stage the same packs, so that each has places enough for that, unless the GPU has nothing to do.
  const int64_t items = task.all.lists * task.groups;
  const int64_t wanted = 4 * std::max(1, blocks_at_once(gpu, kernel, kGatherThreads, bytes)) / items + 1;
  const int64_t least = std::max<int64_t>(kGatherThreads * kPlaces, kStaged ? task.all.points : 0);
  task.parts = std::max<int64_t>(1, std::min(wanted, task.all.places / least));
  call.require(items * task.parts <= INT32_MAX, kBadShape, "too many channels for one launch");
  if (!call.ok()) return;
  kernel<<<static_cast<unsigned>(items * task.parts), kGatherThreads, bytes, call.stream()>>>(task);
  call.check_launch();
}

// Launches the kernel with packs of kBytes, the widest that fit.
template <int kTaps, int kPlaces, int kBytes, typename T>
void gather_staged(Call& call, const GatherTask<T>& task, const Gpu& gpu, bool* launched) {
  constexpr int kChannels = kBytes / sizeof(T);
  const bool fits = task.all.points * kBytes <= gpu.dynamic_bytes();
  const bool is_filled = kBytes <= 4 || task.all.channels > kChannels / 2;
  if (fits && is_filled) {
    *launched = true;
    launch_gather<kTaps, kChannels, kPlaces, true>(call, task, gpu);
  } else if constexpr (kBytes > 4 && kBytes > sizeof(T)) {
    gather_staged<kTaps, kPlaces, kBytes / 2>(call, task, gpu, launched);
  }
}

template <int kTaps, int kPlaces, typename T>
void gather_places(Call& call, GatherTask<T> task, bool packed, void* scratch) {
  const Gpu gpu;
  const Gather& all = task.all;
  bool launched = false;
  if (!packed) {
    gather_staged<kTaps, kPlaces, 16>(call, task, gpu, &launched);
  } else {
    constexpr int kChannels = kChannelsOfSector<T>;
    const int64_t groups = (all.channels + kChannels - 1) / kChannels, packs = all.lists * groups * all.points;
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(scratch) + 31) / 32 * 32;
    task.packs = reinterpret_cast<void*>(aligned);
    on_gpu(call, packs, packs * kChannels, PackChannels<kChannels, T>{all, groups, task.features, task.packs});
    launched = true;
    launch_gather<kTaps, kChannels, kPlaces, false>(call, task, gpu);
  }
  if (!launched) {
    const int64_t size = all.rows() * all.places;
    on_gpu(call, size, std::max(size, all.rows() * all.points), TakeElement<kTaps, T>{task});
  }
}

// If `packed`, there is room for the packs in `scratch`, which may begin at any element.
template <int kTaps, typename T>
void gather_on_gpu(Call& call, const GatherTask<T>& task, bool packed, void* scratch) {
  constexpr int kPlaces = 4;
  if (task.all.rows() * task.all.places == 0) return;
  const bool packs = task.all.places % kPlaces == 0 && is_aligned<kPlaces>(task.out) &&
                     is_aligned<16>(static_cast<const char*>(task.index.data)) && is_aligned<kPlaces>(task.weight);
  packs ? gather_places<kTaps, kPlaces>(call, task, packed, scratch)
        : gather_places<kTaps, 1>(call, task, packed, scratch);
}

}  // namespace msops
