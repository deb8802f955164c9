// This operator serves patch_mindspore alone: msops has no public name for it.
//
// r = 1 / sqrt(mean(x^2) + eps), for each row x

#include "shared/norm/settings.h"

using namespace msops;
using namespace msops::norm;

namespace {

template <typename T>
struct Forward {
  using C = Compute<T>;
  Rows<const T> x;
  C* r;
  C eps;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const C squares = team.sum([](C v) { return v * v; }, x[row]);
    const C mean = x.columns > 0 ? squares / C(x.columns) : C(0);
    team.store(r + row, 1 / sqrt(mean + eps));
  }
};

}  // namespace

MSOPS_ENTRY(ReciprocalRmsForward) {
  const Tensor x = call.tensor("x"), r = call.tensor_of("accumulator", "r");
  const double eps = eps_of(call);
  call.require_shape_of_rows(r, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    for_rows<T>(call, r.size, {x}, Forward<T>{x, r.as<C>(), C(eps)});
  });
}
