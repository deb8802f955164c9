// y_j = x_j r (weight_j + offset) + bias_j,  r = 1 / sqrt(mean(x^2) + eps), for each row x
//
// A weight or bias for each head, and any bias, are left to kernels of their own: without them, these would take
// longer.

#include "shared/norm/gradient.h"
#include "shared/norm/rms_norm.h"
#include "shared/norm/rms_norm_gradient.h"
#include "shared/norm/second_gradient.h"

using namespace msops;
using namespace msops::norm;

namespace {

template <typename T, typename Normalize>
struct Forward {
  Rows<const T> x;
  Rows<T> y;
  Normalize normalize;

  MSOPS_BOTH void advance(int64_t rows) { normalize.advance(rows); }

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    normalize(team, team.load(x[row]), y[row]);
  }
};

}  // namespace

// (x, weight?, bias?) -> (y)
MSOPS_ENTRY(RmsNormForward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), y = call.tensor("y");
  const double eps = eps_of(call), offset = offset_of(call);
  const Casting casting = casting_of(call);
  const Heads heads(call, x, weight, bias);
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const RmsNorm<T> normalize(weight, heads.columns, eps, offset, casting);
    if (heads.count == 1 && !bias.dtype) {
      for_rows<T, true, sizeof(T) == 2 ? 4 : 2>(call, rows_of(x, heads.columns), {x, y, normalize.weight},
                                                Forward<T, RmsNorm<T>>{x, y, normalize});
    } else {
      const RmsNormWithBias<T> with_bias(normalize, bias);
      for_rows_of_few_kernels<T>(call, rows_of(x, heads.columns), {x, y, with_bias.weight, with_bias.bias},
                                 OfHeads<Forward<T, RmsNormWithBias<T>>>{{x, y, with_bias}, heads.count});
    }
  });
}

// (x, weight?, bias?, dy) -> (dx, dweight?, dbias?, partial): the values of the bias are not read. `partial` is
// scratch, with a row for each part of the sums over rows: those of the weight, then those of the bias.
MSOPS_ENTRY(RmsNormBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  const Tensor bias = call.optional_of("common|float32", "bias"), dy = call.tensor("dy"), dx = call.tensor("dx");
  const RmsNormSums sums(call, x, weight, bias);
  const double eps = eps_of(call), offset = offset_of(call);
  call.require_same_shape(dy, x);
  call.require_same_shape(dx, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    sums.run<T, false>(call, x, dy, x, dx, eps, offset);
  });
}

MSOPS_SCRATCH(RmsNormBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  return RmsNormSums::scratch(call, x, weight, call.optional_of("common|float32", "bias"));
}

// (x, weight?, dy, ddx, ddweight?, ddbias?) -> (dx, dweight?, ddy, partial): the gradients of what RmsNormBackward
// computes, where ddx, ddweight and ddbias are the gradients of its results. `partial` is scratch for dweight.
MSOPS_ENTRY(RmsNormBackwardBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight"), dy = call.tensor("dy");
  const Tensor ddx = call.tensor("ddx"), ddweight = call.optional_of("common|float32", "ddweight");
  const Tensor ddbias = call.optional_of("common|float32", "ddbias"), dx = call.tensor("dx");
  const Tensor dweight = call.optional_of("common|float32", "dweight"), ddy = call.tensor("ddy");
  const NormSums sums{dweight, {}, call.scratch("partial", 2)};
  const double eps = eps_of(call), offset = offset_of(call);
  const Heads heads(call, x, weight, ddbias);
  for (const Tensor& tensor : {dy, ddx, dx, ddy}) call.require_same_shape(tensor, x);
  call.require_gradient(dweight, weight);
  call.require_gradient(ddweight, weight);
  sums.check(call, heads.size(), 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const int64_t columns = heads.columns, rows = rows_of(x, columns);
    if (x.size + weight.size + ddweight.size + ddbias.size == 0) return;  // parameters of no heads must not be read
    const Parameters<T> factors(weight, columns, C(1)), of_weight(ddweight, columns, C(0)),
        terms(ddbias, columns, C(0));
    const NormSecondGradient<T, false> body{x,       dy,        ddx,   dx,     ddy,
                                            factors, of_weight, terms, C(eps), weight.dtype ? C(offset) : C(0)};
    const std::initializer_list<RowLayout<T>> places{x, dy, ddx, dx, ddy, factors, of_weight, terms};
    if (heads.count == 1) {
      sums.run<T, false, Kernels::kReadAgain>(call, rows, places, body);
    } else {
      sums.run<T, false, Kernels::kReadAgain>(call, rows, places,
                                              OfHeads<NormSecondGradient<T, false>>{body, heads.count}, heads.count);
    }
  });
}

MSOPS_SCRATCH(RmsNormBackwardBackward) {
  const Tensor x = call.tensor("x"), weight = call.optional_of("common|float32", "weight");
  call.tensor("dy"), call.tensor("ddx"), call.optional_of("common|float32", "ddweight");
  const Heads heads(call, x, weight, call.optional_of("common|float32", "ddbias"));
  return NormSums::scratch(x, heads.size(), 1);
}
