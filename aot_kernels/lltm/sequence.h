// These structs compute one step of some hidden units of one sample, forward and backward: what every way to run the
// time loop does with the product's sums. Samples are as long as `lengths` says: beyond that, outputs are 0 and the
// states stay.
#pragma once

#include "../common/pack.h"
#include "../lltm_cell/cell.h"

namespace msops::lltm {

// Sequence is what both directions have in common.
struct Sequence {
  int64_t steps, batch, hidden;
  bool reverse;  // from the last time to the first
  const int32_t* lengths;

  MSOPS_BOTH int64_t time(int64_t step) const { return reverse ? steps - 1 - step : step; }
  MSOPS_BOTH bool active(int64_t time, int64_t sample) const { return time < lengths[sample]; }
  // at() is the offset of an element in arrays (steps, batch, hidden) or, with a gate, in arrays (steps, batch, gates,
  // hidden).
  MSOPS_BOTH int64_t at(int64_t time, int64_t sample, int64_t unit) const {
    return (time * batch + sample) * hidden + unit;
  }
  MSOPS_BOTH int64_t at(int64_t time, int64_t sample, int gate, int64_t unit) const {
    return ((time * batch + sample) * kGates + gate) * hidden + unit;
  }
  // gate_at() computes the offset with a gate from the offset without one. stride() leads from an offset without a gate
  // to the next step's.
  MSOPS_BOTH int64_t gate_at(int64_t at, int gate, int64_t unit) const {
    return kGates * at - (kGates - 1) * unit + gate * hidden;
  }
  MSOPS_BOTH int64_t stride() const { return reverse ? -batch * hidden : batch * hidden; }
};

// Each step needs a product with the recurrent weights: of h forward, and of the gates' gradients backward, where it is
// the gradient of h before the step. It has `kTiles` sums for each unit, over `kSegments` numbers that each unit has
// published.
template <typename T>
struct SequenceForward : Sequence {
  using C = Compute<T>;
  static constexpr int kTiles = kGates, kSegments = 1;
  const T *product, *weight, *bias, *h, *c;
  T *output, *last_h, *last_c, *gates, *cells;  // gates: as the cell takes them; cells: c before each step

  // Calls `f` with all arrays that `read` and `write` touch.
  template <typename F>
  void with_arrays(const F& f) const {
    f(std::initializer_list<const T*>{product, bias, output, gates, cells});
  }
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

  // Inputs is what a step of N neighbouring units reads besides the state.
  template <int N>
  struct Inputs {
    Pack<T, N> product[kGates], bias[kGates];
    int64_t at;
    int32_t length;
    bool active;
  };
  template <int N>
  MSOPS_BOTH Inputs<N> read(int64_t step, int64_t sample, int64_t unit) const {
    Inputs<N> in;
    for (int gate = 0; gate < kGates; ++gate) in.bias[gate] = load<N>(bias + gate * hidden + unit);
    in.length = lengths[sample];
    in.at = at(time(step), sample, unit);
    read_at(in, step, unit);
    return in;
  }
  // Replaces the inputs of the step before by the inputs of `step`.
  template <int N>
  MSOPS_BOTH void read_next(Inputs<N>& in, int64_t step, int64_t unit) const {
    in.at += stride();
    read_at(in, step, unit);
  }

  template <int N>
  struct Results {
    Pack<T, N> gates[kGates], c, h;
  };
  // Advances the state by one step. `sums` are the rows of `weight` times the sample's h.
  template <int N>
  MSOPS_BOTH Results<N> advance(const Inputs<N>& in, const C (&sums)[kTiles][N], State (&state)[N]) const {
    Results<N> out;
    for (int j = 0; j < N; ++j) {
      C g[kGates];
      for (int gate = 0; gate < kGates; ++gate) {
        g[gate] = C(in.product[gate].values[j]) + C(in.bias[gate].values[j]) + sums[gate][j];
        assign(out.gates[gate].values[j], g[gate]);
      }
      assign(out.c.values[j], state[j].c);
      const Cell<T> cell(g[kI], g[kO], g[kG], state[j].c);
      out.h.values[j] = T(in.active ? cell.tanh_c * cell.o : C(0));
      state[j].h = in.active ? C(out.h.values[j]) : state[j].h;
      state[j].c = in.active ? cell.new_c : state[j].c;
    }
    return out;
  }
  template <int N>
  MSOPS_BOTH void write(const Results<N>& out, int64_t at, int64_t unit) const {
    store_at_once(output + at, out.h);
    store_at_once(cells + at, out.c);
    for (int gate = 0; gate < kGates; ++gate) store_at_once(gates + gate_at(at, gate, unit), out.gates[gate]);
  }

 private:
  template <int N>
  MSOPS_BOTH void read_at(Inputs<N>& in, int64_t step, int64_t unit) const {
    for (int gate = 0; gate < kGates; ++gate) in.product[gate] = load<N>(product + gate_at(in.at, gate, unit));
    in.active = time(step) < in.length;
  }
};

template <typename T>
struct SequenceBackward : Sequence {
  using C = Compute<T>;
  static constexpr int kTiles = 1, kSegments = kGates;
  const T *weight, *gates, *cells, *output, *h, *doutput, *dlast_h, *dlast_c;
  T *dgates, *hidden_before, *dh, *dc;  // hidden_before: h before each step; 0 where the gates' gradient is 0

  template <typename F>
  void with_arrays(const F& f) const {
    f(std::initializer_list<const T*>{gates, cells, output, h, doutput, dgates, hidden_before});
  }
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

  template <int N>
  struct Inputs {
    Pack<T, N> gates[kGates], c, doutput, h;
    int64_t at;
    int32_t length;
    bool active;
  };
  template <int N>
  MSOPS_BOTH Inputs<N> read(int64_t step, int64_t sample, int64_t unit) const {
    Inputs<N> in;
    in.length = lengths[sample];
    in.at = at(time(step), sample, unit);
    read_at(in, step, sample, unit);
    return in;
  }
  // Replaces the inputs of the step after by the inputs of `step`.
  template <int N>
  MSOPS_BOTH void read_before(Inputs<N>& in, int64_t step, int64_t sample, int64_t unit) const {
    in.at -= stride();
    read_at(in, step, sample, unit);
  }

  template <int N>
  struct Results {
    Pack<T, N> gates[kGates], h;
  };
  // Computes the gates' gradients, and the gradient of c before the step, from the gradients after it. The gradient of
  // h before the step is the product of the gates' gradients and the columns of `weight`; where the sample has ended,
  // it stays.
  template <int N>
  MSOPS_BOTH Results<N> advance(const Inputs<N>& in, State (&state)[N]) const {
    Results<N> out;
    for (int j = 0; j < N; ++j) {
      const auto number = [j](const Pack<T, N>& pack) { return C(pack.values[j]); };
      const Cell<T> cell(number(in.gates[kI]), number(in.gates[kO]), number(in.gates[kG]), number(in.c));
      const Gradient<T> gradient(cell, state[j].h + number(in.doutput), state[j].c);
      for (int gate = 0; gate < kGates; ++gate) out.gates[gate].values[j] = T(in.active ? gradient.gates[gate] : C(0));
      out.h.values[j] = in.active ? in.h.values[j] : T(C(0));
      state[j].c = in.active ? gradient.c : state[j].c;
    }
    return out;
  }
  template <int N>
  MSOPS_BOTH void write(const Results<N>& out, int64_t at, int64_t unit) const {
    store_at_once(hidden_before + at, out.h);
    for (int gate = 0; gate < kGates; ++gate) store_at_once(dgates + gate_at(at, gate, unit), out.gates[gate]);
  }

 private:
  template <int N>
  MSOPS_BOTH void read_at(Inputs<N>& in, int64_t step, int64_t sample, int64_t unit) const {
    for (int gate = 0; gate < kGates; ++gate) in.gates[gate] = load<N>(gates + gate_at(in.at, gate, unit));
    in.c = load<N>(cells + in.at);
    in.doutput = load<N>(doutput + in.at);
    in.active = time(step) < in.length;
    const bool first = step == 0 || time(step - 1) >= in.length;
    in.h = load<N>(first ? h + sample * hidden + unit : output + in.at - stride());
  }
};

}  // namespace msops::lltm
