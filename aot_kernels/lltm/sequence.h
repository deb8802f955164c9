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

// The gradient of the state's h before a step, and in the other direction h itself, is a product with the recurrent
// weights: `kTiles` sums for each unit, over `kSegments` numbers that each unit has published.
template <typename T>
struct SequenceForward : Sequence {
  using C = Compute<T>;
  static constexpr int kTiles = kGates, kSegments = 1;
  const T *product, *weight, *bias, *h, *c;
  T *output, *last_h, *last_c, *gates, *cells;  // gates as the cell takes them, and c before each step

  MSOPS_BOTH const T* weight_of(int tile, int64_t unit, int, int64_t k) const {
    return weight + (tile * hidden + unit) * hidden + k;
  }

  struct State {
    C h, c;  // h is rounded to T
  };
  MSOPS_BOTH State begin(int64_t sample, int64_t unit) const {
    return {C(h[sample * hidden + unit]), C(c[sample * hidden + unit])};
  }
  MSOPS_BOTH void end(const State& state, int64_t sample, int64_t unit) const {
    assign(last_h[sample * hidden + unit], state.h);
    assign(last_c[sample * hidden + unit], state.c);
  }

  // What a step reads besides the state.
  struct Inputs {
    T product[kGates], bias[kGates];
    bool active;
  };
  MSOPS_BOTH Inputs read(int64_t step, int64_t sample, int64_t unit) const {
    const int64_t t = time(step);
    Inputs in;
    for (int gate = 0; gate < kGates; ++gate) {
      in.product[gate] = product[at(t, sample, gate, unit)];
      in.bias[gate] = bias[gate * hidden + unit];
    }
    in.active = active(t, sample);
    return in;
  }

  struct Results {
    C gates[kGates], c;
    T h;
  };
  // Makes of the state before the step that behind it. `sums` are the rows of `weight` times the sample's h.
  MSOPS_BOTH Results advance(const Inputs& in, const C (&sums)[kGates], State& state) const {
    Results out;
    for (int gate = 0; gate < kGates; ++gate) out.gates[gate] = C(in.product[gate]) + C(in.bias[gate]) + sums[gate];
    out.c = state.c;
    const Cell<T> cell(out.gates[kI], out.gates[kO], out.gates[kG], state.c);
    out.h = T(in.active ? cell.tanh_c * cell.o : C(0));
    state.h = in.active ? C(out.h) : state.h;
    state.c = in.active ? cell.new_c : state.c;
    return out;
  }
  MSOPS_BOTH void write(const Results& out, int64_t step, int64_t sample, int64_t unit) const {
    const int64_t t = time(step);
    output[at(t, sample, unit)] = out.h;
    assign(cells[at(t, sample, unit)], out.c);
    for (int gate = 0; gate < kGates; ++gate) assign(gates[at(t, sample, gate, unit)], out.gates[gate]);
  }
};

template <typename T>
struct SequenceBackward : Sequence {
  using C = Compute<T>;
  static constexpr int kTiles = 1, kSegments = kGates;
  const T *weight, *gates, *cells, *output, *h, *doutput, *dlast_h, *dlast_c;
  T *dgates, *hidden_before, *dh, *dc;  // hidden_before: h before each step; 0 where the gates' gradient is 0

  MSOPS_BOTH const T* weight_of(int, int64_t unit, int segment, int64_t k) const {
    return weight + (segment * hidden + k) * hidden + unit;
  }

  struct State {
    C h, c;  // their gradients
  };
  MSOPS_BOTH State begin(int64_t sample, int64_t unit) const {
    return {C(dlast_h[sample * hidden + unit]), C(dlast_c[sample * hidden + unit])};
  }
  MSOPS_BOTH void end(const State& state, int64_t sample, int64_t unit) const {
    assign(dh[sample * hidden + unit], state.h);
    assign(dc[sample * hidden + unit], state.c);
  }

  struct Inputs {
    T gates[kGates], c, doutput, h;
    bool active;
  };
  MSOPS_BOTH Inputs read(int64_t step, int64_t sample, int64_t unit) const {
    const int64_t t = time(step);
    Inputs in;
    for (int gate = 0; gate < kGates; ++gate) in.gates[gate] = gates[at(t, sample, gate, unit)];
    in.c = cells[at(t, sample, unit)];
    in.doutput = doutput[at(t, sample, unit)];
    in.active = active(t, sample);
    const bool first = step == 0 || !active(time(step - 1), sample);
    in.h = first ? h[sample * hidden + unit] : output[at(time(step - 1), sample, unit)];
    return in;
  }

  struct Results {
    T gates[kGates], h;
  };
  // Makes of the gradients behind the step that of c before it, and the gates' gradients. That of h before it is their
  // product with the columns of `weight`, or where the sample has ended, what it was.
  MSOPS_BOTH Results advance(const Inputs& in, State& state) const {
    const Cell<T> cell(C(in.gates[kI]), C(in.gates[kO]), C(in.gates[kG]), C(in.c));
    const Gradient<T> gradient(cell, state.h + C(in.doutput), state.c);
    Results out;
    for (int gate = 0; gate < kGates; ++gate) out.gates[gate] = T(in.active ? gradient.gates[gate] : C(0));
    out.h = in.active ? in.h : T(C(0));
    state.c = in.active ? gradient.c : state.c;
    return out;
  }
  MSOPS_BOTH void write(const Results& out, int64_t step, int64_t sample, int64_t unit) const {
    const int64_t t = time(step);
    hidden_before[at(t, sample, unit)] = out.h;
    for (int gate = 0; gate < kGates; ++gate) dgates[at(t, sample, gate, unit)] = out.gates[gate];
  }
};

}  // namespace msops
