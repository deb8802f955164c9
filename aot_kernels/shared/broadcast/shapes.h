// These functions say how tensors broadcast to the shape of a result, by NumPy's rules.
#pragma once

#include "../../common/axes.h"
#include "../../common/call.h"

namespace msops::broadcast {

// Returns the length of `tensor` along an axis of `to`.
inline int64_t length_along(const Tensor& tensor, const Tensor& to, int axis) {
  const int own = axis - (to.rank - tensor.rank);
  return own < 0 ? 1 : tensor.dim(own);
}

// Computes the stride of `tensor` along each axis of `to`, to whose shape it is broadcast; returns false if it can't
// be.
inline bool broadcast_strides(const Tensor& tensor, const Tensor& to, int64_t (&strides)[kMaxRank]) {
  int64_t stride = 1;
  for (int axis = to.rank - 1; axis >= 0; --axis) {
    const int64_t length = length_along(tensor, to, axis);
    if (length != to.dim(axis) && length != 1) return false;
    strides[axis] = length == 1 ? 0 : stride;
    stride *= length;
  }
  return tensor.rank <= to.rank;
}

// Computes the strides of K inputs along the axes of `out`, and requires that their broadcast shape is that of `out`.
template <int K>
void require_broadcast(Call& call, const Tensor (&inputs)[K], const Tensor& out, int64_t (&strides)[K][kMaxRank]) {
  call.require(out.rank <= kMaxRank, kBadRank, "%s has rank %d, more than %d", out.name, out.rank, kMaxRank);
  if (!call.ok()) return;
  bool fits = true, has_rank = false;
  for (int k = 0; k < K; ++k) {
    fits &= broadcast_strides(inputs[k], out, strides[k]);
    has_rank |= inputs[k].rank == out.rank;
  }
  for (int axis = 0; axis < out.rank; ++axis) {
    bool has_length = false;
    for (const Tensor& input : inputs) has_length |= length_along(input, out, axis) == out.dim(axis);
    fits &= has_length;
  }
  call.require(fits && has_rank, kBadShape, "the inputs do not broadcast to the shape of %s", out.name);
}

}  // namespace msops::broadcast
