// On the GPU, the gradient of the weights is a sum over the channels, of which each block takes a part, whose rows of
// features pass through shared memory (see stages_gpu.h).
#pragma once

#include "../../common/sum.h"
#include "stages_gpu.h"

namespace msops::gather {

template <typename T>
struct WeightTask : Staging<T> {
  using Element = T;
  const T* dout;
  Compute<T>* partial;  // (parts, lists, places, taps)
};

template <typename Shape, typename T>
__global__ void __launch_bounds__(kRowThreads) weight_kernel(WeightTask<T> task) {
  using C = Compute<T>;
  constexpr int kTaps = Shape::kTaps, kChannels = Shape::kChannels, kPack = Shape::kPack, kRuns = Shape::kRuns;
  const GatherSizes& all = task.all;
  BlockOfStages<Shape, T> block(task);
  block.read_indices();
  C sums[kRuns][Shape::kOfRun] = {};
  Pack<T, kPack> terms[kRuns][kChannels];
  const auto read_terms = [&](int64_t group, int count) {
    const T* from = task.dout + (block.list * all.channels + group * kChannels) * all.places + block.own;
#pragma unroll
    for (int r = 0; r < kRuns; ++r, from += block.step) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        terms[r][c] = {};
        if (c < count && r * block.step < block.owned) terms[r][c] = load<kPack>(from + c * all.places);
      }
    }
  };
  block.for_groups(read_terms, [&](int64_t, int count, const T* stage) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (r * block.step >= block.owned) break;
#pragma unroll
      for (int i = 0; i < Shape::kOfRun; ++i) {
        const Pack<T, kChannels> taken = load<kChannels>(stage + block.point(r, i) * kChannels);
        C sum = 0;
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
          if (c < count) sum += C(terms[r][c].values[i / kTaps]) * C(taken.values[c]);
        sums[r][i] += sum;
      }
    }
  });
  const int64_t first = (block.part * all.lists + block.list) * all.places + block.own;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if (r * block.step >= block.owned) break;
    C* const to = task.partial + (first + r * block.step) * kTaps;
#pragma unroll
    for (int i = 0; i < Shape::kOfRun; ++i) to[i] = block.point(r, i) < all.points ? sums[r][i] : C(0);
  }
}

// Index i is a place of all lists, whose sums a thread computes alone.
template <int kTaps, typename T>
struct WeightsOfPlace {
  GatherSizes all;
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

// Launches the kernel if a row fits shared memory, and returns for how many parts, or 0.
template <int kTaps, int kPack, typename T>
int64_t launch_weights(Call& call, WeightTask<T> task, int64_t parts) {
  // Registers are enough for the indices and sums of so many places of a thread.
  constexpr int kRuns = sizeof(T) == 8 ? 1 : 4 / kPack;
  using Wide = StageShape<kTaps, kWideChannels<T>, kPack, kRuns>;
  using Narrow = StageShape<kTaps, kNarrowChannels<T>, kPack, 2 * kRuns>;
  const Gpu gpu;
  if (fits_wide<T>(task.all, gpu)) return launch_staged<Wide>(call, weight_kernel<Wide, T>, task, gpu, parts);
  if (fits_narrow<T>(task.all, gpu)) return launch_staged<Narrow>(call, weight_kernel<Narrow, T>, task, gpu, parts);
  return 0;
}

template <int kTaps, typename T>
void weights_on_gpu(Call& call, const GatherSizes& all, const T* dout, Indices index,
                    const WeightGradient<T>& gradient) {
  const auto [features, partial, most, dweight] = gradient;
  constexpr int N = kPackWidth<T>, kPack = sizeof(T) > 4 ? 2 : 4;
  const int64_t size = all.lists * all.places * kTaps;
  if (size == 0) return;
  const bool packs = all.points % N == 0 && is_aligned<N>(features);
  const WeightTask<T> task{{all, features, index, packs}, dout, partial};
  const bool aligned =
      all.places % kPack == 0 && is_aligned<kPack>(dout) && is_aligned<16>(static_cast<const char*>(index.data));
  const int64_t parts =
      aligned ? launch_weights<kTaps, kPack>(call, task, most) : launch_weights<kTaps, 1>(call, task, most);
  if (parts > 0) {
    sum_rows(call, parts, size, size, static_cast<const Compute<T>*>(partial), dweight);
  } else {
    on_gpu(call, all.lists * all.places, std::max(all.rows() * all.places, all.rows() * all.points),
           WeightsOfPlace<kTaps, T>{all, features, dout, index, dweight});
  }
}

}  // namespace msops::gather
