// out[b, c, n] = sum over three k of weight[b, n, k] features[b, c, idx[b, n, k]], and its gradients.

#include "shared/gather/backward.h"
#include "shared/gather/forward.h"

using namespace msops;
using namespace msops::gather;

namespace {

constexpr int kTaps = 3;

GatherSizes gather_of(const Tensor& features, const Tensor& idx) {
  return {features.dim(0), features.dim(1), features.dim(2), idx.dim(1)};
}

GatherSizes require_interpolation(Call& call, const Tensor& features, const Tensor& idx, const Tensor& weight,
                                  const Tensor& out) {
  const GatherSizes all = gather_of(features, idx);
  call.require_shape(idx, {all.lists, all.places, kTaps});
  call.require_same_shape(weight, idx);
  call.require_shape(out, {all.lists, all.channels, all.places});
  require_countable(call, all, features, kTaps);
  return all;
}

}  // namespace

// (features, idx, weight, packs) -> (out): `packs` is scratch.
MSOPS_ENTRY(ThreeInterpolateForward) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 3);
  const Tensor weight = call.tensor("weight", 3), out = call.tensor("out", 3), packs = call.tensor("packs", 1);
  const GatherSizes all = require_interpolation(call, features, idx, weight, out);
  call.require_shape(packs, {gather_scratch(call, all)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      gather::forward<kTaps, T, Index>(call, all, features, idx, weight, packs, out);
    });
  });
}

MSOPS_SCRATCH(ThreeInterpolateForward) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 3);
  return {{gather_scratch(call, gather_of(features, idx))}};
}

// (features, idx, weight, dout, scratch, partial) -> (dfeatures, dweight): `scratch` is for the features, and `partial`
// for sums over parts of the channels.
MSOPS_ENTRY(ThreeInterpolateBackward) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 3);
  const Tensor weight = call.tensor("weight", 3), dout = call.tensor("dout", 3);
  const Tensor dfeatures = call.tensor("dfeatures", 3), dweight = call.tensor("dweight", 3);
  const Tensor scratch = call.tensor_of("int32", "scratch", 1), partial = call.scratch("partial", 2);
  const GatherSizes all = require_interpolation(call, features, idx, weight, dout);
  const SumSizes sizes(all, kTaps, dout);
  call.require_same_shape(dfeatures, features);
  call.require_same_shape(dweight, weight);
  call.require_shape(scratch, {scatter_words(call, all, kTaps, sizes)});
  call.require(partial.dim(0) >= std::max<int64_t>(1, sizes.slots), kBadShape, "partial has too few rows");
  call.require_shape(partial, {partial.dim(0), dweight.size});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(idx, [&](auto index) {
      using Index = typename decltype(index)::type;
      const WeightGradient<T> weights{features.as<const T>(), partial.as<Compute<T>>(), partial.dim(0),
                                      dweight.as<T>()};
      gather::backward<kTaps, T, Index>(call, all, dout, idx, weight, features, scratch, dfeatures, weights);
    });
  });
}

// The channels are split where there are few places, but each part has at least 32; or into the slots of SumSizes.
MSOPS_SCRATCH(ThreeInterpolateBackward) {
  const Tensor features = call.tensor("features", 3), idx = call.tensor_of("index", "idx", 3);
  const GatherSizes all = gather_of(features, idx);
  const SumSizes sizes(all, kTaps, features);
  const int64_t places = all.lists * all.places;
  const int64_t parts = std::min(all.channels / 32, 512 / std::max<int64_t>(1, places / 2048));
  return {{scatter_words(call, all, kTaps, sizes)}, {std::max<int64_t>({1, parts, sizes.slots}), places * kTaps}};
}
