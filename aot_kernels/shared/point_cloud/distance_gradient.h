// The gradient of the distances of neighbours: d|x - q| / dx = (x - q) / |x - q|, which is 0 where the distance is 0 or
// not finite.
#pragma once

#include "../../common/scatter.h"
#include "distance.h"

namespace msops::points {

// Points have three coordinates, or any number of them, up to kMostAxes.
struct ThreeAxes {
  static MSOPS_BOTH int64_t axes() { return 3; }
  template <typename T>
  static MSOPS_BOTH Compute<T> square(const T* a, const T* b) {
    return squared_distance(point_at(a, 0), point_at(b, 0));
  }
};
struct AnyAxes {
  int64_t count;

  MSOPS_BOTH int64_t axes() const { return count; }
  template <typename T>
  MSOPS_BOTH Compute<T> square(const T* a, const T* b) const {
    return squared_distance(a, b, count);
  }
};

// DistanceGradient has the terms of all distances. Source s of a cloud is the distance of query s / k to point
// index[s].
template <typename T, typename Axes>
struct DistanceGradient : Axes {
  using C = Compute<T>;
  const T *points, *queries;  // (clouds, size, axes), (clouds, number, axes)
  const int32_t* index;       // (clouds, number, k)
  const T* ddistances;        // (clouds, number, k)
  int64_t size, number, k;

  // Returns the gradient of one coordinate of a source's point; that of its query is the negative.
  MSOPS_BOTH C operator()(int64_t cloud, int64_t axis, int64_t source) const {
    const int64_t at = cloud * number * k + source, j = index[at];
    if (j < 0 || j >= size) return 0;
    const T* const point = points + (cloud * size + j) * this->axes();
    const T* const query = queries + (cloud * number + source / k) * this->axes();
    const C distance = sqrt(this->square(point, query));
    if (!(distance > 0 && distance < kInfinity<C>)) return 0;
    return C(ddistances[at]) * ((C(point[axis]) - C(query[axis])) / distance);
  }
};

// Computes one coordinate of the gradient of the queries.
template <typename T, typename Axes>
struct QueryGradient {
  DistanceGradient<T, Axes> all;
  T* dqueries;  // (clouds, number, axes)

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t axes = all.axes(), query = i / axes, axis = i % axes, cloud = query / all.number,
                  first = query % all.number * all.k;
    Sum<T> sum;
    for (int64_t j = 0; j < all.k; ++j) sum += -all(cloud, axis, first + j);
    assign(dqueries[i], sum.total());
  }
};

// Requires points of 1 to kMostAxes coordinates.
inline void require_axes(Call& call, const Tensor& points) {
  const int64_t axes = points.dim(2);
  call.require(1 <= axes && axes <= kMostAxes, kBadShape, "%s has %lld coordinates, expected 1 to %d", points.name,
               static_cast<long long>(axes), kMostAxes);
}

// DistanceTensors are what an entry for the gradient takes and gives.
struct DistanceTensors {
  Tensor points, queries, index, ddistances, dpoints, dqueries;
  Tensor sources;  // scratch for invert(): (clouds, numbers of a cloud)
};

template <typename T, typename Axes>
void compute_gradients(Call& call, const DistanceTensors& of, const Axes& axes) {
  const int64_t clouds = of.points.dim(0), size = of.points.dim(1), number = of.queries.dim(1), k = of.index.dim(2);
  const DistanceGradient<T, Axes> all{
      axes, of.points.as<T>(), of.queries.as<T>(), of.index.as<int32_t>(), of.ddistances.as<T>(), size, number, k};
  const QueryGradient<T, Axes> queries{all, of.dqueries.as<T>()};
  const int64_t numbers = of.queries.size;
  parallel_for(call, numbers, numbers, queries, 8 * static_cast<double>(k));
  const Inverse inverse = invert(call, clouds, size, number * k, all.index, of.sources.as<int32_t>());
  scatter_add(call, inverse, axes.axes(), ChannelOrder::kLast, all, of.dpoints.as<T>());
}

// Checks the tensors, computes the gradients, and returns what the entry must return. Points have three coordinates,
// unless `kAny`.
template <bool kAny = false>
int distance_gradients(Call& call, const DistanceTensors& of) {
  const int64_t clouds = of.points.dim(0), size = of.points.dim(1), number = of.queries.dim(1), k = of.index.dim(2);
  const int64_t axes = kAny ? of.points.dim(2) : 3;
  if (kAny) require_axes(call, of.points);
  call.require_shape(of.points, {clouds, size, axes});
  call.require_shape(of.queries, {clouds, number, axes});
  call.require_shape(of.index, {clouds, number, k});
  call.require_shape(of.ddistances, {clouds, number, k});
  call.require_same_shape(of.dpoints, of.points);
  call.require_same_shape(of.dqueries, of.queries);
  call.require_shape(of.sources, {clouds, scatter_scratch(size, size_of({number, k}))});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (kAny)
      if (axes != 3) return compute_gradients<T>(call, of, AnyAxes{axes});
    compute_gradients<T>(call, of, ThreeAxes{});
  });
}

}  // namespace msops::points
