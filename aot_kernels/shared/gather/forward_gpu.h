// On the GPU:
//
//   a row fits shared memory        -> row_kernel of rows_gpu.h, if there are many terms.
//   otherwise, with room in scratch -> pack_kernel and unpack_kernel of packs_gpu.h, unless few points are taken.
//   otherwise                       -> each element is read by itself (TakeElement).
#pragma once

#include "../../common/parallel.h"
#include "packs_gpu.h"
#include "rows_gpu.h"

namespace msops::gather {

// Computes an element of `out`. Index i is the element.
template <int kTaps, typename T>
struct TakeElement {
  GatherTask<T> task;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const GatherSizes& all = task.all;
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

constexpr int64_t kFewTerms = 1 << 19;  // for which it does not pay to stage rows
constexpr int64_t kSparse = 4;          // points for each place, where it does not pay to transpose them

template <int kTaps, int kPlaces, typename T>
void gather_places(Call& call, const GatherTask<T>& task, T* packs) {
  const GatherSizes& all = task.all;
  const bool is_sparse = kSparse * all.places <= all.points;
  if (packs && !is_sparse) return gather_packed<kTaps, kPlaces>(call, task, packs);
  constexpr int N = kPackWidth<T>;
  const bool aligned = all.points % N == 0 && is_aligned<N>(task.features);
  const RowTask<T> rows{{all, task.features, task.index, aligned}, task.weight, task.out};
  const int64_t size = all.rows() * all.places;
  if (!packs && kTaps * size > kFewTerms && gather_rows<kTaps, kPlaces>(call, rows)) return;
  on_gpu(call, size, std::max(size, all.rows() * all.points), TakeElement<kTaps, T>{task});
}

// `scratch` has room for packs, or is null. It may begin at any element.
template <int kTaps, typename T>
void gather_on_gpu(Call& call, const GatherTask<T>& task, void* scratch) {
  constexpr int kPlaces = sizeof(T) > 4 ? 2 : 4;
  if (task.all.rows() * task.all.places == 0) return;
  T* const packs = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(scratch) + 31) / 32 * 32);
  const bool aligned = task.all.places % kPlaces == 0 && is_aligned<kPlaces>(task.out) &&
                       is_aligned<16>(static_cast<const char*>(task.index.data)) && is_aligned<kPlaces>(task.weight);
  aligned ? gather_places<kTaps, kPlaces>(call, task, packs) : gather_places<kTaps, 1>(call, task, packs);
}

}  // namespace msops::gather
