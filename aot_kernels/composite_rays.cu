// The colour of rays: rgb = sum of w_i rgbs_i with w_i = e^-(sum over j < i of sigma_j dt_j) (1 - e^-(sigma_i dt_i)),
// and with these weights their depth, from ts, and their opacity

#include "composite_rays/cpu.h"
#ifdef __CUDACC__
#include "composite_rays/gpu.h"
#endif

using namespace msops;
using namespace msops::composite_rays;

namespace {

struct Given {
  Tensor sigmas, rgbs, dts, ts, offsets;
  int64_t rays;
  double threshold;

  explicit Given(Call& call)
      : sigmas(call.tensor("sigmas", 1)),
        rgbs(call.tensor("rgbs", 2)),
        dts(call.tensor("dts", 1)),
        ts(call.tensor("ts", 1)),
        offsets(call.tensor_of("index", "offsets", 1)),
        rays(offsets.dim(0) - 1),
        threshold(call.number("threshold")) {}

  void require(Call& call) const {
    call.require(rays >= 0, kBadShape, "offsets is empty");
    call.require_shape(rgbs, {sigmas.dim(0), 3});
    for (const Tensor& tensor : {dts, ts}) call.require_same_shape(tensor, sigmas);
    call.require(threshold >= 0 && threshold <= 1, kBadAttribute, "attribute threshold is %g, expected 0 to 1",
                 threshold);
  }

  // On the CPU, where offsets can be read, they must not decrease from 0 on.
  void require_order(Call& call) const {
    if (!call.is_on_cpu()) return;
    const Integers values(offsets);
    for (int64_t i = 0; call.ok() && i <= rays; ++i) {
      const int64_t least = i == 0 ? 0 : values[i - 1];
      call.require(values[i] >= least, kBadValue, "offsets[%lld] is %lld, expected at least %lld",
                   static_cast<long long>(i), static_cast<long long>(values[i]), static_cast<long long>(least));
    }
  }

  template <typename T>
  Inputs<T> inputs() const {
    return {{rays, sigmas.dim(0), Integers(offsets)},
            Compute<T>(threshold),
            sigmas.as<const T>(),
            rgbs.as<const T>(),
            dts.as<const T>(),
            ts.as<const T>()};
  }

  // Calls the body for each ray on the CPU. `cost` is a sample's.
  template <typename Body>
  void on_threads(Call& call, const Body& body, double cost) const {
    const int64_t items = std::max<int64_t>(1, rays);
    const double samples = static_cast<double>(sigmas.dim(0)) / static_cast<double>(items);
    on_cpu(call, items, body, cost * (1 + samples));
  }
};

}  // namespace

// (sigmas, rgbs, dts, ts, offsets) -> (rgb, depth, opacity, weights)
MSOPS_ENTRY(CompositeRaysForward) {
  const Given given(call);
  const Tensor rgb = call.tensor("rgb", 2), depth = call.tensor("depth", 1), opacity = call.tensor("opacity", 1);
  const Tensor weights = call.tensor("weights", 1);
  given.require(call);
  call.require_shape(rgb, {given.rays, 3});
  for (const Tensor& tensor : {depth, opacity}) call.require_shape(tensor, {given.rays});
  call.require_same_shape(weights, given.sigmas);
  given.require_order(call);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Forward<T> task{given.inputs<T>(), rgb.as<T>(), depth.as<T>(), opacity.as<T>(), weights.as<T>()};
    if (call.is_on_cpu()) return given.on_threads(call, ForwardOnCpu<T>{task}, 16);
#ifdef __CUDACC__
    composite(call, ForwardOnGpu<T>{task});
#endif
  });
}

// (sigmas, rgbs, dts, ts, offsets, drgb, ddepth, dopacity, dweights) -> (dsigmas, drgbs)
MSOPS_ENTRY(CompositeRaysBackward) {
  const Given given(call);
  const Tensor drgb = call.tensor("drgb", 2), ddepth = call.tensor("ddepth", 1);
  const Tensor dopacity = call.tensor("dopacity", 1), dweights = call.tensor("dweights", 1);
  const Tensor dsigmas = call.tensor("dsigmas", 1), drgbs = call.tensor("drgbs", 2);
  given.require(call);
  call.require_shape(drgb, {given.rays, 3});
  for (const Tensor& tensor : {ddepth, dopacity}) call.require_shape(tensor, {given.rays});
  for (const Tensor& tensor : {dweights, dsigmas}) call.require_same_shape(tensor, given.sigmas);
  call.require_same_shape(drgbs, given.rgbs);
  given.require_order(call);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Backward<T> task{given.inputs<T>(),      drgb.as<const T>(), ddepth.as<const T>(), dopacity.as<const T>(),
                           dweights.as<const T>(), dsigmas.as<T>(),    drgbs.as<T>()};
    if (call.is_on_cpu()) return given.on_threads(call, BackwardOnCpu<T>{task}, 24);
#ifdef __CUDACC__
    composite(call, BackwardOnGpu<T>{task});
#endif
  });
}
