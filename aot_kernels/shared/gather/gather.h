// A gather takes elements of rows at given indices: out[b][c][m] = features[b][c][index[b][m]]. With three taps, an
// element of `out` is a weighted sum: out[b][c][m] = sum over k of weight[b][m][k] features[b][c][index[b][m][k]].
#pragma once

#include <algorithm>

#include "../../common/scratch.h"

namespace msops::gather {

// GatherSizes are the sizes of a gather: `features` is (lists, channels, points), `out` is (lists, channels, places),
// and the indices, as the weights, are (lists, places, taps). All channels of a list share its indices.
struct GatherSizes {
  int64_t lists, channels, points, places;

  MSOPS_BOTH int64_t rows() const { return lists * channels; }
};

// Requires sizes for which positions in a row have 32 bits.
inline void require_countable(Call& call, const GatherSizes& all, const Tensor& features, int taps) {
  constexpr int64_t kMost = INT32_MAX - 65536;
  call.require(all.points <= kMost, kBadShape, "%s has more than 2^31 - 65537 points", features.name);
  call.require(all.places <= kMost / taps, kBadShape, "more than 2^31 - 65537 indices of one list");
}

// Indices are int32 or int64. Kernels for GPUs tell that at run time, so that there are half as many.
struct Indices {
  const void* data;
  bool is_long;

  // Returns an index that int32 can hold, and -1 in place of any other, which is out of range.
  static MSOPS_BOTH int narrow(int64_t index) {
    return 0 <= index && index <= INT32_MAX ? static_cast<int>(index) : -1;
  }
  MSOPS_BOTH int operator[](int64_t i) const {
    return is_long ? narrow(static_cast<const int64_t*>(data)[i]) : static_cast<const int32_t*>(data)[i];
  }
};

// GatherTask is what a forward kernel gets.
template <typename T>
struct GatherTask {
  GatherSizes all;
  const T* features;
  Indices index;
  const T* weight;  // null if there is one tap
  T* out;
};

// WeightGradient says where the gradient of the weights goes, which is a sum over channels. `partial` has room for the
// sums of `most` parts of the channels.
template <typename T>
struct WeightGradient {
  const T* features;
  Compute<T>* partial;  // (parts, lists, places, taps)
  int64_t most;
  T* dweight;
};

}  // namespace msops::gather
