// out = f(gate) up, where f is the Gaussian error linear unit, by the error function or its approximation by tanh

#include "common/formula.h"
#include "shared/activation/gelu.h"
#include "shared/gated/halves.h"

using namespace msops;

namespace {

template <template <typename> class Gelu, typename T>
struct Forward {
  using C = Compute<T>;
  MSOPS_BOTH void operator()(C gate, C up, C& out) const { out = Gelu<T>(gate).value * up; }
};

template <template <typename> class Gelu, typename T>
struct Backward {
  using C = Compute<T>;
  MSOPS_BOTH void operator()(C gate, C up, C dout, C& dgate, C& dup) const {
    const Gelu<T> f(gate);
    dgate = dout * up * f.slope;
    dup = dout * f.value;
  }
};

template <template <typename> class Gelu, typename T>
struct BackwardBackward {
  using C = Compute<T>;
  MSOPS_BOTH void operator()(C gate, C up, C dout, C ddgate, C ddup, C& dgate, C& dup, C& ddout) const {
    const Gelu<T> f(gate);
    dgate = dout * (ddgate * up * f.bend + ddup * f.slope);
    dup = dout * ddgate * f.slope;
    ddout = ddgate * up * f.slope + ddup * f.value;
  }
};

}  // namespace

MSOPS_ENTRY(GegluForward) { return gelu::run<Forward>(call, {"gate", "up"}, {"out"}); }

MSOPS_ENTRY(GegluBackward) { return gelu::run<Backward>(call, {"gate", "up", "dout"}, {"dgate", "dup"}); }

MSOPS_ENTRY(GegluBackwardBackward) {
  return gelu::run<BackwardBackward>(call, {"gate", "up", "dout", "ddgate", "ddup"}, {"dgate", "dup", "ddout"});
}

// gate and up are the halves of one tensor, "gate".
MSOPS_ENTRY(GegluPackedForward) {
  return gelu::with_gelu<Forward>(call, [&](auto of) {
    return gated::run_on_halves<decltype(of)::template Type, 2, 1>(call, {{"gate", true}}, {{"out", false}});
  });
}

MSOPS_ENTRY(GegluPackedBackward) {
  return gelu::with_gelu<Backward>(call, [&](auto of) {
    return gated::run_on_halves<decltype(of)::template Type, 3, 2>(call, {{"gate", true}, {"dout", false}},
                                                                   {{"dgate", true}});
  });
}

MSOPS_ENTRY(GegluPackedBackwardBackward) {
  return gelu::with_gelu<BackwardBackward>(call, [&](auto of) {
    return gated::run_on_halves<decltype(of)::template Type, 5, 3>(
        call, {{"gate", true}, {"dout", false}, {"ddgate", true}}, {{"dgate", true}, {"ddout", false}});
  });
}
