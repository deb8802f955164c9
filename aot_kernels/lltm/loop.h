// The time loop is alike for both directions. Each round multiplies the recurrent weights by what the units have
// published. Then N neighbouring units of a sample advance by their sums, write their results, and publish for the next
// round.
#pragma once

#include "sequence.h"

namespace msops::lltm {

template <typename T, typename Steps>
struct Loop : Steps {
  using Element = T;
  template <int N>
  struct Update {
    typename Steps::template Results<N> results;
    int64_t at;  // negative: there is nothing to write
  };

  explicit Loop(const Steps& steps) : Steps(steps) {}
  template <int N>
  MSOPS_BOTH void write(const Update<N>& update, int64_t, int64_t unit) const {
    if (update.at >= 0) Steps::write(update.results, update.at, unit);
  }
};

template <typename T>
struct ForwardLoop : Loop<T, SequenceForward<T>> {
  using Base = Loop<T, SequenceForward<T>>;
  using Base::Base;
  using typename Base::State;
  template <int N>
  using Inputs = typename Base::template Inputs<N>;
  template <int N>
  using Update = typename Base::template Update<N>;

  // publish(segment, pack) takes what the first product multiplies.
  template <int N, typename Publish>
  MSOPS_BOTH Update<N> start(State (&state)[N], int64_t, int64_t, const Publish& publish) const {
    publish_h(state, publish);
    return {{}, -1};
  }
  // Replaces the inputs of the round before by the inputs of this one.
  template <int N>
  MSOPS_BOTH void read_next(Inputs<N>& in, int64_t round, int64_t, int64_t unit) const {
    Base::read_next(in, round, unit);
  }
  template <int N, typename Publish>
  MSOPS_BOTH Update<N> finish(int64_t, const Inputs<N>& in, const Compute<T> (&sums)[Base::kTiles][N],
                              State (&state)[N], const Publish& publish) const {
    const Update<N> update = {Base::advance(in, sums, state), in.at};
    publish_h(state, publish);
    return update;
  }

 private:
  template <int N, typename Publish>
  MSOPS_BOTH void publish_h(const State (&state)[N], const Publish& publish) const {
    Pack<T, N> pack;
    for (int j = 0; j < N; ++j) pack.values[j] = T(state[j].h);
    publish(0, pack);
  }
};

// BackwardLoop starts with the gates' gradients of the last step. Each round ends a step, and computes the gates'
// gradients of the step before it.
template <typename T>
struct BackwardLoop : Loop<T, SequenceBackward<T>> {
  using Base = Loop<T, SequenceBackward<T>>;
  using Base::Base;
  using typename Base::State;
  template <int N>
  using Update = typename Base::template Update<N>;
  template <int N>
  struct Inputs {
    typename Base::template Inputs<N> of_next;
    bool active;
  };

  template <int N, typename Publish>
  MSOPS_BOTH Update<N> start(State (&state)[N], int64_t sample, int64_t unit, const Publish& publish) const {
    const int64_t last = Base::steps - 1;
    if (last < 0) return {{}, -1};
    return advance(Base::template read<N>(last, sample, unit), state, publish);
  }
  template <int N>
  MSOPS_BOTH Inputs<N> read(int64_t round, int64_t sample, int64_t unit) const {
    const int64_t step = Base::steps - 1 - round;
    Inputs<N> in = {};
    in.active = Base::active(Base::time(step), sample);
    if (step > 0) in.of_next = Base::template read<N>(step - 1, sample, unit);
    return in;
  }
  template <int N>
  MSOPS_BOTH void read_next(Inputs<N>& in, int64_t round, int64_t sample, int64_t unit) const {
    const int64_t step = Base::steps - 1 - round;
    in.active = in.of_next.active;
    if (step > 0) Base::read_before(in.of_next, step - 1, sample, unit);
  }
  template <int N, typename Publish>
  MSOPS_BOTH Update<N> finish(int64_t round, const Inputs<N>& in, const Compute<T> (&sums)[Base::kTiles][N],
                              State (&state)[N], const Publish& publish) const {
    for (int j = 0; j < N; ++j) state[j].h = in.active ? sums[0][j] : state[j].h;
    if (round + 1 >= Base::steps) return {{}, -1};
    return advance(in.of_next, state, publish);
  }

 private:
  template <int N, typename Publish>
  MSOPS_BOTH Update<N> advance(const typename Base::template Inputs<N>& in, State (&state)[N],
                               const Publish& publish) const {
    const Update<N> update = {Base::advance(in, state), in.at};
    for (int gate = 0; gate < kGates; ++gate) publish(gate, update.results.gates[gate]);
    return update;
  }
};

}  // namespace msops::lltm
