// What the kernels of furthest_point_sample share.
#pragma once

#include "../shared/point_cloud/distance.h"
#include "../shared/point_cloud/lengths.h"

namespace msops::points {

constexpr int64_t kExchange = 8192;  // numbers of scratch for candidates

// Sampling describes a call: each of its clouds gives `samples` indices, and begins with point 0.
template <typename T>
struct Sampling {
  using C = Compute<T>;
  const T* points;         // (clouds, size, 3)
  const int32_t* lengths;  // how many points of each cloud count, or null: all
  int64_t clouds, size, samples;
  int32_t* indices;  // (clouds, samples)

  MSOPS_BOTH int64_t length(int64_t cloud) const { return length_of(lengths, cloud, size); }
  MSOPS_BOTH int32_t start(int64_t) const { return 0; }
  MSOPS_BOTH Point<C> point(int64_t cloud, int64_t i) const { return point_at(points, cloud * size + i); }
  MSOPS_BOTH int32_t* of_cloud(int64_t cloud) const { return indices + cloud * samples; }
};

// SamplingFrom is a Sampling whose clouds begin with other points.
template <typename T>
struct SamplingFrom : Sampling<T> {
  const int32_t* starts;  // the first point of each cloud, or null: `first`
  int64_t first;

  // If it is out of range, as only a GPU meets it, the nearest point stands for it.
  MSOPS_BOTH int32_t start(int64_t cloud) const {
    const int64_t given = starts != nullptr ? starts[cloud] : first, last = this->length(cloud) - 1;
    return static_cast<int32_t>(given < 0 || last < 0 ? 0 : given < last ? given : last);
  }
};

// Returns the distance of a point to no points: it is the furthest, unless a coordinate is not finite.
template <typename C>
MSOPS_BOTH C first_distance(const Point<C>& p) {
  return is_finite(p) ? kInfinity<C> : C(0);
}

// Candidate is a point, and its squared distance to the points that are taken.
template <typename C>
struct Candidate {
  C distance;
  int32_t index;

  // Whether this one is taken rather than the other.
  MSOPS_BOTH bool is_further(const Candidate& other) const {
    return distance > other.distance || (distance == other.distance && index < other.index);
  }
};

}  // namespace msops::points
