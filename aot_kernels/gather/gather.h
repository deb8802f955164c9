// A gather takes elements of rows at given indices: out[b][c][m] = features[b][c][index[b][m]]. With three taps, an
// element of `out` is a weighted sum: out[b][c][m] = sum over k of weight[b][m][k] features[b][c][index[b][m][k]].
#pragma once

#include "../common/call.h"

namespace msops {

// Gather has the sizes: `features` is (lists, channels, points), `out` is (lists, channels, places), and the indices,
// as the weights, are (lists, places, taps). All channels of a list share its indices.
struct Gather {
  int64_t lists, channels, points, places;

  MSOPS_BOTH int64_t rows() const { return lists * channels; }
};

// Requires sizes for which positions in a row have 32 bits.
inline void require_countable(Call& call, const Gather& all, const Tensor& features, int taps) {
  constexpr int64_t kMost = INT32_MAX - 65536;
  call.require(all.points <= kMost, kBadShape, "%s has more than 2^31 - 65537 points", features.name);
  call.require(all.places <= kMost / taps, kBadShape, "more than 2^31 - 65537 indices of one list");
}

}  // namespace msops
