// near and far are where a ray o + t d with t >= 0 enters and leaves a box, or -1 where it misses the box

#include <limits>

#include "common/parallel.h"
#include "shared/rays/box.h"

using namespace msops;
using namespace msops::rays;

namespace {

template <typename T>
struct Intersect {
  using C = Compute<T>;
  Box<C> box;
  const T *origins, *directions;
  T *near, *far;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    constexpr C kInfinity = std::numeric_limits<C>::infinity();
    const Ray<C> ray = Ray<C>::at(origins, directions, i);
    C enter = 0, leave = kInfinity;
    bool is_number = true;
    for (int axis = 0; axis < 3; ++axis) {
      const C o = ray.origin[axis], d = ray.direction[axis], low = box.low[axis], high = box.high[axis];
      const C a = (low - o) / d, b = (high - o) / d;
      // A ray along the two sides of an axis is between them for all t, or for none.
      const C first = d == 0 ? -kInfinity : a < b ? a : b;
      const C last = d != 0 ? (a < b ? b : a) : low <= o && o <= high ? kInfinity : -kInfinity;
      is_number &= first <= last || d == 0;
      enter = first > enter ? first : enter;
      leave = last < leave ? last : leave;
    }
    const bool hits = is_number && enter <= leave && enter < kInfinity;
    assign(near[i], hits ? enter : C(-1));
    assign(far[i], hits ? leave : C(-1));
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
    parallel_for(call, rays, 3 * rays, body, 24);
  });
}
