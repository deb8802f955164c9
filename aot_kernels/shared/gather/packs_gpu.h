// On the GPU, rows that do not fit shared memory are transposed into scratch first: a group's channels of one point are
// neighbours there. To gather, a block reads those of some places, whole sectors at a time, and transposes them back in
// shared memory.
#pragma once

#include "../../common/gpu/unrolled.h"
#include "../../common/pack.h"
#include "gather.h"
#include "sums.h"

namespace msops::gather {

constexpr int kPackThreads = 256;
constexpr int kPackBytes = 16 << 10;  // of a block of pack_kernel

// PackedRows are the transposed rows of lists. Items are the groups of all lists, in their order.
template <typename T>
struct PackedRows {
  T* data;  // (items from `first` on, points, channels of the group)
  int64_t channels, points;
  int group_channels;  // of a group, at most
  int64_t first = 0;

  MSOPS_BOTH int64_t stored_channels() const { return (channels + 15) / 16 * 16; }
  MSOPS_BOTH int64_t groups() const { return (channels + group_channels - 1) / group_channels; }
  // Returns how many channels of a group are stored.
  MSOPS_BOTH int width(int64_t group) const {
    const int64_t left = stored_channels() - group * group_channels;
    return static_cast<int>(left < group_channels ? left : group_channels);
  }
  // Returns where an item begins if the first one begins at 0.
  MSOPS_BOTH int64_t start(int64_t item) const {
    return (item / groups() * stored_channels() + item % groups() * group_channels) * points;
  }
  MSOPS_BOTH T* item(int64_t item) const { return data + (start(item) - start(first)); }
};

// Transposes rows of some items, `chunks` blocks of `places` points for each of them. A thread has kRun points of N
// rows, and a point's packs are swapped in shared memory, so that few banks conflict.
template <int kRun, typename T>
__global__ void __launch_bounds__(kPackThreads)
    pack_kernel(PackedRows<T> packed, const T* rows, int64_t chunks, int places) {
  constexpr int N = kPackWidth<T>;
  __shared__ __align__(16) T tile[kPackBytes / sizeof(T)];  // (points, packs, N)
  const int64_t item = packed.first + blockIdx.x / chunks, first = blockIdx.x % chunks * places;
  const int64_t list = item / packed.groups(), group = item % packed.groups(), channel = group * packed.group_channels;
  const int width = packed.width(group), packs = width / N, columns = places / kRun;
  const int points = static_cast<int>(min(int64_t{places}, packed.points - first));
  const int channels = static_cast<int>(min(packed.channels - channel, int64_t{width}));
  const T* const from = rows + (list * packed.channels + channel) * packed.points + first;
  const auto position = [&](int n, int p) {
    return tile + (n * packs + (p ^ (n / kRun & (min(packs & -packs, 8) - 1)))) * N;
  };
  for (int unit = threadIdx.x; unit < columns * packs; unit += kPackThreads) {
    const int p = unit / columns, n = unit % columns * kRun;
    Pack<T, kRun> taken[N] = {};
#pragma unroll
    for (int c = 0; c < N; ++c)
      if (p * N + c < channels && n < points) taken[c] = load<kRun>(from + (p * N + c) * packed.points + n);
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      Pack<T, N> pack;
#pragma unroll
      for (int c = 0; c < N; ++c) pack.values[c] = taken[c].values[j];
      store(position(n + j, p), pack);
    }
  }
  __syncthreads();
  T* const to = packed.item(item) + first * width;
  for (int i = threadIdx.x; i < points * packs; i += kPackThreads)
    store_at_once(to + i * N, load<N>(position(i / packs, i % packs)));
}

// Launches the kernel for `items` items.
template <typename T>
void pack_rows(Call& call, const PackedRows<T>& packed, const T* rows, int64_t items) {
  constexpr int kRun = sizeof(T) < 8 ? 8 / sizeof(T) : 1;
  const int places = kPackBytes / static_cast<int>(sizeof(T)) / packed.group_channels;
  const int64_t chunks = (packed.points + places - 1) / places;
  const bool runs = packed.points % kRun == 0 && is_aligned<kRun>(rows);
  const auto kernel = runs ? pack_kernel<kRun, T> : pack_kernel<1, T>;
  launch(call, kernel, items * chunks, kPackThreads, 0, packed, rows, chunks, places);
}

template <typename T>
struct PackTask : GatherTask<T> {
  PackedRows<T> packed;  // of the features
  int64_t chunks = 0;    // of a list's places
};

template <int kTaps, int kPlaces, typename T>
__global__ void __launch_bounds__(kPackThreads, 4) unpack_kernel(PackTask<T> task) {
  constexpr int N = kPackWidth<T>, kBlockPlaces = 32 * kPlaces;
  __shared__ __align__(16) T tile[kBlockPlaces * kGroupChannels];  // (places, packs of the group, N), packs swapped
  const GatherSizes& all = task.all;
  const int64_t chunk = blockIdx.x % task.chunks, item = blockIdx.x / task.chunks;
  const int64_t groups = task.packed.groups(), group = item % groups, list = item / groups;
  const int64_t first = chunk * kBlockPlaces;
  const int width = task.packed.width(group), packs = width / N;
  const int places = static_cast<int>(min(int64_t{kBlockPlaces}, all.places - first));
  const T* const from = task.packed.item(item);
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
void gather_packed(Call& call, const GatherTask<T>& gather, T* packs) {
  const GatherSizes& all = gather.all;
  const PackedRows<T> packed{packs, all.channels, all.points, kGroupChannels};
  const int64_t items = all.lists * packed.groups(), chunks = (all.places + 32 * kPlaces - 1) / (32 * kPlaces);
  pack_rows(call, packed, gather.features, items);
  launch(call, unpack_kernel<kTaps, kPlaces, T>, items * chunks, kPackThreads, 0, PackTask<T>{gather, packed, chunks});
}

}  // namespace msops::gather
