// RWKV-4's time mixing: the mean of a channel's values, weighted by keys and by how long ago they were, and its
// gradients

#include "wkv4/gpu.h"
#include "wkv4/passes.h"

using namespace msops;
using namespace msops::wkv4;

namespace {

struct Inputs {
  Tensor w, u, k, v;
  Sizes s;

  explicit Inputs(Call& call)
      : w(call.tensor("w", 1)),
        u(call.tensor("u", 1)),
        k(call.tensor("k", 3)),
        v(call.tensor("v", 3)),
        s{k.dim(0), k.dim(1), k.dim(2)} {}

  void require(Call& call) const {
    for (const Tensor& tensor : {w, u}) call.require_shape(tensor, {s.channels});
    call.require_same_shape(v, k);
  }
};

void require_state(Call& call, const Tensor& state, const Sizes& s) {
  if (state.dtype) call.require_shape(state, {s.samples, 3, s.channels});
}

// Returns the shape of `parts`: several parts need a State or a Carry of all channels each.
std::vector<int64_t> shape_of_parts(const Sizes& s) {
  return s.parts() > 1 ? std::vector<int64_t>{s.parts(), 3 * s.samples, s.channels} : std::vector<int64_t>(3, 1);
}

// Returns the shape of `sums`, of the gradients of w and u.
std::vector<int64_t> shape_of_sums(const Sizes& s) { return {2, s.samples * s.parts(), s.channels}; }

}  // namespace

// (w, u, k, v, state?) -> (y, last, kept, parts): `parts` is scratch.
MSOPS_ENTRY(WKV4Forward) {
  const Inputs in(call);
  const Sizes& s = in.s;
  const Tensor state = call.optional_of("common|float32", "state", 3), y = call.tensor("y", 3);
  const Tensor last = call.tensor_of("accumulator", "last", 3), kept = call.tensor_of("accumulator", "kept", 4);
  const Tensor parts = call.scratch("parts", 3);
  in.require(call);
  call.require_same_shape(y, in.k);
  for (const Tensor& each : {state, last}) require_state(call, each, s);
  call.require_shape(kept, {s.samples, s.kept(), 3, s.channels});
  call.require_shape(parts, shape_of_parts(s));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Forward<T> all{s,         in.w.as<T>(), in.u.as<T>(), in.k.as<T>(), in.v.as<T>(), Numbers<T>(state),
                         y.as<T>(), last.as<C>(), kept.as<C>(), parts.as<C>()};
    if (s.samples * s.channels == 0) return;
    if (call.is_on_cpu()) {
      using Body = ForwardOnCpu<T>;
      const double cost = static_cast<double>((s.steps + 1) * 8 * std::min<int64_t>(s.channels, Body::kLength));
      return on_cpu(call, s.samples * Strip<Body::kLength, T>::strips(s), Body{all}, cost);
    }
#ifdef __CUDACC__
    const Grid grid = grid_of(s);
    if (grid.z > 1) launch(call, forward_kernel<true, T>, grid, kLanes, 0, all);
    launch(call, forward_kernel<false, T>, grid, kLanes, 0, all);
#endif
  });
}

MSOPS_SCRATCH(WKV4Forward) { return {shape_of_parts(Inputs(call).s)}; }

// (w, u, k, v, state?, last, kept, dy, dlast) -> (dw, du, dk, dv, dstate?, sums, parts): the last two are scratch.
MSOPS_ENTRY(WKV4Backward) {
  const Inputs in(call);
  const Sizes& s = in.s;
  const Tensor state = call.optional_of("common|float32", "state", 3);
  const Tensor last = call.tensor_of("accumulator", "last", 3), kept = call.tensor_of("accumulator", "kept", 4);
  const Tensor dy = call.tensor("dy", 3), dlast = call.tensor_of("accumulator", "dlast", 3);
  const Tensor dw = call.tensor("dw", 1), du = call.tensor("du", 1), dk = call.tensor("dk", 3),
               dv = call.tensor("dv", 3);
  const Tensor dstate = call.optional_of("common|float32", "dstate", 3);
  const Tensor sums = call.scratch("sums", 3), parts = call.scratch("parts", 3);
  in.require(call);
  for (const Tensor& each : {dy, dk, dv}) call.require_same_shape(each, in.k);
  for (const Tensor& each : {dw, du}) call.require_same_shape(each, in.w);
  for (const Tensor& each : {state, last, dlast, dstate}) require_state(call, each, s);
  call.require_gradient(dstate, state);
  call.require_shape(kept, {s.samples, s.kept(), 3, s.channels});
  call.require_shape(sums, shape_of_sums(s));
  call.require_shape(parts, shape_of_parts(s));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const int64_t rows = s.samples * (call.is_on_cpu() ? 1 : s.parts());
    C *const sums_of_w = sums.as<C>(), *const sums_of_u = sums_of_w + rows * s.channels;
    const Backward<T> all{s,          in.w.as<T>(),       in.u.as<T>(), in.k.as<T>(),  in.v.as<T>(),
                          dy.as<T>(), kept.as<C>(),       last.as<C>(), dlast.as<C>(), dk.as<T>(),
                          dv.as<T>(), Numbers<T>(dstate), sums_of_w,    sums_of_u,     parts.as<C>()};
    if (s.samples * s.channels > 0 && call.is_on_cpu()) {
      using Body = BackwardOnCpu<T>;
      const double cost = static_cast<double>((s.steps + 1) * 20 * std::min<int64_t>(s.channels, Body::kLength));
      on_cpu(call, s.samples * Strip<Body::kLength, T>::strips(s), Body{all}, cost);
    }
#ifdef __CUDACC__
    if (s.samples * s.channels > 0 && !call.is_on_cpu()) {
      const Grid grid = grid_of(s);
      if (grid.z > 1) launch(call, backward_kernel<true, T>, grid, kLanes, 0, all);
      launch(call, backward_kernel<false, T>, grid, kLanes, 0, all);
    }
#endif
    sum_rows(call, rows, s.channels, s.channels, static_cast<const C*>(sums_of_w), dw.as<T>());
    sum_rows(call, rows, s.channels, s.channels, static_cast<const C*>(sums_of_u), du.as<T>());
  });
}

MSOPS_SCRATCH(WKV4Backward) {
  const Sizes s = Inputs(call).s;
  return {shape_of_sums(s), shape_of_parts(s)};
}
