// On the CPU, a thread takes the channels of a block, chunk by chunk. Its loops over W states vectorize.
#pragma once

#include "problem.h"

namespace msops::selective_scan {

// Range is a chunk of steps.
struct Range {
  int64_t chunk, first;
  int count;

  Range(const Sizes& s, int64_t c)
      : chunk(c), first(c * kChunk), count(static_cast<int>(std::min<int64_t>(kChunk, s.steps - first))) {}
};

// GroupInputs holds B_t and C_t of W states and a chunk, which the channels of a group share, or their gradients.
// States after the last one are zeros.
template <int W, typename T>
struct GroupInputs {
  using C = Compute<T>;
  C inputs[kChunk][W], outputs[kChunk][W];

  MSOPS_CPU void load(const Problem<T>& all, const Block& block, const Range& range, int64_t state) {
    for (int n = 0; n < W; ++n) {
      const bool is_inside = state + n < all.s.states;
      const int64_t at = all.row_of_state(block.sample, block.group, is_inside ? state + n : 0) + range.first;
      for (int t = 0; t < range.count; ++t) {
        inputs[t][n] = is_inside ? C(all.inputs[at + t]) : C(0);
        outputs[t][n] = is_inside ? C(all.outputs[at + t]) : C(0);
      }
    }
  }
};

// ChannelSteps holds dt, dt u and y of a channel's steps of a chunk.
template <typename T>
struct ChannelSteps {
  using C = Compute<T>;
  C dt[kChunk], terms[kChunk], y[kChunk];  // terms: dt u

  MSOPS_CPU void prepare(const Problem<T>& all, int64_t at, C bias, const Range& range) {
    const T *const u = all.u + at, *const delta = all.delta + at;
    if (all.steps.has_softplus) {
#pragma omp simd
      for (int t = 0; t < range.count; ++t) dt[t] = Steps<T>::softplus(C(delta[t]) + bias);
    } else {
#pragma omp simd
      for (int t = 0; t < range.count; ++t) dt[t] = C(delta[t]) + bias;
    }
#pragma omp simd
    for (int t = 0; t < range.count; ++t) {
      terms[t] = dt[t] * C(u[t]);
      y[t] = 0;
    }
  }
};

// Loads W states' A of a channel.
template <int W, typename T>
MSOPS_CPU void load_decays(const Problem<T>& all, int64_t channel, int64_t state, Compute<T> (&decays)[W]) {
  for (int n = 0; n < W; ++n)
    decays[n] = state + n < all.s.states ? all.A[channel * all.s.states + state + n] : Compute<T>(0);
}

template <int W, typename T>
struct ForwardOnCpu {
  using C = Compute<T>;
  ForwardProblem<T> all;

  MSOPS_CPU void operator()(int64_t item) const {
    const Block block(all.s, item);
    GroupInputs<W, T> group;
    ChannelSteps<T> channels[kChannels<T>];
    for (int64_t c = 0; c < all.s.chunks(); ++c) {
      const Range range(all.s, c);
      for (int r = 0; r < block.channels; ++r) {
        const int64_t channel = block.channel + r;
        channels[r].prepare(all, all.row(block.sample, channel) + range.first, all.bias[channel], range);
      }
      for (int64_t state = 0; state < all.s.states; state += W) {
        group.load(all, block, range, state);
        for (int r = 0; r < block.channels; ++r)
          walk(block.sample, block.channel + r, range, state, group, channels[r]);
      }
      for (int r = 0; r < block.channels; ++r) finish(block.sample, block.channel + r, range, channels[r].y);
    }
  }

 private:
  // Advances W states over a chunk.
  MSOPS_CPU void walk(int64_t sample, int64_t channel, const Range& range, int64_t state,
                      const GroupInputs<W, T>& group, ChannelSteps<T>& mine) const {
    const Sizes& s = all.s;
    const int64_t count = std::min<int64_t>(W, s.states - state), at = all.at(sample, channel, state);
    C* const before = all.saved(sample, range.chunk, channel, state);
    C* const after = range.chunk + 1 < s.chunks() ? all.saved(sample, range.chunk + 1, channel, state) : all.last + at;
    C decays[W], h[W] = {};
    load_decays<W>(all, channel, state, decays);
    if (range.chunk == 0)
      for (int64_t n = 0; n < count; ++n) before[n] = all.initial[at + n];
    for (int64_t n = 0; n < count; ++n) h[n] = before[n];
    for (int t = 0; t < range.count; ++t) {
      const C dt = mine.dt[t], term = mine.terms[t];
      C y = 0;
#pragma omp simd reduction(+ : y)
      for (int n = 0; n < W; ++n) {
        h[n] = Decay<C>::of(dt * decays[n]) * h[n] + term * group.inputs[t][n];
        y += group.outputs[t][n] * h[n];
      }
      mine.y[t] += y;
    }
    for (int64_t n = 0; n < count; ++n) after[n] = h[n];
  }

  MSOPS_CPU void finish(int64_t sample, int64_t channel, const Range& range, const C* y) const {
    const int64_t at = all.row(sample, channel) + range.first;
    const T *const u = all.u + at, *const z = all.z ? all.z + at : nullptr;
    T* const out = all.out + at;
    const C D = all.D[channel];
    if (z) {
#pragma omp simd
      for (int t = 0; t < range.count; ++t) assign(out[t], (y[t] + D * C(u[t])) * Activations<T>::silu(C(z[t])));
    } else {
#pragma omp simd
      for (int t = 0; t < range.count; ++t) assign(out[t], y[t] + D * C(u[t]));
    }
  }
};

// ChannelGradients also holds dy, s1 and s2 of these steps, for the backward pass.
template <typename T>
struct ChannelGradients : ChannelSteps<T> {
  using C = Compute<T>;
  C dy[kChunk], s1[kChunk], s2[kChunk];

  MSOPS_CPU void prepare(const BackwardProblem<T>& all, int64_t at, C bias, const Range& range) {
    ChannelSteps<T>::prepare(all, at, bias, range);
    const T *const dout = all.dout + at, *const z = all.z ? all.z + at : nullptr;
    if (z) {
#pragma omp simd
      for (int t = 0; t < range.count; ++t) dy[t] = C(dout[t]) * Activations<T>::silu(C(z[t]));
    } else {
      widen(dout, dy, range.count);
    }
    for (int t = 0; t < range.count; ++t) s1[t] = s2[t] = 0;
  }
};

template <int W, typename T>
struct BackwardOnCpu {
  using C = Compute<T>;
  BackwardProblem<T> all;

  MSOPS_CPU void operator()(int64_t item) const {
    const Sizes& s = all.s;
    const Block block(s, item);
    GroupInputs<W, T> group, gradients;
    ChannelGradients<T> channels[kChannels<T>];
    for (int64_t c = s.chunks() - 1; c >= 0; --c) {
      const Range range(s, c);
      for (int r = 0; r < block.channels; ++r) {
        const int64_t channel = block.channel + r;
        channels[r].prepare(all, all.row(block.sample, channel) + range.first, all.bias[channel], range);
      }
      for (int64_t state = 0; state < s.states; state += W) {
        group.load(all, block, range, state);
        std::memset(&gradients, 0, sizeof gradients);
        for (int r = 0; r < block.channels; ++r)
          walk(block.sample, block.channel + r, range, state, group, gradients, channels[r]);
        store(block, range, state, gradients);
      }
      for (int r = 0; r < block.channels; ++r) finish(block.sample, block.channel + r, range, channels[r]);
    }
    for (int r = 0; r < block.channels; ++r) {
      const int64_t at = all.at(block.sample, block.channel + r, 0);
      if (!all.dinitial.data) break;
      for (int64_t n = 0; n < s.states; ++n) all.dinitial.set(at + n, all.carry[at + n]);
    }
  }

 private:
  // Computes W states over a chunk again, and goes back to its first step.
  MSOPS_CPU void walk(int64_t sample, int64_t channel, const Range& range, int64_t state,
                      const GroupInputs<W, T>& group, GroupInputs<W, T>& gradients, ChannelGradients<T>& mine) const {
    const Sizes& s = all.s;
    const bool is_first = range.chunk + 1 == s.chunks();
    const int64_t count = std::min<int64_t>(W, s.states - state), at = all.at(sample, channel, state);
    const C *const before = all.saved(sample, range.chunk, channel, state), *const from =
                                                                                is_first ? all.dlast : all.carry;
    C decays[W], h[W] = {}, carry[W] = {}, dA[W] = {}, factors[kChunk][W], kept[kChunk][W];  // kept: factor h
    load_decays<W>(all, channel, state, decays);
    for (int64_t n = 0; n < count; ++n) h[n] = before[n], carry[n] = from[at + n];
    for (int t = 0; t < range.count; ++t) {
      const C dt = mine.dt[t], term = mine.terms[t];
      C y = 0;
#pragma omp simd reduction(+ : y)
      for (int n = 0; n < W; ++n) {
        factors[t][n] = Decay<C>::of(dt * decays[n]);
        kept[t][n] = factors[t][n] * h[n];
        h[n] = kept[t][n] + term * group.inputs[t][n];
        y += group.outputs[t][n] * h[n];
      }
      mine.y[t] += y;
    }
    for (int t = range.count - 1; t >= 0; --t) {
      const C dt = mine.dt[t], term = mine.terms[t], dy = mine.dy[t];
      C s1 = 0, s2 = 0;
#pragma omp simd reduction(+ : s1, s2)
      for (int n = 0; n < W; ++n) {
        const C g = carry[n] + dy * group.outputs[t][n], p = g * kept[t][n];
        gradients.outputs[t][n] += dy * (kept[t][n] + term * group.inputs[t][n]);
        gradients.inputs[t][n] += term * g;
        dA[n] += dt * p;
        s1 += g * group.inputs[t][n];
        s2 += decays[n] * p;
        carry[n] = factors[t][n] * g;
      }
      mine.s1[t] += s1;
      mine.s2[t] += s2;
    }
    for (int64_t n = 0; n < count; ++n) {
      all.carry[at + n] = carry[n];
      all.dA[at + n] = is_first ? dA[n] : all.dA[at + n] + dA[n];
    }
  }

  MSOPS_CPU void store(const Block& block, const Range& range, int64_t state,
                       const GroupInputs<W, T>& gradients) const {
    for (int n = 0; n < W && state + n < all.s.states; ++n) {
      const int64_t row = all.row_of_state(block.sample, block.group, state + n) + range.first;
      C *const dB = all.sums + all.at_sums(block.index, 0, row), *const dC =
                                                                     all.sums + all.at_sums(block.index, 1, row);
      for (int t = 0; t < range.count; ++t) dB[t] = gradients.inputs[t][n], dC[t] = gradients.outputs[t][n];
    }
  }

  MSOPS_CPU void finish(int64_t sample, int64_t channel, const Range& range, ChannelGradients<T>& mine) const {
    const int64_t at = all.row(sample, channel) + range.first;
    const T *const u = all.u + at, *const delta = all.delta + at;
    T *const du = all.du + at, *const ddelta = all.ddelta + at;
    const C D = all.D[channel], bias = all.bias[channel];
    C dD = 0, dbias = 0;
#pragma omp simd reduction(+ : dD, dbias)
    for (int t = 0; t < range.count; ++t) {
      const C slope = all.steps.slope(C(delta[t]) + bias), gradient = (mine.s2[t] + C(u[t]) * mine.s1[t]) * slope;
      assign(du[t], mine.dt[t] * mine.s1[t] + D * mine.dy[t]);
      assign(ddelta[t], gradient);
      dD += mine.dy[t] * C(u[t]);
      dbias += gradient;
    }
    if (all.z) {
      const T *const z = all.z + at, *const dout = all.dout + at;
      T* const dz = all.dz + at;
#pragma omp simd
      for (int t = 0; t < range.count; ++t)
        assign(dz[t], Activations<T>::silu_gradient(C(z[t]), C(dout[t]) * (mine.y[t] + D * C(u[t]))));
    }
    const bool is_first = range.chunk + 1 == all.s.chunks();
    C *const of_D = all.vector(0, 0, sample, channel), *const of_bias = all.vector(1, 0, sample, channel);
    *of_D = is_first ? dD : *of_D + dD;
    *of_bias = is_first ? dbias : *of_bias + dbias;
  }
};

// Calls f(Constant<W>{}) with the number of states for the loops of the CPU.
template <typename F>
void with_states(int64_t states, const F& f) {
  states <= 1 ? f(Constant<1>{}) : states <= 8 ? f(Constant<8>{}) : f(Constant<kWidth>{});
}

}  // namespace msops::selective_scan
