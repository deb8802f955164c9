// This header convolves with up to kFew taps on the GPU, by teams of up to 32 threads (see chunks_gpu.h).
#pragma once

#ifdef __CUDACC__
#include "../common/launch.h"
#include "../common/sum.h"
#include "chunks_gpu.h"

namespace msops::causal_conv1d {

template <int kTaps, typename T>
__global__ void __launch_bounds__(kThreads, kTaps == 4 && sizeof(T) < 8 ? 4 : 2)
    forward_kernel(const Problem<T> p, const Walk walk) {
  using C = Compute<T>;
  using L = Chunk<kTaps, T>;
  const Team<kTaps, T> team(p, walk);
  if (!team.is_active) return;
  C taps[kTaps];
  team.read_taps(taps);
  const C bias = p.bias[team.channel];
  for_turns<L::kAtOnce, false>(team, [&](auto whole, auto turns, const Place& first) {
    constexpr bool kWhole = decltype(whole)::value;
    constexpr int kTurns = decltype(turns)::value;
    typename Team<kTaps, T>::Own own[kTurns];
    typename Team<kTaps, T>::Halo halo[kTurns];
    unrolled<kTurns>([&](int i) { own[i] = team.template own_x<kWhole>(first + i * L::kTurn); });
    team.template read_halos<kWhole>(halo, first);
    unrolled<kTurns>([&](int i) {
      const Window<kTaps, T> window(halo[i], own[i]);
      C out[L::kEach];
      unrolled<L::kEach>([&](int e) { out[e] = window.convolved(taps, team.width, bias, e); });
      if (p.is_silu) unrolled<L::kEach>([&](int e) { out[e] = Activations<T>::silu(out[e]); });
      put_chunk<kWhole>(team, p.out, first + i * L::kTurn, out);
    });
  });
  if (team.part + 1 == walk.parts)
    for (int64_t i = team.lane; i < p.s.history(); i += walk.lanes()) p.put_state(team.row, i);
}

// A Gradient computes what the backward pass stores of a team's chunks, from the last turn to the first, so that g of
// the elements after each chunk is there.
template <int kTaps, typename T>
struct Gradient {
  using C = Compute<T>;
  using L = Chunk<kTaps, T>;
  using Own = typename Team<kTaps, T>::Own;
  using Halo = typename Team<kTaps, T>::Halo;
  const Team<kTaps, T>& team;
  C taps[kTaps], bias;
  C sums[kTaps + 1] = {}, after[kTaps - 1] = {};  // after: the first of g where the thread was before

  __device__ explicit Gradient(const Team<kTaps, T>& of) : team(of), bias(of.p.bias[of.channel]) {
    team.read_taps(taps);
  }

  // Returns a bit for each element of a chunk: whether it is in the row.
  __device__ unsigned inside(const Place& place) const {
    const int64_t last = team.p.s.length - place.t;  // the first element after the row
    const unsigned to_end = last >= L::kEach ? ~0u : last <= 0 ? 0u : (1u << last) - 1;
    return place.t >= 0 ? to_end : place.t <= -L::kEach ? 0u : to_end & (~0u << -place.t);
  }
  // Computes g of a chunk, which is 0 outside the row.
  __device__ void slopes(const Window<kTaps, T>& window, const Own& dout, unsigned inside, C (&g)[L::kEach]) const {
    unrolled<L::kEach>([&](int e) { g[e] = dout[e]; });
    if (!team.p.is_silu) return;
    unrolled<L::kEach>([&](int e) {
      const C slope = Activations<T>::silu_gradient(window.convolved(taps, team.width, bias, e), g[e]);
      g[e] = inside >> e & 1 ? slope : C(0);
    });
  }
  // Computes g of the chunk after a team's last one. Only the first lane needs it.
  __device__ void begin(const Place& place) {
    if (team.lane > 0 || place.t >= team.p.s.length) return;
    const Own x = team.template own_x<false>(place), dout = team.template own<false>(team.p.dout, place);
    C g[L::kEach];
    slopes(Window<kTaps, T>(team.template halo<false>(place), x), dout, inside(place), g);
    unrolled<kTaps - 1>([&](int q) { after[q] = g[q]; });
  }
  template <bool kWhole>
  __device__ void take(const Place& place, const Halo& halo, const Own& x, const Own& dout) {
    const Window<kTaps, T> window(halo, x);
    const unsigned is_inside = kWhole ? ~0u : inside(place);
    C g[L::kEach], next[kTaps - 1];
    slopes(window, dout, is_inside, g);
    unrolled<L::kEach>([&](int e) {
      unrolled<kTaps>([&](int q) {
        if (is_inside >> e & 1) sums[q] += g[e] * window.before(e, q);
      });
      sums[kTaps] += g[e];
    });
    unrolled<kTaps - 1>([&](int q) {
      next[q] = __shfl_sync(~0u, team.lane == 0 ? after[q] : g[q], team.lane + 1, kWhole ? 32 : team.walk.lanes());
      after[q] = g[q];
    });
    put<kWhole>(place, g, next);
  }
  // Stores the gradient of x of a chunk and, before the row, that of the initial state. `next` is g after the chunk.
  template <bool kWhole>
  __device__ void put(const Place& place, const C (&g)[L::kEach], const C (&next)[kTaps - 1]) const {
    const Sizes& s = team.p.s;
    C dx[L::kEach];
    unrolled<L::kEach>([&](int e) {
      dx[e] = taps[0] * g[e];
      unrolled<kTaps>([&](int q) {
        if (q > 0 && q < team.width) dx[e] += taps[q] * (e + q < L::kEach ? g[e + q] : next[e + q - L::kEach]);
      });
    });
    const int64_t state = team.row * s.history(), in_final = place.t - (s.length - s.history());
    if (in_final > -L::kEach && in_final < s.history()) {
      const int from = static_cast<int>(in_final);
      unrolled<L::kEach>([&](int e) {
        if (from + e >= 0 && from + e < team.width - 1) dx[e] += C(team.p.dfinal_state[state + from + e]);
      });
    }
    put_chunk<kWhole>(team, team.p.dx, place, dx);
    if (kWhole || place.t >= 0 || !team.p.dinitial_state) return;
    unrolled<L::kEach>([&](int e) {
      const int64_t in_initial = place.t + e + s.history();
      if (in_initial >= 0 && in_initial < s.history()) assign(team.p.dinitial_state[state + in_initial], dx[e]);
    });
  }
  // Stores the gradient of the initial state as far as no chunk has it, and the sums.
  __device__ void end() {
    const Problem<T>& p = team.p;
    team_sum(sums, static_cast<unsigned>(team.walk.lanes()));
    if (team.lane > 0 || !team.is_active) return;
    if (team.part == 0) {
      constexpr C kNone[L::kEach] = {};
      put<false>(team.begin + -L::kEach, kNone, after);
    }
    C* const of_last = p.sums(team.part, team.sample) + team.channel * p.s.width + team.width - 1;
    unrolled<kTaps>([&](int q) {
      if (q < team.width) of_last[-q] = sums[q];
    });
    p.sums(team.part, team.sample)[p.s.channels * p.s.width + team.channel] = sums[kTaps];
  }
};

template <int kTaps, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1
                                            : kTaps == 4   ? 3
                                                           : 2) backward_kernel(const Problem<T> p, const Walk walk) {
  using L = Chunk<kTaps, T>;
  const Team<kTaps, T> team(p, walk);
  Gradient<kTaps, T> gradient(team);
  gradient.begin(team.begin + walk.turns * team.walk.stride);
  for_turns<L::kAtOnceBackward, true>(team, [&](auto whole, auto turns, const Place& first) {
    constexpr bool kWhole = decltype(whole)::value;
    constexpr int kTurns = decltype(turns)::value;
    typename Team<kTaps, T>::Own x[kTurns], dout[kTurns];
    typename Team<kTaps, T>::Halo halo[kTurns];
    unrolled<kTurns>([&](int i) {
      x[i] = team.template own_x<kWhole>(first + i * L::kTurn);
      dout[i] = team.template own<kWhole>(p.dout, first + i * L::kTurn);
    });
    team.template read_halos<kWhole>(halo, first);
    unrolled<kTurns>([&](int after) {
      const int i = kTurns - 1 - after;
      gradient.template take<kWhole>(first + i * L::kTurn, halo[i], x[i], dout[i]);
    });
  });
  gradient.end();
}

template <int kTaps, typename T>
void convolve_by_teams(Call& call, const Problem<T>& p, bool backward) {
  using L = Chunk<kTaps, T>;
  bool are_packs = true;
  const T* const arrays[] = {p.x, p.dout, p.out, p.dx};
  for (const T* array : arrays) are_packs &= is_aligned<L::kPack>(array);
  const Walk walk(p.s, L::kEach, backward ? L::kAtOnceBackward : L::kAtOnce, backward ? p.parts : 0, are_packs);
  launch(call, backward ? backward_kernel<kTaps, T> : forward_kernel<kTaps, T>, walk.blocks(), kThreads, 0, p, walk);
}

}  // namespace msops::causal_conv1d
#endif
