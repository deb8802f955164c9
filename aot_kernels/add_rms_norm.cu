// s = x + residual,  y_j = s_j r (weight_j + offset),  r = 1 / sqrt(mean(s^2) + eps), for each row s

#include "shared/norm/gradient.h"
#include "shared/norm/rms_norm.h"

using namespace msops;
using namespace msops::norm;

namespace {

template <typename T, typename Residual>
struct Forward {
  using C = Compute<T>;
  Rows<const T> x;
  Rows<const Residual> residual;
  Rows<T> y, s;
  RmsNorm<T> normalize;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const auto residual_row = team.load(residual[row]);
    normalize(team, team.map_and_load([](C a, C b) { return a + b; }, s[row], x_row, residual_row), y[row]);
  }
};

}  // namespace

// (x, residual, weight?) -> (y, s)
MSOPS_ENTRY(AddRmsNormForward) {
  const Tensor x = call.tensor("x"), residual = call.tensor_of("common|float32", "residual");
  const Tensor weight = call.optional_of("common|float32", "weight", 1), y = call.tensor("y"), s = call.tensor("s");
  const double eps = eps_of(call), offset = offset_of(call);
  const Casting casting = casting_of(call);
  const int64_t columns = columns_of(call, x, weight);
  for (const Tensor& tensor : {residual, y, s}) call.require_same_shape(tensor, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const RmsNorm<T> normalize(weight, columns, eps, offset, casting);
    with_type<T, float>(residual, [&](auto other) {
      using Residual = typename decltype(other)::type;
      const Rows<const Residual> residuals(residual);
      const Forward<T, Residual> body{x, residuals, y, s, normalize};
      for_rows<T>(call, rows_of(x, columns), {x, residuals, y, s, normalize.weight}, body);
    });
  });
}

// (s, weight?, dy, ds) -> (dx, dweight?, partial): dx is the gradient of x and of the residual. `partial` is scratch,
// as in rms_norm.cu.
MSOPS_ENTRY(AddRmsNormBackward) {
  const Tensor s = call.tensor("s"), weight = call.optional_of("common|float32", "weight", 1), dy = call.tensor("dy");
  const Tensor ds = call.tensor("ds"), dx = call.tensor("dx");
  const Tensor dweight = call.optional_of("common|float32", "dweight", 1);
  const NormSums sums{dweight, {}, call.scratch("partial", 2)};
  const double eps = eps_of(call), offset = offset_of(call);
  const int64_t columns = columns_of(call, s, weight);
  for (const Tensor& tensor : {dy, ds, dx}) call.require_same_shape(tensor, s);
  require_gradient_of(call, dweight, weight, "weight");
  sums.check(call, columns, 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Parameters<T> factors(weight, columns, C(1));
    const NormGradient<T, false, true> body{s, dy, ds, dx, factors, C(eps), weight.dtype ? C(offset) : C(0)};
    sums.run<T, false, true>(call, rows_of(s, columns), {s, dy, ds, dx, factors}, body);
  });
}

MSOPS_SCRATCH(AddRmsNormBackward) {
  const Tensor s = call.tensor("s");
  return NormSums::scratch(s, s.dim(-1), 1);
}
