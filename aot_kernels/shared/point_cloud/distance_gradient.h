// The gradient of the distances of neighbours: d|x - q| / dx = (x - q) / |x - q|, which is 0 where the distance is 0 or
// not finite.
#pragma once

#include "../../common/scatter.h"
#include "distance.h"

namespace msops::points {

// DistanceGradient has the terms of all distances. Source s of a cloud is the distance of query s / k to point
// index[s].
template <typename T>
struct DistanceGradient {
  using C = Compute<T>;
  const T *points, *queries;  // (clouds, size, 3), (clouds, number, 3)
  const int32_t* index;       // (clouds, number, k)
  const T* ddistances;        // (clouds, number, k)
  int64_t size, number, k;

  // Returns the gradient of one coordinate of a source's point; that of its query is the negative.
  MSOPS_BOTH C operator()(int64_t cloud, int64_t axis, int64_t source) const {
    const int64_t at = cloud * number * k + source, j = index[at];
    if (j < 0 || j >= size) return 0;
    const T* const point = points + (cloud * size + j) * 3;
    const T* const query = queries + (cloud * number + source / k) * 3;
    const C distance = sqrt(squared_distance(point_at(point, 0), point_at(query, 0)));
    if (!(distance > 0 && distance < kInfinity<C>)) return 0;
    return C(ddistances[at]) * ((C(point[axis]) - C(query[axis])) / distance);
  }
};

// Computes one coordinate of the gradient of the queries.
template <typename T>
struct QueryGradient {
  DistanceGradient<T> all;
  T* dqueries;  // (clouds, number, 3)

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t query = i / 3, axis = i % 3, cloud = query / all.number, first = query % all.number * all.k;
    Sum<T> sum;
    for (int64_t j = 0; j < all.k; ++j) sum += -all(cloud, axis, first + j);
    assign(dqueries[i], sum.total());
  }
};

// DistanceTensors are what an entry for the gradient takes and gives.
struct DistanceTensors {
  Tensor points, queries, index, ddistances, dpoints, dqueries;
  Tensor sources;  // scratch for invert(): (clouds, numbers of a cloud)
};

// Checks the tensors, computes the gradients, and returns what the entry must return.
inline int distance_gradients(Call& call, const DistanceTensors& of) {
  const int64_t clouds = of.points.dim(0), size = of.points.dim(1), number = of.queries.dim(1), k = of.index.dim(2);
  call.require_shape(of.points, {clouds, size, 3});
  call.require_shape(of.queries, {clouds, number, 3});
  call.require_shape(of.index, {clouds, number, k});
  call.require_shape(of.ddistances, {clouds, number, k});
  call.require_same_shape(of.dpoints, of.points);
  call.require_same_shape(of.dqueries, of.queries);
  call.require_shape(of.sources, {clouds, scatter_scratch(size, number * k)});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const DistanceGradient<T> all{
        of.points.as<T>(), of.queries.as<T>(), of.index.as<int32_t>(), of.ddistances.as<T>(), size, number, k};
    const QueryGradient<T> queries{all, of.dqueries.as<T>()};
    const int64_t numbers = of.queries.size;
    parallel_for(call, numbers, numbers, queries, 8 * static_cast<double>(k));
    const Inverse inverse = invert(call, clouds, size, number * k, all.index, of.sources.as<int32_t>());
    scatter_add(call, inverse, 3, ChannelOrder::kLast, all, of.dpoints.as<T>());
  });
}

}  // namespace msops::points
