// y = 1 / (1 + e^-x),  dx = dy * y * (1 - y)

#include "common/activations.h"
#include "common/elementwise.h"

using namespace msops;

namespace {

template <typename T>
struct Sigmoid {
  MSOPS_BOTH Compute<T> operator()(Compute<T> x) const { return Activations<T>::sigmoid(x); }
};

struct SigmoidGradient {
  template <typename C>
  MSOPS_BOTH C operator()(C y, C dy) const {
    return dy * y * (C(1) - y);
  }
};

}  // namespace

// (x) -> (y)
MSOPS_ENTRY(SigmoidForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  call.require_same_shape(y, x);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise(call, x.size, Sigmoid<T>{}, y.as<T>(), x.as<const T>());
  });
}

// (y, dy) -> (dx)
MSOPS_ENTRY(SigmoidBackward) {
  const Tensor y = call.tensor("y"), dy = call.tensor("dy"), dx = call.tensor("dx");
  call.require_same_shape(dy, y);
  call.require_same_shape(dx, y);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    elementwise(call, y.size, SigmoidGradient{}, dx.as<T>(), y.as<const T>(), dy.as<const T>());
  });
}
