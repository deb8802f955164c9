// The time loop, alike for both directions: rounds of a product of the recurrent weights and what the units have
// published, and of what each unit of each sample makes of its sums, writes and publishes next.
#pragma once

#include "sequence.h"

namespace msops {

template <typename T>
struct ForwardLoop : SequenceForward<T> {
  using Base = SequenceForward<T>;
  using Element = T;
  using typename Base::Inputs;
  using typename Base::State;
  struct Update {
    typename Base::Results results;
    int64_t step;  // negative: there is nothing to write
  };

  explicit ForwardLoop(const Base& base) : Base(base) {}

  // publish(segment, value) is for what the first product is of.
  template <typename Publish>
  MSOPS_BOTH Update start(State& state, int64_t, int64_t, const Publish& publish) const {
    publish(0, T(state.h));
    return {{}, -1};
  }
  template <typename Publish>
  MSOPS_BOTH Update finish(int64_t round, const Inputs& in, const Compute<T> (&sums)[Base::kTiles], State& state,
                           const Publish& publish) const {
    const Update update = {Base::advance(in, sums, state), round};
    publish(0, T(state.h));
    return update;
  }
  MSOPS_BOTH void write(const Update& update, int64_t sample, int64_t unit) const {
    if (update.step >= 0) Base::write(update.results, update.step, sample, unit);
  }
};

// It starts with the gates' gradients of the last step. Each round ends a step, and makes those of the one before.
template <typename T>
struct BackwardLoop : SequenceBackward<T> {
  using Base = SequenceBackward<T>;
  using Element = T;
  using typename Base::State;
  struct Update {
    typename Base::Results results;
    int64_t step;
  };
  struct Inputs {
    typename Base::Inputs of_next;
    bool active;
  };

  explicit BackwardLoop(const Base& base) : Base(base) {}

  template <typename Publish>
  MSOPS_BOTH Update start(State& state, int64_t sample, int64_t unit, const Publish& publish) const {
    const int64_t last = Base::steps - 1;
    return last < 0 ? Update{{}, -1} : advance(last, Base::read(last, sample, unit), state, publish);
  }
  MSOPS_BOTH Inputs read(int64_t round, int64_t sample, int64_t unit) const {
    const int64_t step = Base::steps - 1 - round;
    Inputs in = {};
    in.active = Base::active(Base::time(step), sample);
    if (step > 0) in.of_next = Base::read(step - 1, sample, unit);
    return in;
  }
  template <typename Publish>
  MSOPS_BOTH Update finish(int64_t round, const Inputs& in, const Compute<T> (&sums)[Base::kTiles], State& state,
                           const Publish& publish) const {
    state.h = in.active ? sums[0] : state.h;
    const int64_t next = Base::steps - 2 - round;
    return next < 0 ? Update{{}, -1} : advance(next, in.of_next, state, publish);
  }
  MSOPS_BOTH void write(const Update& update, int64_t sample, int64_t unit) const {
    if (update.step >= 0) Base::write(update.results, update.step, sample, unit);
  }

 private:
  template <typename Publish>
  MSOPS_BOTH Update advance(int64_t step, const typename Base::Inputs& in, State& state, const Publish& publish) const {
    const Update update = {Base::advance(in, state), step};
    for (int gate = 0; gate < kGates; ++gate) publish(gate, update.results.gates[gate]);
    return update;
  }
};

}  // namespace msops
