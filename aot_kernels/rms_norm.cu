// y_j = x_j r (weight_j + offset),  r = 1 / sqrt(mean(x^2) + eps), for each row x

#include "shared/norm/gradient.h"
#include "shared/norm/rms_norm.h"
#include "shared/norm/second_gradient.h"

using namespace msops;
using namespace msops::norm;

namespace {

template <typename T>
struct Forward {
  Rows<const T> x;
  Rows<T> y;
  RmsNorm<T> normalize;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    normalize(team, team.load(x[row]), y[row]);
  }
};

}  // namespace

// (x, weight?) -> (y)
MSOPS_ENTRY(RmsNormForward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight", 1), y = call.tensor("y");
  const double eps = eps_of(call), offset = offset_of(call);
  const Casting casting = casting_of(call);
  const int64_t columns = columns_of(call, x, weight);
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const RmsNorm<T> normalize(weight, columns, eps, offset, casting);
    for_rows<T>(call, rows_of(x, columns), {x, y, normalize.weight}, Forward<T>{x, y, normalize});
  });
}

// (x, weight?, dy) -> (dx, dweight?, partial): `partial` is scratch, with a row for each part of the sums over rows.
MSOPS_ENTRY(RmsNormBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight", 1), dy = call.tensor("dy");
  const Tensor dx = call.tensor("dx"), dweight = call.optional_of("common|float32", "dweight", 1);
  const NormSums sums{dweight, {}, call.scratch("partial", 2)};
  const double eps = eps_of(call), offset = offset_of(call);
  const int64_t columns = columns_of(call, x, weight);
  call.require_same_shape(dy, x);
  call.require_same_shape(dx, x);
  require_gradient_of(call, dweight, weight, "weight");
  sums.check(call, columns, 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Parameters<T> factors(weight, columns, C(1));
    const NormGradient<T, false, false> body{x, dy, x, dx, factors, C(eps), weight.dtype ? C(offset) : C(0)};
    sums.run<T, false, true>(call, rows_of(x, columns), {x, dy, dx, factors}, body);
  });
}

MSOPS_SCRATCH(RmsNormBackward) {
  const Tensor x = call.tensor("x");
  return NormSums::scratch(x, x.dim(-1), 1);
}

// (x, weight?, dy, ddx, ddweight?) -> (dx, dweight?, ddy, partial): the gradients of what RmsNormBackward computes,
// where ddx and ddweight are the gradients of its results. `partial` is scratch, as for RmsNormBackward.
MSOPS_ENTRY(RmsNormBackwardBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight", 1), dy = call.tensor("dy");
  const Tensor ddx = call.tensor("ddx"), ddweight = call.optional_of("common|float32", "ddweight", 1);
  const Tensor dx = call.tensor("dx"), dweight = call.optional_of("common|float32", "dweight", 1);
  const Tensor ddy = call.tensor("ddy");
  const NormSums sums{dweight, {}, call.scratch("partial", 2)};
  const double eps = eps_of(call), offset = offset_of(call);
  const int64_t columns = columns_of(call, x, weight);
  for (const Tensor& tensor : {dy, ddx, dx, ddy}) call.require_same_shape(tensor, x);
  require_gradient_of(call, dweight, weight, "weight");
  require_gradient_of(call, ddweight, weight, "weight");
  sums.check(call, columns, 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const Parameters<T> factors(weight, columns, C(1)), of_weight(ddweight, columns, C(0)), none({}, columns, C(0));
    const NormSecondGradient<T, false> body{x,       dy,        ddx,  dx,     ddy,
                                            factors, of_weight, none, C(eps), weight.dtype ? C(offset) : C(0)};
    sums.run<T, false, false>(call, rows_of(x, columns), {x, dy, ddx, dx, ddy, factors, of_weight}, body);
  });
}

MSOPS_SCRATCH(RmsNormBackwardBackward) {
  const Tensor x = call.tensor("x");
  return NormSums::scratch(x, x.dim(-1), 1);
}
