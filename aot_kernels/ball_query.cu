// idx are the first nsample points, in their order, with min_radius^2 <= |point - query|^2 < radius^2

#include <cmath>

#include "ball_query/cpu.h"
#ifdef __CUDACC__
#include "ball_query/gpu.h"
#endif

using namespace msops;
using namespace msops::points;

namespace {

template <typename Task, typename T>
void find_balls(Call& call, const Task& balls, const CellsOfClouds<T>& cells) {
#ifdef __CUDACC__
  if (!call.is_on_cpu()) return launch_balls(call, balls, cells);
#endif
  const bool sorted = pays_to_sort(balls.size, balls.number);
  if (sorted) sort_on_cpu(call, cells);
  const double visited = sorted ? 1000 : static_cast<double>(balls.size);
  on_cpu(call, balls.clouds * balls.number, BallOnCpu<Task, T>{balls, cells, sorted}, visited);
}

}  // namespace

// (xyz, new_xyz, lengths?, new_lengths?) -> (idx, counts, points, lattices, ends, order): what comes after counts is
// scratch, for the cells. Queries that do not count have idx 0 and count 0.
MSOPS_ENTRY(BallQueryForward) {
  const double radius = call.number("radius"), min_radius = call.number("min_radius");
  const int64_t samples = call.attribute("nsample", 1, INT32_MAX);
  const Tensor xyz = call.tensor("xyz", 3), new_xyz = call.tensor("new_xyz", 3);
  const Tensor lengths = call.optional_of("int32", "lengths", 1);
  const Tensor new_lengths = call.optional_of("int32", "new_lengths", 1);
  const Tensor idx = call.tensor_of("int32", "idx", 3), counts = call.tensor_of("int32", "counts", 2);
  const CellScratch scratch(call);
  const int64_t clouds = xyz.dim(0), size = xyz.dim(1), number = new_xyz.dim(1);
  call.require(radius >= 0 && std::isfinite(radius), kBadAttribute, "radius is %g, expected at least 0", radius);
  call.require(min_radius >= 0 && std::isfinite(min_radius), kBadAttribute, "min_radius is %g, expected at least 0",
               min_radius);
  call.require_shape(xyz, {clouds, size, 3});
  call.require_shape(new_xyz, {clouds, number, 3});
  call.require_shape(idx, {clouds, number, samples});
  call.require_shape(counts, {clouds, number});
  scratch.check(call, clouds, size);
  require_lengths(call, "lengths", lengths, clouds, size);
  require_lengths(call, "new_lengths", new_lengths, clouds, number);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Balls<T> balls{xyz.as<T>(),
                         new_xyz.as<T>(),
                         clouds,
                         size,
                         number,
                         samples,
                         static_cast<C>(min_radius * min_radius),
                         static_cast<C>(radius * radius),
                         idx.as<int32_t>(),
                         counts.as<int32_t>()};
    const CellsOfClouds<T> cells = scratch.clouds<T>(call, xyz, 1, static_cast<C>(radius / 2), lengths.as<int32_t>());
    if (lengths.data == nullptr && new_lengths.data == nullptr) return find_balls(call, balls, cells);
    find_balls(call, RaggedBalls<T>{balls, lengths.as<int32_t>(), new_lengths.as<int32_t>()}, cells);
  });
}

MSOPS_SCRATCH(BallQueryForward) {
  const Tensor xyz = call.tensor("xyz", 3);
  return CellScratch::shapes(xyz.dim(0), xyz.dim(1));
}
