// near and far are where a ray o + t d with t >= 0 enters and leaves a box, or -1 where it misses the box

#include <algorithm>
#include <limits>

#include "common/parallel.h"
#include "shared/rays/box.h"

using namespace msops;
using namespace msops::rays;

namespace {

// Interval is the part of a ray's t that is between the sides of all axes so far. cut() chooses between numbers and
// has no branches, so that loops over rays vectorize.
template <typename C>
struct Interval {
  C enter, leave;

  MSOPS_BOTH void cut(C origin, C direction, C low, C high) {
    constexpr C kInfinity = std::numeric_limits<C>::infinity();
    const C a = (low - origin) / direction, b = (high - origin) / direction;
    const C smaller = a < b ? a : b, larger = a < b ? b : a;
    // A ray along the two sides of an axis is between them for all t, or for none. If a or b of another ray is NaN, it
    // is nowhere between them.
    const C of_all = (low <= origin) & (origin <= high) ? kInfinity : -kInfinity;
    const C first = direction == 0 ? -kInfinity : smaller;
    const C last = direction == 0 ? of_all : smaller <= larger ? larger : -kInfinity;
    enter = first > enter ? first : enter;
    leave = last < leave ? last : leave;
  }
  MSOPS_BOTH bool is_empty() const { return !(enter <= leave && enter < std::numeric_limits<C>::infinity()); }
};

template <typename T>
struct Intersect {
  using C = Compute<T>;
  Box<C> box;
  const T *origins, *directions;
  T *near, *far;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Ray<C> ray = Ray<C>::at(origins, directions, i);
    Interval<C> hit{0, std::numeric_limits<C>::infinity()};
    for (int axis = 0; axis < 3; ++axis) hit.cut(ray.origin[axis], ray.direction[axis], box.low[axis], box.high[axis]);
    const bool empty = hit.is_empty();
    assign(near[i], empty ? C(-1) : hit.enter);
    assign(far[i], empty ? C(-1) : hit.leave);
  }
};

// On the CPU, index i is a run of rays. A run is long, since GCC computes its last vector ray by ray: a load of three
// vectors there would read past the last ray.
template <typename T>
struct IntersectRun {
  static constexpr int kRun = 256;
  using C = Compute<T>;
  Intersect<T> all;
  int64_t rays;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t begin = i * kRun;
    const int n = static_cast<int>(std::min<int64_t>(kRun, rays - begin));
    C origins[3 * kRun], directions[3 * kRun], enter[kRun], leave[kRun];
    widen(all.origins + 3 * begin, origins, 3 * n);
    widen(all.directions + 3 * begin, directions, 3 * n);
    for (int k = 0; k < n; ++k) enter[k] = 0, leave[k] = std::numeric_limits<C>::infinity();
    for (int axis = 0; axis < 3; ++axis) {
      const C low = all.box.low[axis], high = all.box.high[axis];
#pragma omp simd
      for (int k = 0; k < n; ++k) {
        Interval<C> hit{enter[k], leave[k]};
        hit.cut(origins[3 * k + axis], directions[3 * k + axis], low, high);
        enter[k] = hit.enter, leave[k] = hit.leave;
      }
    }
#pragma omp simd
    for (int k = 0; k < n; ++k) {
      const bool empty = Interval<C>{enter[k], leave[k]}.is_empty();
      enter[k] = empty ? C(-1) : enter[k], leave[k] = empty ? C(-1) : leave[k];
    }
    narrow(enter, all.near + begin, n);
    narrow(leave, all.far + begin, n);
  }
};

}  // namespace

// (origins, directions) -> (near, far)
MSOPS_ENTRY(RayAABBForward) {
  const Tensor origins = call.tensor("origins", 2), directions = call.tensor("directions", 2);
  const Tensor near = call.tensor("near", 1), far = call.tensor("far", 1);
  const Box<double> box = box_of(call);
  const int64_t rays = origins.dim(0);
  call.require_shape(origins, {rays, 3});
  call.require_shape(directions, {rays, 3});
  for (const Tensor& tensor : {near, far}) call.require_shape(tensor, {rays});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Intersect<T> body{box.as<Compute<T>>(), origins.as<const T>(), directions.as<const T>(), near.as<T>(),
                            far.as<T>()};
    using Run = IntersectRun<T>;
    if (call.is_on_cpu()) return on_cpu(call, (rays + Run::kRun - 1) / Run::kRun, Run{body, rays}, 12 * Run::kRun);
    on_gpu(call, rays, 3 * rays, body);
  });
}
