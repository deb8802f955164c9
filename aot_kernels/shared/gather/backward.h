// The gradients of a gather's features and weights on the device of the call.
#pragma once

#include "cpu.h"
#include "sums.h"
#include "tiles.h"
#include "weights.h"
#ifdef __CUDACC__
#include "backward_gpu.h"
#endif

namespace msops::gather {

// Returns how many int32 numbers of scratch the backward entries need on a GPU.
inline int64_t scatter_words(const Call& call, const GatherSizes& all, int taps, const SumSizes& sizes) {
  return call.ok() ? std::max(tile_words(all, taps), (sizes.bytes(all, taps) + 3) / 4) + 4 : 0;  // 4: to align them
}

// `weight` and `weights` are absent if there is one tap.
template <int kTaps, typename T, typename Index>
void backward(Call& call, const GatherSizes& all, const Tensor& dout, const Tensor& idx, const Tensor& weight,
              const Tensor& features, [[maybe_unused]] const Tensor& scratch, const Tensor& dfeatures,
              [[maybe_unused]] const WeightGradient<T>& weights = {}) {
  if (call.is_on_cpu()) {
    require_indices<Index>(call, idx, features, all.points, "points");
    const ScatterOnCpu<kTaps, T, Index> body{all, dout.as<T>(), idx.as<Index>(), weight.as<T>(), dfeatures.as<T>()};
    if (dfeatures.size > 0) on_cpu(call, body.items(), body, body.cost());
    if constexpr (kTaps > 1) {
      const WeightGradientOnCpu<kTaps, T, Index> sums{all, features.as<T>(), dout.as<T>(), idx.as<Index>(),
                                                      weights.dweight};
      on_cpu(call, sums.items(), sums, sums.cost());
    }
    return;
  }
#ifdef __CUDACC__
  scatter_on_gpu<kTaps>(call, all, SumSizes(all, kTaps, dout), dout.as<const T>(), idx.as<const Index>(),
                        weight.as<const T>(), scratch.as<int32_t>(), dfeatures.as<T>(), weights);
#endif
}

}  // namespace msops::gather
