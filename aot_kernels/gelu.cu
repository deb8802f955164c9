// y = x Phi(x), the Gaussian error linear unit, by the error function, or its approximation by tanh or by a sigmoid

#include "common/formula.h"
#include "shared/activation/gelu.h"

using namespace msops;

namespace {

template <template <typename> class Gelu, typename T>
struct Forward {
  using C = Compute<T>;
  MSOPS_BOTH void operator()(C x, C& y) const { y = Gelu<T>(x).value; }
};

template <template <typename> class Gelu, typename T>
struct Backward {
  using C = Compute<T>;
  MSOPS_BOTH void operator()(C x, C dy, C& dx) const { dx = dy * Gelu<T>(x).slope; }
};

template <template <typename> class Gelu, typename T>
struct BackwardBackward {
  using C = Compute<T>;
  MSOPS_BOTH void operator()(C x, C dy, C ddx, C& dx, C& ddy) const {
    const Gelu<T> f(x);
    dx = ddx * dy * f.bend;
    ddy = ddx * f.slope;
  }
};

}  // namespace

MSOPS_ENTRY(GeluForward) { return gelu::run<Forward, gelu::Sigmoid>(call, {"x"}, {"y"}); }

MSOPS_ENTRY(GeluBackward) { return gelu::run<Backward, gelu::Sigmoid>(call, {"x", "dy"}, {"dx"}); }

MSOPS_ENTRY(GeluBackwardBackward) {
  return gelu::run<BackwardBackward, gelu::Sigmoid>(call, {"x", "dy", "ddx"}, {"dx", "ddy"});
}
