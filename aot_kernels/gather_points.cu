// out[b, c, m] = features[b, c, idx[b, m]] for gather_points, out[b, c, m, s] = features[b, c, idx[b, m, s]] for
// group_points, and their gradients, a sum for each point. The entries differ in the rank of the indices alone.

#include "shared/gather/backward.h"
#include "shared/gather/forward.h"

using namespace msops;
using namespace msops::gather;

namespace {

// Returns the sizes of a gather, where idx has `axes` axes beside that of the lists.
GatherSizes gather_of(const Tensor& features, const Tensor& idx, int axes) {
  GatherSizes all{features.dim(0), features.dim(1), features.dim(2), 1};
  for (int d = 1; d <= axes; ++d) all.places *= idx.dim(d);
  return all;
}

// Requires the shapes (lists, channels, points) of `features`, (lists, ...) of `idx` and (lists, channels, ...) of
// `out`.
GatherSizes require_gather(Call& call, const Tensor& features, const Tensor& idx, const Tensor& out, int axes) {
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
int forward_entry(Call& call, int axes) {
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

Shapes forward_scratch(Call& call, int axes) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 1 + axes);
  return {{gather_scratch(call, gather_of(features, idx, axes))}};
}

// (idx, dout, features, scratch) -> (dfeatures): `features` gives its shape alone.
int backward_entry(Call& call, int axes) {
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

Shapes backward_scratch(Call& call, int axes) {
  const Tensor idx = call.tensor_of("index", "idx", 1 + axes);
  const Tensor dout = call.tensor("dout", 2 + axes);
  const GatherSizes all = gather_of(call.tensor("features", 3), idx, axes);
  return {{scatter_words(call, all, 1, SumSizes(all, 1, dout))}};
}

}  // namespace

MSOPS_ENTRY(GatherPointsForward) { return forward_entry(call, 1); }
MSOPS_SCRATCH(GatherPointsForward) { return forward_scratch(call, 1); }

MSOPS_ENTRY(GatherPointsBackward) { return backward_entry(call, 1); }
MSOPS_SCRATCH(GatherPointsBackward) { return backward_scratch(call, 1); }

MSOPS_ENTRY(GroupPointsForward) { return forward_entry(call, 2); }
MSOPS_SCRATCH(GroupPointsForward) { return forward_scratch(call, 2); }

MSOPS_ENTRY(GroupPointsBackward) { return backward_entry(call, 2); }
MSOPS_SCRATCH(GroupPointsBackward) { return backward_scratch(call, 2); }
