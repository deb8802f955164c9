// idx are the three known points nearest to an unknown one, and dist their distances |known - unknown|

#include "shared/point_cloud/distance_gradient.h"
#include "shared/point_cloud/nearest.h"
#ifdef __CUDACC__
#include "shared/point_cloud/nearest_gpu.h"
#endif

using namespace msops;
using namespace msops::points;

// (unknown, known) -> (dist, idx, points, lattices, ends, order): what comes after idx is scratch, for the cells.
MSOPS_ENTRY(ThreeNnForward) {
  const Tensor unknown = call.tensor("unknown", 3), known = call.tensor("known", 3);
  const Tensor dist = call.tensor("dist", 3), idx = call.tensor_of("int32", "idx", 3);
  const CellScratch scratch(call);
  const int64_t clouds = known.dim(0), size = known.dim(1), number = unknown.dim(1);
  call.require_shape(known, {clouds, size, 3});
  call.require_shape(unknown, {clouds, number, 3});
  call.require(size >= 3, kBadShape, "known has %lld points, expected at least 3", static_cast<long long>(size));
  call.require_shape(dist, {clouds, number, 3});
  call.require_shape(idx, {clouds, number, 3});
  scratch.check(call, clouds, size);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Nearest<T> all{known.as<T>(), unknown.as<T>(), clouds, size, number, 3, idx.as<int32_t>(), dist.as<T>()};
    find_nearest(call, all, scratch.clouds<T>(call, known, 3));
  });
}

MSOPS_SCRATCH(ThreeNnForward) {
  call.tensor("unknown", 3);
  const Tensor known = call.tensor("known", 3);
  return CellScratch::shapes(known.dim(0), known.dim(1));
}

// (unknown, known, idx, ddist) -> (dunknown, dknown, sources): `sources` is scratch.
MSOPS_ENTRY(ThreeNnBackward) {
  const Tensor unknown = call.tensor("unknown", 3), known = call.tensor("known", 3);
  const Tensor idx = call.tensor_of("int32", "idx", 3), ddist = call.tensor("ddist", 3);
  const Tensor dunknown = call.tensor("dunknown", 3), dknown = call.tensor("dknown", 3);
  const Tensor sources = call.tensor_of("int32", "sources", 2);
  call.require_shape(idx, {known.dim(0), unknown.dim(1), 3});
  return distance_gradients(call, {known, unknown, idx, ddist, dknown, dunknown, sources});
}

MSOPS_SCRATCH(ThreeNnBackward) {
  const Tensor unknown = call.tensor("unknown", 3), known = call.tensor("known", 3);
  return {{known.dim(0), scatter_scratch(known.dim(1), size_of({unknown.dim(1), 3}))}};
}
