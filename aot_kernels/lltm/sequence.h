// One step of one hidden unit of one sample, forward and backward: what every way to run the time loop does with the
// product's sums. Samples are as long as `lengths` says: beyond that, outputs are 0 and the states stay.
#pragma once

#include "cell.h"

namespace msops {

// What both directions have in common.
struct Sequence {
  int64_t steps, batch, hidden;
  bool reverse;  // from the last time to the first
  const int32_t* lengths;

  MSOPS_BOTH int64_t time(int64_t step) const { return reverse ? steps - 1 - step : step; }
  MSOPS_BOTH bool active(int64_t time, int64_t sample) const { return time < lengths[sample]; }
  // Of arrays (steps, batch, hidden), and of a gate in those (steps, batch, gates, hidden).
  MSOPS_BOTH int64_t at(int64_t time, int64_t sample, int64_t unit) const {
    return (time * batch + sample) * hidden + unit;
  }
  MSOPS_BOTH int64_t at(int64_t time, int64_t sample, int gate, int64_t unit) const {
    return ((time * batch + sample) * kGates + gate) * hidden + unit;
  }
};

template <typename T>
struct SequenceForward : Sequence {
  using C = Compute<T>;
  const T *product, *weight, *bias, *h, *c;
  T *output, *last_h, *last_c, *gates, *cells;  // gates as the cell takes them, and c before each step

  // What a step reads besides the state; the product of the recurrent weights and h is not yet in it.
  struct Inputs {
    C gates[kGates];
    bool active;
  };
  MSOPS_BOTH Inputs read(int64_t step, int64_t sample, int64_t unit) const {
    const int64_t t = time(step);
    Inputs in;
    for (int gate = 0; gate < kGates; ++gate)
      in.gates[gate] = C(product[at(t, sample, gate, unit)]) + C(bias[gate * hidden + unit]);
    in.active = active(t, sample);
    return in;
  }

  // Makes of the state before the step that behind it. `sums` are the rows of `weight` times the sample's h.
  MSOPS_BOTH void advance(const Inputs& in, const C (&sums)[kGates], int64_t step, int64_t sample, int64_t unit, T& h,
                          C& c) const {
    const int64_t t = time(step);
    assign(cells[at(t, sample, unit)], c);
    C g[kGates];
    for (int gate = 0; gate < kGates; ++gate) {
      g[gate] = in.gates[gate] + sums[gate];
      assign(gates[at(t, sample, gate, unit)], g[gate]);
    }
    const Cell<T> cell(g[kI], g[kO], g[kG], c);
    const T new_h = T(cell.tanh_c * cell.o);
    output[at(t, sample, unit)] = in.active ? new_h : T(C(0));
    h = in.active ? new_h : h;
    c = in.active ? cell.new_c : c;
  }
};

template <typename T>
struct SequenceBackward : Sequence {
  using C = Compute<T>;
  const T *weight, *gates, *cells, *output, *h, *doutput, *dlast_h, *dlast_c;
  T *dgates, *hidden_before, *dh, *dc;  // hidden_before: h before each step; 0 where the gates' gradient is 0

  struct Inputs {
    C gates[kGates], c, doutput;
    T h;
    bool active;
  };
  MSOPS_BOTH Inputs read(int64_t step, int64_t sample, int64_t unit) const {
    const int64_t t = time(step), state = sample * hidden + unit;
    Inputs in;
    for (int gate = 0; gate < kGates; ++gate) in.gates[gate] = C(gates[at(t, sample, gate, unit)]);
    in.c = C(cells[at(t, sample, unit)]);
    in.doutput = C(doutput[at(t, sample, unit)]);
    in.active = active(t, sample);
    const bool first = step == 0 || !active(time(step - 1), sample);
    in.h = first ? h[state] : output[at(time(step - 1), sample, unit)];
    return in;
  }

  // Makes of the gradients of the state behind the step dc before it, and the gates' gradients, of which those of h
  // before it are the product: the columns of `weight` times the sample's gates. dh stays where the sample has ended.
  MSOPS_BOTH void advance(const Inputs& in, int64_t step, int64_t sample, int64_t unit, C dh, C& dc,
                          T (&d)[kGates]) const {
    const int64_t t = time(step);
    const Cell<T> cell(in.gates[kI], in.gates[kO], in.gates[kG], in.c);
    const Gradient<T> gradient(cell, dh + in.doutput, dc);
    for (int gate = 0; gate < kGates; ++gate) {
      d[gate] = T(in.active ? gradient.gates[gate] : C(0));
      dgates[at(t, sample, gate, unit)] = d[gate];
    }
    hidden_before[at(t, sample, unit)] = in.active ? in.h : T(C(0));
    dc = in.active ? gradient.c : dc;
  }
};

}  // namespace msops
