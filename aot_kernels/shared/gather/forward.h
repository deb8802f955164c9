// A gather, or an interpolation, on the device of the call.
#pragma once

#include "cpu.h"
#ifdef __CUDACC__
#include "forward_gpu.h"
#endif

namespace msops::gather {

// Rows of more points do not fit the shared memory of a GPU, and are transposed.
constexpr int64_t kMostStaged = 28000;

// Returns how many elements of scratch the forward entries need.
inline int64_t gather_scratch(const Call& call, const GatherSizes& all) {
  constexpr int64_t kToAlign = 16;
  if (!call.ok() || all.points <= kMostStaged) return kToAlign;
  return kToAlign + size_of({all.lists, (all.channels + 15) / 16, 16, all.points});
}

// `weight` is absent if there is one tap.
template <int kTaps, typename T, typename Index>
void forward(Call& call, const GatherSizes& all, const Tensor& features, const Tensor& idx, const Tensor& weight,
             [[maybe_unused]] const Tensor& packs, const Tensor& out) {
  if (call.is_on_cpu()) {
    require_indices<Index>(call, idx, features, all.points, "points");
    if (out.size == 0) return;
    const GatherOnCpu<kTaps, T, Index> body{all, features.as<T>(), idx.as<Index>(), weight.as<T>(), out.as<T>()};
    return on_cpu(call, body.items(), body, body.cost());
  }
#ifdef __CUDACC__
  const GatherTask<T> task{all, features.as<T>(), {idx.data, sizeof(Index) == 8}, weight.as<T>(), out.as<T>()};
  gather_on_gpu<kTaps>(call, task, all.points > kMostStaged ? packs.data : nullptr);
#endif
}

}  // namespace msops::gather
