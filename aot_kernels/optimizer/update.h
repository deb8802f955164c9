// Moves parameters and their states where they are, by one of the rules.
#pragma once

#include "../common/pack.h"
#include "rules.h"
#include "table.h"

namespace msops::optimizer {

// The arrays of a table are the parameters, the states and the gradients, which have elements of T.
template <typename T, typename Rule>
struct Update {
  using C = Compute<T>;
  static constexpr int kStates = Rule::kStates, kArrays = kStates + 2, kWidth = 4;
  Rule rule;
  float* done;  // null, or where the first block writes a number, so that the output is not left unwritten

  // Holds where a piece's elements begin.
  struct At {
    C *parameter, *states[kStates];
    const T* gradient;

    MSOPS_BOTH At(const Table<kArrays>& table, const Piece& piece)
        : parameter(table.template at<C>(0, piece)), gradient(table.template at<T>(kStates + 1, piece)) {
      for (int s = 0; s < kStates; ++s) states[s] = table.template at<C>(1 + s, piece);
    }
    MSOPS_BOTH bool is_aligned_for_packs() const {
      bool result = is_aligned<kWidth>(parameter) && is_aligned<kWidth>(gradient);
      for (int s = 0; s < kStates; ++s) result &= is_aligned<kWidth>(states[s]);
      return result;
    }
    MSOPS_BOTH void move(const typename Rule::Step& step, int64_t i) const {
      C p = parameter[i], values[kStates];
      for (int s = 0; s < kStates; ++s) values[s] = states[s][i];
      step(p, values, C(gradient[i]));
      parameter[i] = p;
      for (int s = 0; s < kStates; ++s) states[s][i] = values[s];
    }
  };

#ifdef __CUDACC__
  __device__ void on_gpu(const Table<kArrays>& table, const Piece& piece, int place) const {
    const At at(table, piece);
    if (place == 0 && done && threadIdx.x == 0) *done = 1;
    const typename Rule::Step step = rule.step();
    const int size = static_cast<int>(piece.size), packs = at.is_aligned_for_packs() ? size / kWidth : 0;
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < packs; i += kTableThreads) move_pack(at, step, i * kWidth);
    for (int i = packs * kWidth + thread; i < size; i += kTableThreads) at.move(step, i);
  }

  static __device__ void move_pack(const At& at, const typename Rule::Step& step, int i) {
    auto p = load<kWidth>(at.parameter + i);
    const auto g = load<kWidth>(at.gradient + i);
    Pack<C, kWidth> states[kStates];
    for (int s = 0; s < kStates; ++s) states[s] = load<kWidth>(at.states[s] + i);
    for (int k = 0; k < kWidth; ++k) {
      C values[kStates];
      for (int s = 0; s < kStates; ++s) values[s] = states[s].values[k];
      step(p.values[k], values, C(g.values[k]));
      for (int s = 0; s < kStates; ++s) states[s].values[k] = values[s];
    }
    store(at.parameter + i, p);
    for (int s = 0; s < kStates; ++s) store(at.states[s] + i, states[s]);
  }
#endif

  struct Move {
    At at;
    typename Rule::Step step;

    MSOPS_BOTH void operator()(int64_t i) const { at.move(step, i); }
  };
  MSOPS_CPU void on_cpu(const Table<kArrays>& table, const Piece& piece, int place) const {
    if (place == 0 && done) *done = 1;
    for_elements<C>(piece.size, Move{At(table, piece), rule.step()});
  }
};

// Copies tensors, where a call shall leave its inputs as they are.
template <typename C>
struct Copy {
  const C* from;
  C* to;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    to[i] = from[i];
  }
};

}  // namespace msops::optimizer
