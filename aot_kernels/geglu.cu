// out = f(gate) up, where f is the Gaussian error linear unit, by the error function or its approximation by tanh

#include "common/formula.h"
#include "shared/activation/gelu.h"
#include "shared/gated/halves.h"

using namespace msops;

namespace {

template <template <typename> class Gelu>
struct Formulas {
  template <typename T>
  struct Forward {
    using C = Compute<T>;
    MSOPS_BOTH void operator()(C gate, C up, C& out) const { out = Gelu<T>(gate).value * up; }
  };

  template <typename T>
  struct Backward {
    using C = Compute<T>;
    MSOPS_BOTH void operator()(C gate, C up, C dout, C& dgate, C& dup) const {
      const Gelu<T> f(gate);
      dgate = dout * up * f.slope;
      dup = dout * f.value;
    }
  };

  template <typename T>
  struct BackwardBackward {
    using C = Compute<T>;
    MSOPS_BOTH void operator()(C gate, C up, C dout, C ddgate, C ddup, C& dgate, C& dup, C& ddout) const {
      const Gelu<T> f(gate);
      dgate = dout * (ddgate * up * f.bend + ddup * f.slope);
      dup = dout * ddgate * f.slope;
      ddout = ddgate * up * f.slope + ddup * f.value;
    }
  };
};

}  // namespace

MSOPS_ENTRY(GegluForward) {
  return gelu::with_gelu<Formulas>(call, [&](auto of) {
    return run_formula<decltype(of)::template Forward>(call, {"gate", "up"}, {"out"}, Names<0>{});
  });
}

MSOPS_ENTRY(GegluBackward) {
  return gelu::with_gelu<Formulas>(call, [&](auto of) {
    return run_formula<decltype(of)::template Backward>(call, {"gate", "up", "dout"}, {"dgate", "dup"}, Names<0>{});
  });
}

MSOPS_ENTRY(GegluBackwardBackward) {
  return gelu::with_gelu<Formulas>(call, [&](auto of) {
    return run_formula<decltype(of)::template BackwardBackward>(call, {"gate", "up", "dout", "ddgate", "ddup"},
                                                                {"dgate", "dup", "ddout"}, Names<0>{});
  });
}

// gate and up are the halves of one tensor, "gate".
MSOPS_ENTRY(GegluPackedForward) {
  return gelu::with_gelu<Formulas>(call, [&](auto of) {
    return gated::run_on_halves<decltype(of)::template Forward, 2, 1>(call, {{"gate", true}}, {{"out", false}});
  });
}

MSOPS_ENTRY(GegluPackedBackward) {
  return gelu::with_gelu<Formulas>(call, [&](auto of) {
    return gated::run_on_halves<decltype(of)::template Backward, 3, 2>(call, {{"gate", true}, {"dout", false}},
                                                                       {{"dgate", true}});
  });
}

MSOPS_ENTRY(GegluPackedBackwardBackward) {
  return gelu::with_gelu<Formulas>(call, [&](auto of) {
    return gated::run_on_halves<decltype(of)::template BackwardBackward, 5, 3>(
        call, {{"gate", true}, {"dout", false}, {"ddgate", true}}, {{"dgate", true}, {"ddout", false}});
  });
}
