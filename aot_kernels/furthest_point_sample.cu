// i_0 is given; i_s is the point that is furthest from points i_0, ..., i_(s - 1), the first of equally far ones

#include "furthest_point_sample/cpu.h"
#ifdef __CUDACC__
#include "furthest_point_sample/gpu.h"
#endif

using namespace msops;
using namespace msops::points;

namespace {

// Returns how many cells a cloud has on the CPU, at most.
int64_t cells_of(int64_t size) { return size / 64 + 1; }

// On the CPU, where lengths and `start` can be read, each cloud that has points must have its first one.
template <typename T>
void require_starts(Call& call, const SamplingFrom<T>& sampling) {
  if (!call.is_on_cpu()) return;
  for (int64_t cloud = 0; call.ok() && cloud < sampling.clouds; ++cloud) {
    const int64_t length = sampling.length(cloud);
    const int64_t start = sampling.starts != nullptr ? sampling.starts[cloud] : sampling.first;
    call.require(length == 0 || (0 <= start && start < length), kBadValue,
                 "the start of cloud %lld is %lld, expected 0 to %lld", static_cast<long long>(cloud),
                 static_cast<long long>(start), static_cast<long long>(length) - 1);
  }
}

// Returns the shapes of points, distances, lattices, bounds, ends, order, furthest and exchange.
Shapes shapes_of_scratch(int64_t clouds, int64_t size) {
  const int64_t most = cells_of(size);
  return {{clouds, 3, size}, {clouds, size}, {clouds, kLatticeNumbers}, {clouds, 7, most},
          {clouds, most},    {clouds, size}, {clouds, 3, most},         {kExchange}};
}

}  // namespace

// (xyz, lengths?, start?) -> (idx, points, distances, lattices, bounds, ends, order, furthest, exchange): what comes
// after idx is scratch. points to furthest are for the CPU: cpu.h says what they hold. On a GPU, distances are clouds
// that do not fit into registers, and exchange is for candidates.
MSOPS_ENTRY(FurthestPointSampleForward) {
  const int64_t samples = call.attribute("npoint", 1, INT32_MAX);
  const int64_t first = call.attribute("first", 0, INT32_MAX);
  const Tensor xyz = call.tensor("xyz", 3), lengths = call.optional_of("int32", "lengths", 1);
  const Tensor start = call.optional_of("int32", "start", 1);
  const Tensor idx = call.tensor_of("int32", "idx", 2), sorted = call.scratch("points", 3);
  const Tensor distances = call.scratch("distances", 2), lattices = call.scratch("lattices", 2);
  const Tensor bounds = call.scratch("bounds", 3), ends = call.tensor_of("int32", "ends", 2);
  const Tensor order = call.tensor_of("int32", "order", 2), furthest = call.tensor_of("int32", "furthest", 3);
  const Tensor exchange = call.tensor_of("int32", "exchange", 1);
  const int64_t clouds = xyz.dim(0), size = xyz.dim(1), most = cells_of(size);
  call.require_shape(xyz, {clouds, size, 3});
  call.require(size <= INT32_MAX, kBadShape, "xyz has more than 2^31 - 1 points in a cloud");
  call.require(samples <= size, kBadShape, "npoint is %lld, xyz has %lld points", static_cast<long long>(samples),
               static_cast<long long>(size));
  call.require(first < size, kBadShape, "start is %lld, xyz has %lld points", static_cast<long long>(first),
               static_cast<long long>(size));
  if (call.has("start")) call.require_shape(start, {clouds});
  call.require_shape(idx, {clouds, samples});
  require_shapes(call, {sorted, distances, lattices, bounds, ends, order, furthest, exchange},
                 shapes_of_scratch(clouds, size));
  require_lengths(call, "lengths", lengths, clouds, size);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const auto sample = [&](const auto& task) {
      if (call.is_on_cpu()) {
        const CellsOfClouds<T> cells{
            xyz.as<T>(),        lengths.as<int32_t>(), clouds, size, most, C(0), lattices.as<C>(), sorted.as<C>(),
            ends.as<int32_t>(), order.as<int32_t>()};
        const SampleOnCpu<std::decay_t<decltype(task)>, T> body{task, cells, distances.as<C>(), bounds.as<C>(),
                                                                furthest.as<int32_t>()};
        on_cpu(call, clouds, body, 4 * static_cast<double>(size + samples * (most + 64)));
      }
#ifdef __CUDACC__
      if (!call.is_on_cpu()) launch_sampling(call, task, distances.as<C>(), exchange.as<int32_t>());
#endif
    };
    const Sampling<T> sampling{xyz.as<T>(), lengths.as<int32_t>(), clouds, size, samples, idx.as<int32_t>()};
    if (first == 0 && start.data == nullptr) return sample(sampling);
    const SamplingFrom<T> from{sampling, start.as<int32_t>(), first};
    require_starts(call, from);
    sample(from);
  });
}

MSOPS_SCRATCH(FurthestPointSampleForward) {
  const Tensor xyz = call.tensor("xyz", 3);
  return shapes_of_scratch(xyz.dim(0), xyz.dim(1));
}
