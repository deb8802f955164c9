// idx are the k points nearest to a query, and dist their distances |point - query|; equally near ones in their order

#include "shared/point_cloud/distance_gradient.h"
#include "shared/point_cloud/nearest.h"
#ifdef __CUDACC__
#include "shared/point_cloud/nearest_gpu.h"
#endif

using namespace msops;
using namespace msops::points;

// (xyz, new_xyz) -> (idx, dist, points, lattices, ends, order): what comes after dist is scratch, for the cells.
MSOPS_ENTRY(KnnForward) {
  const int64_t k = call.attribute("k", 1, INT32_MAX);
  const Tensor xyz = call.tensor("xyz", 3), new_xyz = call.tensor("new_xyz", 3);
  const Tensor idx = call.tensor_of("int32", "idx", 3), dist = call.tensor("dist", 3);
  const CellScratch scratch(call);
  const int64_t clouds = xyz.dim(0), size = xyz.dim(1), number = new_xyz.dim(1);
  call.require_shape(xyz, {clouds, size, 3});
  call.require_shape(new_xyz, {clouds, number, 3});
  call.require(k <= size, kBadShape, "k is %lld, xyz has %lld points", static_cast<long long>(k),
               static_cast<long long>(size));
  call.require_shape(idx, {clouds, number, k});
  call.require_shape(dist, {clouds, number, k});
  scratch.check(call, clouds, size);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Nearest<T> all{xyz.as<T>(), new_xyz.as<T>(), clouds, size, number, k, idx.as<int32_t>(), dist.as<T>()};
    find_nearest(call, all, scratch.clouds<T>(call, xyz, k));
  });
}

MSOPS_SCRATCH(KnnForward) {
  const Tensor xyz = call.tensor("xyz", 3);
  return CellScratch::shapes(xyz.dim(0), xyz.dim(1));
}

// (xyz, new_xyz, idx, ddist) -> (dxyz, dnew_xyz, sources): `sources` is scratch.
MSOPS_ENTRY(KnnBackward) {
  const Tensor xyz = call.tensor("xyz", 3), new_xyz = call.tensor("new_xyz", 3);
  const Tensor idx = call.tensor_of("int32", "idx", 3), ddist = call.tensor("ddist", 3);
  const Tensor dxyz = call.tensor("dxyz", 3), dnew_xyz = call.tensor("dnew_xyz", 3);
  const Tensor sources = call.tensor_of("int32", "sources", 2);
  return distance_gradients(call, {xyz, new_xyz, idx, ddist, dxyz, dnew_xyz, sources});
}

MSOPS_SCRATCH(KnnBackward) {
  const Tensor xyz = call.tensor("xyz", 3), new_xyz = call.tensor("new_xyz", 3);
  const Tensor idx = call.tensor_of("int32", "idx", 3);
  return {{xyz.dim(0), scatter_scratch(xyz.dim(1), new_xyz.dim(1) * idx.dim(2))}};
}
