// The entries of gather_points and group_points differ in the rank of their indices alone.
#pragma once

#include "backward.h"
#include "forward.h"

namespace msops::gather {

// Returns the sizes of a gather, where idx has `axes` axes beside that of the lists.
inline GatherSizes gather_of(const Tensor& features, const Tensor& idx, int axes) {
  GatherSizes all{features.dim(0), features.dim(1), features.dim(2), 1};
  for (int d = 1; d <= axes; ++d) all.places *= idx.dim(d);
  return all;
}

// Requires the shapes (lists, channels, points) of `features`, (lists, ...) of `idx` and (lists, channels, ...) of
// `out`.
inline GatherSizes require_gather(Call& call, const Tensor& features, const Tensor& idx, const Tensor& out, int axes) {
  const GatherSizes all = gather_of(features, idx, axes);
  if (axes == 1) {
    call.require_shape(idx, {all.lists, idx.dim(1)});
    call.require_shape(out, {all.lists, all.channels, idx.dim(1)});
  } else {
    call.require_shape(idx, {all.lists, idx.dim(1), idx.dim(2)});
    call.require_shape(out, {all.lists, all.channels, idx.dim(1), idx.dim(2)});
  }
  require_countable(call, all, features, 1);
  return all;
}

// (features, idx, packs) -> (out): `packs` is scratch.
inline int forward_entry(Call& call, int axes) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 1 + axes);
  const Tensor out = call.tensor("out", 2 + axes), packs = call.tensor("packs", 1);
  const GatherSizes all = require_gather(call, features, idx, out, axes);
  call.require_shape(packs, {gather_scratch(call, all)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      forward<1, T, Index>(call, all, features, idx, Tensor{}, packs, out);
    });
  });
}

inline Shapes forward_scratch(Call& call, int axes) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 1 + axes);
  return {{gather_scratch(call, gather_of(features, idx, axes))}};
}

// (idx, dout, features, scratch) -> (dfeatures): `features` gives its shape alone.
inline int backward_entry(Call& call, int axes) {
  const Tensor idx = call.tensor_of("index", "idx", 1 + axes), dout = call.tensor("dout", 2 + axes);
  const Tensor features = call.tensor("features", 3), dfeatures = call.tensor("dfeatures", 3);
  const Tensor scratch = call.tensor_of("int32", "scratch", 1);
  const GatherSizes all = require_gather(call, features, idx, dout, axes);
  call.require_same_shape(dfeatures, features);
  call.require_shape(scratch, {scatter_words(call, all, 1, SumSizes(all, 1, dout))});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      backward<1, T, Index>(call, all, dout, idx, Tensor{}, features, scratch, dfeatures);
    });
  });
}

inline Shapes backward_scratch(Call& call, int axes) {
  const Tensor idx = call.tensor_of("index", "idx", 1 + axes);
  const Tensor dout = call.tensor("dout", 2 + axes);
  const GatherSizes all = gather_of(call.tensor("features", 3), idx, axes);
  return {{scatter_words(call, all, 1, SumSizes(all, 1, dout))}};
}

}  // namespace msops::gather
