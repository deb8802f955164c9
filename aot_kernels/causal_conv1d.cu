// out_t = a(bias + sum over w of weight_w x_(t-W+1+w)), where a is silu or does nothing; causal_conv1d/problem.h has
// the formulas of gradients and states.
//
//   W <= 8  GPU: teams_gpu.h, one pass    CPU: tiles, one pass for all gradients
//   W > 8   GPU: wide_gpu.h               CPU: tiles; g is kept in memory, and each gradient has its own pass

#include "causal_conv1d/cpu.h"
#include "causal_conv1d/teams_gpu.h"
#include "causal_conv1d/wide_gpu.h"
#include "common/scratch.h"
#include "common/sum.h"

using namespace msops;
using namespace msops::causal_conv1d;

namespace {

// Returns the sizes of x (B, D, L) and weight (D, W).
Sizes sizes_of(Call& call, const Tensor& x, const Tensor& weight) {
  const Sizes s{x.dim(0), x.dim(1), x.dim(2), std::max<int64_t>(1, weight.dim(1))};
  call.require(weight.dim(1) >= 1, kBadShape, "weight has no columns, expected at least 1");
  call.require_shape(weight, {s.channels, s.width});
  return s;
}

// Returns the shapes of `gradients` and `partial`. Rows are cut into as many parts as fill a large GPU, if parts have
// at least kLeast steps and are longer than their sums, and into parts of at most kMost steps.
Shapes scratch_of(const Sizes& s) {
  constexpr int64_t kFill = 8448, kLeast = 512, kMost = 4096;  // kFill: warps
  const int64_t rows = std::max<int64_t>(1, s.rows());
  const int64_t wanted = std::max((s.length - 1) / kMost + 1, std::min(s.length / kLeast, kFill / rows));
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, s.length / 16 / (s.width + 1)));
  const bool is_kept = s.width > kFew;
  return {is_kept ? std::vector<int64_t>{s.samples, s.channels, s.length} : std::vector<int64_t>(3, 1),
          {parts, s.rows() * (s.width + 1)}};
}

void require_state(Call& call, const Tensor& state, const Sizes& s) {
  if (state.dtype) call.require_shape(state, {s.samples, s.channels, s.history()});
}

template <typename T>
void convolve(Call& call, const Problem<T>& p, bool backward) {
  if (p.s.rows() == 0) return;
  if (call.is_on_cpu()) return cpu::convolve(call, p, backward);
#ifdef __CUDACC__
  if (p.s.width > kFew) return convolve_wide_on_gpu(call, p, backward);
  p.s.width <= 4 ? convolve_by_teams<4>(call, p, backward) : convolve_by_teams<kFew>(call, p, backward);
#endif
}

// Adds up sums of each channel over samples and parts.
template <typename T>
void add_up(Call& call, const Problem<T>& p, const Compute<T>* from, int64_t columns, const Tensor& out) {
  if (out.size == 0 || !call.ok()) return;
  with_type<T, float>(out, [&](auto type) {
    sum_rows(call, p.parts * p.s.samples, columns, p.s.channels * (p.s.width + 1), from,
             out.as<typename decltype(type)::type>());
  });
}

}  // namespace

// (x, weight, bias?, initial_state?) -> (out, final_state)
MSOPS_ENTRY(CausalConv1dForward) {
  const Tensor x = call.tensor("x", 3), weight = call.tensor_of("common|float32", "weight", 2);
  const Tensor bias = call.optional_of("common|float32", "bias", 1), initial = call.optional("initial_state", 3);
  const Tensor out = call.tensor("out", 3), final_state = call.tensor("final_state", 3);
  const Sizes s = sizes_of(call, x, weight);
  const bool silu = call.attribute("silu", 0, 1);
  if (bias.dtype) call.require_shape(bias, {s.channels});
  require_state(call, initial, s);
  call.require_same_shape(out, x);
  require_state(call, final_state, s);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    convolve(call,
             Problem<T>{s, silu, Numbers<T>(weight), OptionalNumbers<T>(bias), x.as<T>(), initial.as<T>(), out.as<T>(),
                        final_state.as<T>()},
             false);
  });
}

// (x, weight, bias?, initial_state?, dout, dfinal_state) -> (dx, dweight, dbias?, dinitial_state?, gradients, partial)
MSOPS_ENTRY(CausalConv1dBackward) {
  const Tensor x = call.tensor("x", 3), weight = call.tensor_of("common|float32", "weight", 2);
  const Tensor bias = call.optional_of("common|float32", "bias", 1), initial = call.optional("initial_state", 3);
  const Tensor dout = call.tensor("dout", 3), dfinal = call.tensor("dfinal_state", 3), dx = call.tensor("dx", 3);
  const Tensor dweight = call.tensor_of("common|float32", "dweight", 2);
  const Tensor dbias = call.optional_of("common|float32", "dbias", 1);
  const Tensor dinitial = call.optional("dinitial_state", 3);
  const Tensor gradients = call.scratch("gradients", 3), partial = call.scratch("partial", 2);
  const Sizes s = sizes_of(call, x, weight);
  const bool silu = call.attribute("silu", 0, 1);
  if (bias.dtype) call.require_shape(bias, {s.channels});
  for (const Tensor& each : {initial, dfinal}) require_state(call, each, s);
  for (const Tensor& each : {dout, dx}) call.require_same_shape(each, x);
  call.require_gradient(dweight, weight);
  call.require_gradient(dbias, bias);
  call.require_gradient(dinitial, initial);
  call.require(partial.dim(0) >= 1, kBadShape, "partial has no parts");
  if (call.ok()) {
    call.require_shape(gradients, scratch_of(s)[0]);
    call.require_shape(partial, {partial.dim(0), s.rows() * (s.width + 1)});
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Problem<T> p{s,
                       silu,
                       Numbers<T>(weight),
                       OptionalNumbers<T>(bias),
                       x.as<T>(),
                       initial.as<T>(),
                       nullptr,
                       nullptr,
                       dout.as<T>(),
                       dfinal.as<T>(),
                       dx.as<T>(),
                       dinitial.as<T>(),
                       gradients.as<C>(),
                       partial.as<C>(),
                       partial.dim(0)};
    convolve(call, p, true);
    add_up(call, p, p.sums(0, 0), s.channels * s.width, dweight);
    add_up(call, p, p.sums(0, 0) + s.channels * s.width, s.channels, dbias);
  });
}

// All inputs are read, so that the size of a state is known to fit.
MSOPS_SCRATCH(CausalConv1dBackward) {
  const Tensor x = call.tensor("x", 3), weight = call.tensor_of("common|float32", "weight", 2);
  call.optional_of("common|float32", "bias", 1), call.optional("initial_state", 3);
  call.tensor("dout", 3), call.tensor("dfinal_state", 3);
  const Sizes s = sizes_of(call, x, weight);
  return call.ok() ? scratch_of(s) : Shapes();
}
