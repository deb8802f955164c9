// out = f(gate) up, with f(x) = x s and s = 1 / (1 + e^-x)
// f'(x) = s (1 + x (1 - s))
// f''(x) = s (1 - s) (2 + x (1 - 2s))

#include "common/formula.h"
#include "shared/gated/halves.h"

MSOPS_FORMULA(SwigluForward, (gate, up), (out), out = gate * msops::Activations<T>::sigmoid(gate) * up)
MSOPS_FORMULA(SwigluBackward, (gate, up, dout), (dgate, dup), const C s = msops::Activations<T>::sigmoid(gate);
              dgate = dout * up * (s * (1 + gate * (1 - s))); dup = dout * (gate * s))
MSOPS_FORMULA(SwigluBackwardBackward, (gate, up, dout, ddgate, ddup), (dgate, dup, ddout),
              const C s = msops::Activations<T>::sigmoid(gate), slope = s * (1 + gate * (1 - s));
              dgate = dout * (ddgate * up * (s * (1 - s) * (2 + gate * (1 - 2 * s))) + ddup * slope);
              dup = dout * ddgate * slope; ddout = ddgate * up * slope + ddup * (gate * s))

// gate and up are the halves of one tensor, "gate".
MSOPS_ENTRY(SwigluPackedForward) {
  return msops::gated::run_on_halves<SwigluForwardFormula, 2, 1>(call, {{"gate", true}}, {{"out", false}});
}

MSOPS_ENTRY(SwigluPackedBackward) {
  return msops::gated::run_on_halves<SwigluBackwardFormula, 3, 2>(call, {{"gate", true}, {"dout", false}},
                                                                  {{"dgate", true}});
}

MSOPS_ENTRY(SwigluPackedBackwardBackward) {
  return msops::gated::run_on_halves<SwigluBackwardBackwardFormula, 5, 3>(
      call, {{"gate", true}, {"dout", false}, {"ddgate", true}}, {{"dgate", true}, {"ddout", false}});
}
