// A gather, or an interpolation, from rows in shared memory (see stages_gpu.h).
#pragma once

#include "stages_gpu.h"

namespace msops::gather {

template <typename T>
struct RowTask : Staging<T> {
  using Element = T;
  const T* weight;  // null if there is one tap
  T* out;
};

template <typename Shape, typename T>
__global__ void __launch_bounds__(kRowThreads) row_kernel(RowTask<T> task) {
  using C = Compute<T>;
  constexpr int kTaps = Shape::kTaps, kChannels = Shape::kChannels, kPack = Shape::kPack, kOfRun = Shape::kOfRun;
  const GatherSizes& all = task.all;
  BlockOfStages<Shape, T> block(task);
  block.read_indices();
  C weights[Shape::kRuns][kTaps > 1 ? kOfRun : 1];
  if constexpr (kTaps > 1) {
#pragma unroll
    for (int r = 0; r < Shape::kRuns; ++r) {
      if (r * block.step >= block.owned) break;
      const int64_t at = (block.list * all.places + block.own + r * block.step) * kTaps;
      read_run<kPack>(weights[r], task.weight + at, [](T w) { return C(w); });
#pragma unroll
      for (int i = 0; i < kOfRun; ++i)
        if (block.point(r, i) == all.points) weights[r][i] = 0;
    }
  }
  block.for_groups([](int64_t, int) {},
                   [&](int64_t group, int count, const T* stage) {
                     T* to = task.out + (block.list * all.channels + group * kChannels) * all.places + block.own;
                     int left = block.owned;
#pragma unroll
                     for (int r = 0; r < Shape::kRuns; ++r, left -= block.step, to += block.step) {
                       if (left <= 0) break;
                       Pack<T, kPack> rows[kChannels];
#pragma unroll
                       for (int j = 0; j < kPack; ++j) {
                         if constexpr (kTaps > 1) {
                           C sums[kChannels] = {};
#pragma unroll
                           for (int k = j * kTaps; k < (j + 1) * kTaps; ++k) {
                             const Pack<T, kChannels> taken = load<kChannels>(stage + block.point(r, k) * kChannels);
#pragma unroll
                             for (int c = 0; c < kChannels; ++c) sums[c] += weights[r][k] * C(taken.values[c]);
                           }
#pragma unroll
                           for (int c = 0; c < kChannels; ++c) assign(rows[c].values[j], sums[c]);
                         } else {
                           const Pack<T, kChannels> taken = load<kChannels>(stage + block.point(r, j) * kChannels);
#pragma unroll
                           for (int c = 0; c < kChannels; ++c) rows[c].values[j] = taken.values[c];
                         }
                       }
#pragma unroll
                       for (int c = 0; c < kChannels; ++c)
                         if (c < count) store_at_once(to + c * all.places, rows[c]);
                     }
                   });
}

// Gathers through shared memory, and returns whether a row fits there.
template <int kTaps, int kPack, typename T>
bool gather_rows(Call& call, RowTask<T> task) {
  // Registers are enough for the indices and weights of so many places of a thread.
  constexpr int kWidePack = kTaps > 1 && sizeof(T) == 4 && kPack > 2 ? 2 : kPack;
  using Wide = StageShape<kTaps, kWideChannels<T>, kWidePack, (kTaps > 1 ? 4 : 16) / kWidePack>;
  using Narrow = StageShape<kTaps, kNarrowChannels<T>, kPack, (kTaps == 1 ? 32 : sizeof(T) > 4 ? 4 : 8) / kPack>;
  const Gpu gpu;
  if (fits_wide<T>(task.all, gpu)) {
    launch_staged<Wide>(call, row_kernel<Wide, T>, task, gpu, INT32_MAX);
  } else if (fits_narrow<T>(task.all, gpu)) {
    launch_staged<Narrow>(call, row_kernel<Narrow, T>, task, gpu, INT32_MAX);
  } else {
    return false;
  }
  return true;
}

}  // namespace msops::gather
