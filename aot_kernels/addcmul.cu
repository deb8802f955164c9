// This operator serves patch_mindspore alone: msops has no public name for it.
//
// out = x + value y z, with broadcasting

#include "common/functions.h"
#include "shared/broadcast/apply.h"

using namespace msops;

namespace {

template <typename T>
struct Addcmul {
  static constexpr int kOperands = 3;
  using First = T;
  using Rest = T;
  using Out = T;
  Compute<T> value;

  MSOPS_BOTH Addcmul prepared() const { return *this; }

  template <int N>
  MSOPS_BOTH Pack<T, N> operator()(const Pack<T, N>& x, const Pack<T, N> (&of)[2]) const {
    using C = Compute<T>;
    C sum[N];
    MSOPS_UNROLL
    for (int j = 0; j < N; ++j) sum[j] = C(x.values[j]) + value * C(of[0].values[j]) * C(of[1].values[j]);
    return rounded_pack<T>(sum);
  }
};

}  // namespace

// (x, y, z) -> (out)
MSOPS_ENTRY(AddcmulForward) {
  const Tensor inputs[] = {call.tensor("x"), call.tensor("y"), call.tensor("z")}, out = call.tensor("out");
  const double value = call.number("value");
  call.require(value - value == 0, kBadAttribute, "attribute value is %g, expected a finite number", value);
  const auto operands = broadcast::operands_of(call, inputs, out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    broadcast::apply(call, operands, Addcmul<T>{Compute<T>(value)});
  });
}
