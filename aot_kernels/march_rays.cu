// t = near + (k + jitter) step for k = 0, 1, ... while t < far, where the cell of o + t d is occupied: the samples of
// all rays one after the other, as many as there is room for

#include "common/parallel.h"
#include "common/scan.h"
#include "common/scratch.h"
#include "march_rays/walk.h"

using namespace msops;
using namespace msops::rays;

namespace {

// Offsets sums up the rays' counts. Sums that int32 cannot hold become the largest one.
struct Offsets {
  using State = SumStep<int64_t>;
  const int32_t* counts;
  int32_t* offsets;

  MSOPS_BOTH State read(int64_t, int64_t ray) const { return {counts[ray]}; }
  MSOPS_BOTH void write(int64_t, int64_t ray, const State& prefix) const {
    offsets[ray + 1] = static_cast<int32_t>(prefix.sum < INT32_MAX ? prefix.sum : INT32_MAX);
  }
};

int64_t parts_of(int64_t rays) { return std::clamp<int64_t>(rays / 128, 1, 512); }

template <typename T>
struct Samples {
  Walks<T> walks;
  int64_t capacity;
  int32_t *counts, *offsets;
  T *t, *dt;
  int32_t* ray;

  MSOPS_BOTH void set(int64_t sample, Compute<T> of_t, Compute<T> of_dt, int64_t of_ray) const {
    assign(t[sample], of_t);
    assign(dt[sample], of_dt);
    ray[sample] = static_cast<int32_t>(of_ray);
  }
  // The first offset, which has no ray before it, is known to be 0 and not read.
  MSOPS_BOTH int64_t begin(int64_t i) const { return i == 0 ? 0 : offsets[i]; }

  // Fills the i-th of n parts of what no ray has samples for; part 0 also writes the first offset.
  MSOPS_BOTH void fill(int64_t i, int64_t n, int64_t first, int64_t stride) const {
    const int64_t total = begin(walks.rays), used = total < capacity ? total : capacity;
    const int64_t end = used + part_begin(capacity - used, i + 1, n);
    for (int64_t sample = used + part_begin(capacity - used, i, n) + first; sample < end; sample += stride)
      set(sample, 0, 0, -1);
    if (i == 0 && first == 0) offsets[0] = 0;
  }
};

template <typename T>
struct CountOnCpu {
  Samples<T> all;

  MSOPS_CPU void operator()(int64_t i) const {
    int64_t count = 0;
    Walk<T>(all.walks, i).for_runs([&](int64_t, int64_t n) { count += n; });
    all.counts[i] = static_cast<int32_t>(count);
  }
};

template <typename T>
struct WriteOnCpu {
  Samples<T> all;

  MSOPS_CPU void operator()(int64_t i) const {
    int64_t sample = all.begin(i);
    if (i < all.walks.rays && sample < all.capacity) {
      const Walk<T> walk(all.walks, i);
      walk.for_runs([&](int64_t k, int64_t n) {
        for (const int64_t end = std::min(k + n, k + all.capacity - sample); k < end; ++k, ++sample)
          all.set(sample, walk.at(k), all.walks.step, i);
      });
    }
    all.fill(i, std::max<int64_t>(1, all.walks.rays), 0, 1);
  }
};

#ifdef __CUDACC__
// A warp walks along a ray: lanes take neighbouring steps, kRounds times at once. The first pass counts the samples.
template <bool kWrites, typename T>
__global__ void __launch_bounds__(kThreads) walk_kernel(const Samples<T> all) {
  constexpr int kRounds = 4;
  const int lane = threadIdx.x % 32;
  const int64_t i = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  if (i < all.walks.rays) {
    const Walk<T> walk(all.walks, i);
    int64_t sample = kWrites ? all.begin(i) : 0;
    const bool has_room = !kWrites || sample < all.capacity;
    for (int64_t k = lane; __any_sync(~0u, has_room && walk.has_step(k)); k += 32 * kRounds) {
      bool found[kRounds];
#pragma unroll
      for (int round = 0; round < kRounds; ++round) found[round] = walk.is_sample(k + 32 * round);
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const unsigned lanes = __ballot_sync(~0u, found[round]);
        const int64_t own = sample + __popc(lanes & ((1u << lane) - 1));
        if (kWrites && found[round] && own < all.capacity) all.set(own, walk.at(k + 32 * round), all.walks.step, i);
        sample += __popc(lanes);
      }
    }
    if (!kWrites && lane == 0) all.counts[i] = static_cast<int32_t>(sample);
  }
  const int64_t warps = all.walks.rays > 0 ? all.walks.rays : 1;
  if (kWrites && i < warps) all.fill(i, warps, lane, 32);
}
#endif

}  // namespace

// (origins, directions, near, far, occupancy, jitter?) -> (t, dt, ray, offsets, counts, partial): what comes after
// offsets is scratch.
MSOPS_ENTRY(MarchRaysForward) {
  const Box<double> box = box_of(call);
  const double step = call.number("step");
  const int64_t capacity = call.attribute("capacity", 0, INT32_MAX);
  const Tensor origins = call.tensor("origins", 2), directions = call.tensor("directions", 2);
  const Tensor near = call.tensor("near", 1), far = call.tensor("far", 1);
  const Tensor occupancy = call.tensor_of("bool", "occupancy", 3), jitter = call.optional("jitter", 1);
  const Tensor t = call.tensor("t", 1), dt = call.tensor("dt", 1), ray = call.tensor_of("int32", "ray", 1);
  const Tensor offsets = call.tensor_of("int32", "offsets", 1), counts = call.tensor_of("int32", "counts", 1);
  const Tensor partial = call.tensor_of("int64", "partial", 1);
  const int64_t rays = origins.dim(0), cells = occupancy.dim(0);
  for (const Tensor& tensor : {origins, directions}) call.require_shape(tensor, {rays, 3});
  for (const Tensor& tensor : {near, far}) call.require_shape(tensor, {rays});
  call.require_shape(occupancy, {cells, cells, cells});
  if (jitter.dtype) call.require_shape(jitter, {rays});
  for (const Tensor& tensor : {t, dt, ray}) call.require_shape(tensor, {capacity});
  call.require(rays < INT32_MAX, kBadShape, "there are more than 2^31 - 2 rays");
  call.require_shape(offsets, {rays < INT32_MAX ? rays + 1 : 0});
  call.require_shape(counts, {rays});
  call.require_shape(partial, {parts_of(rays)});
  call.require(step > 0 && std::isfinite(step), kBadAttribute, "attribute step is %g, expected more than 0", step);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    Walks<T> walks{rays,
                   cells,
                   {},
                   {},
                   C(step),
                   origins.as<const T>(),
                   directions.as<const T>(),
                   near.as<const T>(),
                   far.as<const T>(),
                   jitter.as<const T>(),
                   occupancy.as<const bool>()};
    for (int axis = 0; axis < 3; ++axis) {
      walks.low[axis] = C(box.low[axis]);
      walks.scale[axis] = C(static_cast<double>(cells) / (box.high[axis] - box.low[axis]));
    }
    const Samples<T> all{walks,     capacity,   counts.as<int32_t>(), offsets.as<int32_t>(),
                         t.as<T>(), dt.as<T>(), ray.as<int32_t>()};
    Scan of_counts{1, rays, ScanOrder::kAlong};
    of_counts.parts = parts_of(rays);
    const Offsets body{counts.as<const int32_t>(), offsets.as<int32_t>()};
    const int64_t warps = std::max<int64_t>(1, rays);
    if (call.is_on_cpu()) {
      constexpr double kCost = 2000;
      on_cpu(call, rays, CountOnCpu<T>{all}, kCost);
      scan(call, of_counts, body, partial.data);
      return on_cpu(call, warps, WriteOnCpu<T>{all}, kCost);
    }
#ifdef __CUDACC__
    const auto blocks = [](int64_t warps) { return (warps + kThreads / 32 - 1) / (kThreads / 32); };
    launch(call, walk_kernel<false, T>, blocks(rays), kThreads, 0, all);
    scan(call, of_counts, body, partial.data);
    launch(call, walk_kernel<true, T>, blocks(warps), kThreads, 0, all);
#endif
  });
}

MSOPS_SCRATCH(MarchRaysForward) {
  const int64_t rays = call.tensor("origins", 2).dim(0);
  return {{rays}, {parts_of(rays)}};
}
