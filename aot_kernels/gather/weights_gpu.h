// On the GPU, the gradient of the weights is a sum over the channels, of which each block takes a part. A thread keeps
// the indices of its places, and the block stages the packs of one group of channels after the other (see
// forward_gpu.h).
#pragma once

#include "../common/sum.h"
#include "forward_gpu.h"

namespace msops {

template <typename T>
struct WeightTask {
  Gather all;
  const T *features, *dout;
  Indices index;
  Compute<T>* partial;    // (parts, lists, places, taps)
  int64_t blocks, parts;  // blocks: of a list's places
};

constexpr int kWeightThreads = 1024;

template <int kTaps, int kChannels, typename T>
__global__ void __launch_bounds__(kWeightThreads) weight_kernel(WeightTask<T> task) {
  using Channels = Pack<T, kChannels>;
  extern __shared__ __align__(16) char memory[];
  Channels* const staged = reinterpret_cast<Channels*>(memory);
  const Gather& all = task.all;
  const int64_t block = blockIdx.x % task.blocks, item = blockIdx.x / task.blocks;
  const int64_t part = item % task.parts, list = item / task.parts;
  const int64_t place = block * kWeightThreads + threadIdx.x, groups = (all.channels + kChannels - 1) / kChannels;
  const bool has_place = place < all.places;
  int point[kTaps];
  Compute<T> sums[kTaps] = {};
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    const int at = has_place ? task.index[(list * all.places + place) * kTaps + k] : -1;
    point[k] = 0 <= at && at < all.points ? at : -1;
  }
  for (int64_t group = part_begin(groups, part, task.parts); group < part_begin(groups, part + 1, task.parts);
       ++group) {
    const int64_t row = list * all.channels + group * kChannels, left = all.channels - group * kChannels;
    const T* const from = task.features + row * all.points;
    Channels terms = {};
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
      if (c < left && has_place) terms.values[c] = task.dout[(row + c) * all.places + place];
    __syncthreads();  // all have read the group before
    for (int n = threadIdx.x; n < all.points; n += kWeightThreads) {
      Channels pack = {};
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (c < left) pack.values[c] = from[c * all.points + n];
      staged[n] = pack;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (point[k] < 0) continue;
      const Channels taken = staged[point[k]];
      Compute<T> sum = 0;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sum += Compute<T>(terms.values[c]) * Compute<T>(taken.values[c]);
      sums[k] += sum;
    }
  }
  if (!has_place) return;
  Compute<T>* const to = task.partial + ((part * all.lists + list) * all.places + place) * kTaps;
#pragma unroll
  for (int k = 0; k < kTaps; ++k) to[k] = sums[k];
}

// Index i is a place of all lists, whose sums a thread computes alone.
template <int kTaps, typename T>
struct WeightsOfPlace {
  Gather all;
  const T *features, *dout;
  Indices index;
  T* dweight;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t list = static_cast<int64_t>(i) / all.places, place = static_cast<int64_t>(i) - list * all.places;
    Sum<T> sums[kTaps];
    for (int64_t row = list * all.channels; row < (list + 1) * all.channels; ++row) {
      const Compute<T> gradient = Compute<T>(dout[row * all.places + place]);
      for (int k = 0; k < kTaps; ++k) {
        const int point = index[static_cast<int64_t>(i) * kTaps + k];
        if (0 <= point && point < all.points) sums[k] += gradient * Compute<T>(features[row * all.points + point]);
      }
    }
    for (int k = 0; k < kTaps; ++k) assign(dweight[static_cast<int64_t>(i) * kTaps + k], sums[k].total());
  }
};

// Launches the kernel with packs of kBytes, the widest that fit.
template <int kTaps, int kBytes, typename T>
bool launch_weights(Call& call, WeightTask<T> task, const Gpu& gpu) {
  constexpr int kChannels = kBytes / sizeof(T);
  const int64_t bytes = task.all.points * kBytes;
  if (bytes > gpu.dynamic_bytes()) {
    if constexpr (kBytes > 4 && kBytes > sizeof(T)) return launch_weights<kTaps, kBytes / 2>(call, task, gpu);
    return false;
  }
  const auto kernel = weight_kernel<kTaps, kChannels, T>;
  if (bytes > 48 << 10) allow_shared_memory(kernel, bytes);
  task.blocks = (task.all.places + kWeightThreads - 1) / kWeightThreads;
  const int64_t blocks = task.blocks * task.parts * task.all.lists;
  call.require(blocks <= INT32_MAX, kBadShape, "too many indices for one launch");
  if (!call.ok()) return true;
  kernel<<<static_cast<unsigned>(blocks), kWeightThreads, bytes, call.stream()>>>(task);
  call.check_launch();
  return true;
}

// `partial` has room for the sums of `parts` parts of the channels.
template <int kTaps, typename T>
void weights_on_gpu(Call& call, const Gather& all, const T* features, const T* dout, Indices index, int64_t parts,
                    Compute<T>* partial, T* dweight) {
  const int64_t size = all.lists * all.places * kTaps;
  if (size == 0) return;
  if (launch_weights<kTaps, 16>(call, WeightTask<T>{all, features, dout, index, partial, 0, parts}, Gpu())) {
    sum_rows(call, parts, size, size, static_cast<const Compute<T>*>(partial), dweight);
  } else {
    on_gpu(call, all.lists * all.places, std::max(all.rows() * all.places, all.rows() * all.points),
           WeightsOfPlace<kTaps, T>{all, features, dout, index, dweight});
  }
}

}  // namespace msops
