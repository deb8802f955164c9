// y_j = x_j r (weight_j + offset),  r = 1 / sqrt(mean(x^2) + eps), for each row x

#include "norm/rms_norm.h"

using namespace msops;

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
  const RmsNormSettings settings(call);
  const Casting casting = casting_of(call);
  const int64_t rows = rows_of(call, x);
  if (call.has("weight")) call.require_shape(weight, {x.dim(-1)});
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const RmsNorm<T> normalize(weight, settings.eps, settings.offset, casting);
    for_rows<T>(call, rows, {x, y, normalize.weight}, Forward<T>{x, y, normalize});
  });
}
