// idx are the k points nearest to a query, and dist their distances |point - query|; equally near ones in their order

#include "shared/point_cloud/distance_gradient.h"
#include "shared/point_cloud/nearest.h"
#ifdef __CUDACC__
#include "shared/point_cloud/nearest_gpu.h"
#endif

using namespace msops;
using namespace msops::points;

// (xyz, new_xyz, lengths?, new_lengths?) -> (idx, dist, points, lattices, ends, order): what comes after dist is
// scratch, for the cells. What k, lengths or new_lengths ask for and is not there has index -1 and distance 0.
MSOPS_ENTRY(KnnForward) {
  const int64_t k = call.attribute("k", 1, INT32_MAX);
  const Tensor xyz = call.tensor("xyz", 3), new_xyz = call.tensor("new_xyz", 3);
  const Tensor lengths = call.optional_of("int32", "lengths", 1);
  const Tensor new_lengths = call.optional_of("int32", "new_lengths", 1);
  const Tensor idx = call.tensor_of("int32", "idx", 3), dist = call.tensor("dist", 3);
  const CellScratch scratch(call);
  const int64_t clouds = xyz.dim(0), size = xyz.dim(1), number = new_xyz.dim(1), axes = xyz.dim(2);
  require_axes(call, xyz);
  call.require_shape(xyz, {clouds, size, axes});
  call.require_shape(new_xyz, {clouds, number, axes});
  call.require_shape(idx, {clouds, number, k});
  call.require_shape(dist, {clouds, number, k});
  scratch.check(call, clouds, size);
  require_lengths(call, "lengths", lengths, clouds, size);
  require_lengths(call, "new_lengths", new_lengths, clouds, number);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Nearest<T> all{xyz.as<T>(), new_xyz.as<T>(), clouds, size, number, k, idx.as<int32_t>(), dist.as<T>()};
    const CellsOfClouds<T> cells = scratch.clouds<T>(call, xyz, k, 0, lengths.as<int32_t>());
    if (axes == 3 && k <= size && lengths.data == nullptr && new_lengths.data == nullptr)
      return find_nearest(call, all, cells);
    const AnyNearest<T> any{all, lengths.as<int32_t>(), new_lengths.as<int32_t>(), axes};
    find_nearest(call, any, CellsOfAny<T>{cells, axes});
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
  return distance_gradients<true>(call, {xyz, new_xyz, idx, ddist, dxyz, dnew_xyz, sources});
}

MSOPS_SCRATCH(KnnBackward) {
  const Tensor xyz = call.tensor("xyz", 3), new_xyz = call.tensor("new_xyz", 3);
  const Tensor idx = call.tensor_of("int32", "idx", 3);
  return {{xyz.dim(0), scatter_scratch(xyz.dim(1), size_of({new_xyz.dim(1), idx.dim(2)}))}};
}
