// On the GPU, features whose rows do not fit shared memory are transposed into scratch first: a group's channels of one
// point are neighbours there. Then a block reads those of some places, whole sectors at a time, and transposes them
// back in shared memory.
#pragma once

#include "../../common/gpu/unrolled.h"
#include "../../common/pack.h"
#include "gather.h"

namespace msops::gather {

constexpr int kGroupChannels = 64;     // of a group, at most; the last group has a multiple of 16
constexpr int kTransposedPoints = 64;  // of a block
constexpr int kPackThreads = 256;

template <typename T>
struct PackTask : GatherTask<T> {
  T* packs;                        // (lists, groups, points, channels of the group)
  int64_t groups = 0, chunks = 0;  // chunks: of a list's points, or places

  __device__ int64_t stored_channels() const { return (this->all.channels + 15) / 16 * 16; }

  // Returns how many channels of a group are stored, and where the group begins in `packs`.
  __device__ int width(int64_t group) const {
    const int64_t left = stored_channels() - group * kGroupChannels;
    return static_cast<int>(left < kGroupChannels ? left : kGroupChannels);
  }
  __device__ T* group_packs(int64_t list, int64_t group) const {
    return packs + (list * stored_channels() + group * kGroupChannels) * this->all.points;
  }
};

template <typename T>
__global__ void __launch_bounds__(kPackThreads) pack_kernel(PackTask<T> task) {
  constexpr int N = kPackWidth<T>, kRounds = kGroupChannels * kTransposedPoints / kPackThreads;
  __shared__ T tile[kGroupChannels][kTransposedPoints + (sizeof(T) < 4 ? 2 : 1)];
  const Gather& all = task.all;
  const int64_t chunk = blockIdx.x % task.chunks, item = blockIdx.x / task.chunks;
  const int64_t group = item % task.groups, list = item / task.groups, first = chunk * kTransposedPoints;
  const int width = task.width(group), lane = threadIdx.x % kTransposedPoints;
  const int points = static_cast<int>(min(int64_t{kTransposedPoints}, all.points - first));
  const T* const from = task.features + (list * all.channels + group * kGroupChannels) * all.points + first + lane;
  const int64_t channels = all.channels - group * kGroupChannels;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int c = (r * kPackThreads + threadIdx.x) / kTransposedPoints;
    tile[c][lane] = c < channels && lane < points ? from[c * all.points] : T(0.0f);
  }
  __syncthreads();
  T* const to = task.group_packs(list, group) + first * width;
  const int packs = width / N;
  for (int i = threadIdx.x; i < points * packs; i += kPackThreads) {
    const int n = i / packs, c = i % packs * N;
    Pack<T, N> pack;
#pragma unroll
    for (int k = 0; k < N; ++k) pack.values[k] = tile[c + k][n];
    store_at_once(to + n * width + c, pack);
  }
}

template <int kTaps, int kPlaces, typename T>
__global__ void __launch_bounds__(kPackThreads, 4) unpack_kernel(PackTask<T> task) {
  constexpr int N = kPackWidth<T>, kBlockPlaces = 32 * kPlaces;
  __shared__ __align__(16) T tile[kBlockPlaces * kGroupChannels];  // (places, packs of the group, N), packs swapped
  const Gather& all = task.all;
  const int64_t chunk = blockIdx.x % task.chunks, item = blockIdx.x / task.chunks;
  const int64_t group = item % task.groups, list = item / task.groups, first = chunk * kBlockPlaces;
  const int width = task.width(group), packs = width / N;
  const int places = static_cast<int>(min(int64_t{kBlockPlaces}, all.places - first));
  const T* const from = task.group_packs(list, group);
  // Pack q of a place is at this position, so that packs of places that are read together are in different banks.
  const int swapped = min(packs & -packs, 8) - 1;
  const auto position = [&](int place, int q) {
    return tile + (place * packs + (q ^ (place / kPlaces & swapped))) * N;
  };

  // A thread reads packs q of every apart-th place, kBatch at once.
  constexpr int kBatch = kTaps > 1 ? 2 : 4;
  const int apart = kPackThreads / packs, q = static_cast<int>(threadIdx.x) % packs;
  const int begin = static_cast<int>(threadIdx.x) / packs;
  for (int base = begin < apart ? begin : kBlockPlaces; base < kBlockPlaces; base += kBatch * apart) {
    Pack<T, N> taken[kBatch][kTaps];
    Compute<T> weights[kBatch][kTaps];
    unrolled<kBatch, kTaps>([&](int b, int k) {
      const int place = base + b * apart;
      const int64_t at = (list * all.places + first + place) * kTaps + k;
      const int point = place < places ? task.index[at] : -1;
      const bool inside = 0 <= point && point < all.points;
      taken[b][k] = {};
      if (inside) taken[b][k] = load<N>(from + static_cast<int64_t>(point) * width + q * N);
      if constexpr (kTaps > 1) weights[b][k] = inside ? Compute<T>(task.weight[at]) : Compute<T>(0);
    });
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if constexpr (kTaps > 1) {
        Compute<T> sums[N] = {};
        unrolled<kTaps, N>([&](int k, int c) { sums[c] += weights[b][k] * Compute<T>(taken[b][k].values[c]); });
#pragma unroll
        for (int c = 0; c < N; ++c) assign(taken[b][0].values[c], sums[c]);
      }
      if (base + b * apart < kBlockPlaces) store(position(base + b * apart, q), taken[b][0]);
    }
  }
  __syncthreads();
  T* const to = task.out + (list * all.channels + group * kGroupChannels) * all.places + first;
  const int64_t channels = all.channels - group * kGroupChannels;
  const int place = static_cast<int>(threadIdx.x % 32) * kPlaces;
  if (place >= places) return;
  for (int row = threadIdx.x / 32; row < packs; row += kPackThreads / 32) {
    Pack<T, N> taken[kPlaces];
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) taken[j] = load<N>(position(place + j, row));
#pragma unroll
    for (int c = 0; c < N; ++c) {
      Pack<T, kPlaces> run;
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) run.values[j] = taken[j].values[c];
      if (row * N + c < channels) store_at_once(to + (row * N + c) * all.places + place, run);
    }
  }
}

// `packs` has room for the channels, rounded up to a multiple of 16, of all points.
template <int kTaps, int kPlaces, typename T>
void gather_packed(Call& call, PackTask<T> task) {
  const Gather& all = task.all;
  task.groups = (all.channels + kGroupChannels - 1) / kGroupChannels;
  const int64_t items = all.lists * task.groups;
  const int64_t chunks[2] = {(all.points + kTransposedPoints - 1) / kTransposedPoints,
                             (all.places + 32 * kPlaces - 1) / (32 * kPlaces)};
  task.chunks = chunks[0];
  launch(call, pack_kernel<T>, items * chunks[0], kPackThreads, 0, task);
  task.chunks = chunks[1];
  launch(call, unpack_kernel<kTaps, kPlaces, T>, items * chunks[1], kPackThreads, 0, task);
}

}  // namespace msops::gather
