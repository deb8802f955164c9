// s = x + residual,  y_j = s_j r (weight_j + offset) + bias_j,  r = 1 / sqrt(mean(s^2) + eps), for each row s
//
// The kernels are chosen as in rms_norm.cu.

#include "shared/norm/rms_norm.h"
#include "shared/norm/rms_norm_gradient.h"

using namespace msops;
using namespace msops::norm;

namespace {

template <typename T, typename Residual, typename Normalize>
struct Forward {
  using C = Compute<T>;
  Rows<const T> x;
  Rows<const Residual> residual;
  Rows<T> y, s;
  Normalize normalize;

  MSOPS_BOTH void advance(int64_t rows) { normalize.advance(rows); }

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const auto residual_row = team.load(residual[row]);
    normalize(team, team.map_and_load([](C a, C b) { return a + b; }, s[row], x_row, residual_row), y[row]);
  }
};

}  // namespace

// (x, residual, weight?, bias?) -> (y, s)
MSOPS_ENTRY(AddRmsNormForward) {
  const Tensor x = call.tensor("x"), residual = call.tensor_of("common|float32", "residual");
  const Tensor weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), y = call.tensor("y"), s = call.tensor("s");
  const double eps = eps_of(call), offset = offset_of(call);
  const Casting casting = casting_of(call);
  const Heads heads(call, x, weight, bias);
  for (const Tensor& tensor : {residual, y, s}) call.require_same_shape(tensor, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t rows = rows_of(x, heads.columns);
    const RmsNorm<T> normalize(weight, heads.columns, eps, offset, casting);
    with_type<T, float>(residual, [&](auto other) {
      using Residual = typename decltype(other)::type;
      const Rows<const Residual> residuals(residual);
      if (heads.count == 1 && !bias.dtype) {
        const Forward<T, Residual, RmsNorm<T>> body{x, residuals, y, s, normalize};
        for_rows<T, true>(call, rows, {x, residuals, y, s, normalize.weight}, body);
      } else {
        using Body = Forward<T, Residual, RmsNormWithBias<T>>;
        const RmsNormWithBias<T> with_bias(normalize, bias);
        const OfHeads<Body> body{{x, residuals, y, s, with_bias}, heads.count};
        for_rows_of_few_kernels<T>(call, rows, {x, residuals, y, s, with_bias.weight, with_bias.bias}, body);
      }
    });
  });
}

// (s, weight?, bias?, dy, ds) -> (dx, dweight?, dbias?, partial): dx is the gradient of x and of the residual. The
// values of the bias are not read. `partial` is scratch, as in rms_norm.cu.
MSOPS_ENTRY(AddRmsNormBackward) {
  const Tensor s = call.tensor("s"), weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), dy = call.tensor("dy"), ds = call.tensor("ds");
  const Tensor dx = call.tensor("dx");
  const RmsNormSums sums(call, s, weight, bias);
  const double eps = eps_of(call), offset = offset_of(call);
  for (const Tensor& tensor : {dy, ds, dx}) call.require_same_shape(tensor, s);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    sums.run<T, true>(call, s, dy, ds, dx, eps, offset);
  });
}

MSOPS_SCRATCH(AddRmsNormBackward) {
  const Tensor s = call.tensor("s"), weight = call.optional_of("common|float32", "weight");
  return RmsNormSums::scratch(call, s, weight, call.optional_of("common|float32", "bias"));
}
