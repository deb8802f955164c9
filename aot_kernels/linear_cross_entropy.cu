// The product of a tensor and a number on the device: the gradients of linear_cross_entropy are computed before the
// gradient of the loss is known, which scales them. The number has the digits of a sum, also beside float16.

#include "common/elementwise.h"

using namespace msops;

namespace {

template <typename C>
struct Scale {
  const C* factor;

  MSOPS_BOTH void operator()(C x, C& y) const { y = x * *factor; }
};

}  // namespace

// (x, factor) -> (y)
MSOPS_ENTRY(LinearCrossEntropyScale) {
  const Tensor x = call.tensor("x"), factor = call.tensor_of("accumulator", "factor", 0), y = call.tensor("y");
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise<T>(call, x.size, Scale<Compute<T>>{factor.as<Compute<T>>()}, {x.as<T>()}, {y.as<T>()});
  });
}
