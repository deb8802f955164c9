// This header convolves with up to kFew taps on the GPU. Arrays are cut into chunks of some packs, from their start, so
// that chunks are aligned whatever the length of a row is. In each of its turns, a team of up to 32 threads takes as
// many neighbouring chunks of a row; the backward pass begins with the last ones. A chunk that is partly outside its
// row is read and written by elements.
#pragma once

#ifdef __CUDACC__
#include <algorithm>

#include "../common/gpu/unrolled.h"
#include "../common/launch.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "../common/sum.h"
#include "problem.h"

namespace msops::causal_conv1d {

template <int kTaps, typename T>
struct Chunk {
  static constexpr int kPack = kPackWidth<T>, kEach = kPack > kTaps ? kPack : kTaps;
  static constexpr int kHalo = kTaps;  // elements before a chunk that are read, a multiple of a pack or half of one
  static constexpr int kOfHalo = kPack < kHalo ? kPack : kHalo;
  static constexpr int kBytes = (kEach + kHalo) * static_cast<int>(sizeof(T));
  static constexpr int kAtOnce = kBytes <= 32 ? 4 : 1;  // chunks of a thread in flight
};

// A Walk says how teams share the chunks of all rows. A team has so many turns, and a lane takes a chunk in each.
struct Walk {
  int lanes;
  int64_t turns, parts, teams;
  bool are_packs;  // all arrays begin at packs

  Walk(const Sizes& s, int each, int64_t turns_, int64_t parts_, bool are_packs_)
      : lanes(1), turns(turns_), parts(parts_), are_packs(are_packs_) {
    const int64_t chunks = s.length % each == 0 ? s.length / each : (s.length - 1) / each + 2;
    while (lanes < 32 && lanes < chunks) lanes *= 2;
    const int64_t all = (chunks + lanes - 1) / lanes;
    if (parts == 0) parts = std::max<int64_t>(1, (all + turns - 1) / turns);
    if (turns == 0) turns = (all + parts - 1) / parts;
    teams = s.rows() * parts;
  }
  int64_t blocks() const {
    const int64_t of_block = kThreads / lanes;
    return teams / of_block + (teams % of_block > 0);
  }
};

// Place is where a chunk is, relative to its row.
struct Place {
  int64_t at, t;  // of the chunk's first element, in the array and in the row

  // Returns whether n elements from the chunk's i-th on are all in the row.
  __device__ bool has(int64_t i, int64_t n, int64_t length) const { return t + i >= 0 && t + i + n <= length; }
};

// Elements are a run of kCount elements, read in packs of kWidth or one by one. It holds words, since nvcc would keep
// each float16 in a register of its own where a run comes from several branches. Indices must be constant.
template <int kCount, int kWidth, typename T>
struct Elements {
  static constexpr int kOfPack = kWidth * sizeof(T) / 4;
  uint32_t words[kCount * sizeof(T) / 4] = {};

  __device__ void read_packs(const T* from) {
    unrolled<kCount / kWidth>([&](int i) {
      const Pack<T, kWidth> pack = load<kWidth>(from + i * kWidth);
      memcpy(words + i * kOfPack, &pack, sizeof pack);
    });
  }
  // Sets element i, which must be 0 before.
  __device__ void set(int i, T value) {
    if constexpr (sizeof(T) == 2) {
      uint16_t bits;
      memcpy(&bits, &value, sizeof bits);
      words[i / 2] |= uint32_t{bits} << i % 2 * 16;
    } else {
      memcpy(words + i * sizeof(T) / 4, &value, sizeof value);
    }
  }
  __device__ Compute<T> operator[](int i) const {
    T value;
    if constexpr (sizeof(T) == 2) {
      const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      memcpy(&value, &bits, sizeof value);
    } else {
      memcpy(&value, words + i * sizeof(T) / 4, sizeof value);
    }
    return Compute<T>(value);
  }
};

template <int kTaps, typename T>
struct Team {
  using C = Compute<T>;
  using L = Chunk<kTaps, T>;
  using Own = Elements<L::kEach, L::kPack, T>;
  using Halo = Elements<L::kHalo, L::kOfHalo, T>;
  const Problem<T>& p;
  const Walk& walk;
  int lane, width;
  bool is_active;
  int64_t row, channel, sample, part, first;  // first: of the array's chunks, the first that has elements of the row

  __device__ Team(const Problem<T>& problem, const Walk& of)
      : p(problem), walk(of), lane(threadIdx.x % of.lanes), width(static_cast<int>(problem.s.width)) {
    const int64_t team = static_cast<int64_t>(blockIdx.x) * (kThreads / walk.lanes) + threadIdx.x / walk.lanes;
    is_active = team < walk.teams;
    row = is_active ? team / walk.parts : 0, part = is_active ? team - row * walk.parts : 0;
    sample = row / p.s.channels, channel = row - sample * p.s.channels;
    first = row * p.s.length / L::kEach;
  }

  __device__ Place place(int64_t turn) const {
    const int64_t at = (first + (part * walk.turns + turn) * walk.lanes + lane) * L::kEach;
    return {at, at - row * p.s.length};
  }
  __device__ void read_taps(C (&taps)[kTaps]) const {
    unrolled<kTaps>([&](int q) { taps[q] = q < width ? p.weight[channel * width + width - 1 - q] : C(0); });
  }
  // Returns the chunk's elements of an array; those outside the row are 0.
  __device__ Own own(const T* from, const Place& place) const {
    Own result;
    if (walk.are_packs && place.has(0, L::kEach, p.s.length)) {
      result.read_packs(from + place.at);
    } else if (is_active) {
      unrolled<L::kEach>([&](int e) {
        if (place.has(e, 1, p.s.length)) result.set(e, from[place.at + e]);
      });
    }
    return result;
  }
  // Returns the elements of x before the chunk.
  __device__ Halo halo(const Place& place) const {
    Halo result;
    if (walk.are_packs && place.has(-L::kHalo, L::kHalo, p.s.length)) {
      result.read_packs(p.x + place.at - L::kHalo);
    } else if (is_active) {
      unrolled<L::kHalo>([&](int e) {
        const int64_t t = place.t - L::kHalo + e;
        if (t >= 0 && t < p.s.length) result.set(e, p.x[row * p.s.length + t]);
      });
      add_state(result, place.t - L::kHalo);
    }
    return result;
  }
  // Sets the elements of a run before the first step from the initial state. The run begins at step t.
  template <typename Run>
  __device__ void add_state(Run& run, int64_t t) const {
    const int64_t history = p.s.history();
    if (t >= 0 || !p.initial_state || !is_active) return;
    unrolled<static_cast<int>(sizeof run / sizeof(T))>([&](int e) {
      if (t + e < 0 && t + e >= -history) run.set(e, p.initial_state[row * history + t + e + history]);
    });
  }
};

// values[kHalo + e] is the chunk's e-th element.
template <int kTaps, typename T>
struct Window {
  using L = Chunk<kTaps, T>;
  Compute<T> values[L::kHalo + L::kEach];

  __device__ Window(const typename Team<kTaps, T>::Halo& halo, const typename Team<kTaps, T>::Own& own) {
    unrolled<L::kHalo>([&](int e) { values[e] = halo[e]; });
    unrolled<L::kEach>([&](int e) { values[L::kHalo + e] = own[e]; });
  }
  // Returns x at distance q before the chunk's element e.
  __device__ Compute<T> before(int e, int q) const { return values[L::kHalo + e - q]; }
  __device__ Compute<T> convolved(const Compute<T> (&taps)[kTaps], int width, Compute<T> bias, int e) const {
    unrolled<kTaps>([&](int q) {
      if (q < width) bias += taps[q] * before(e, q);
    });
    return bias;
  }
};

// Stores a chunk's elements that are in the row.
template <int kTaps, typename T>
__device__ __forceinline__ void put_chunk(const Team<kTaps, T>& team, T* to, const Place& place,
                                          const Compute<T> (&values)[Chunk<kTaps, T>::kEach]) {
  using L = Chunk<kTaps, T>;
  if (team.walk.are_packs && place.has(0, L::kEach, team.p.s.length)) {
    unrolled<L::kEach / L::kPack>([&](int i) {
      Compute<T> pack[L::kPack];
      unrolled<L::kPack>([&](int j) { pack[j] = values[i * L::kPack + j]; });
      store(to + place.at + i * L::kPack, rounded_pack<T>(pack));
    });
  } else {
    unrolled<L::kEach>([&](int e) {
      if (place.has(e, 1, team.p.s.length)) assign(to[place.at + e], values[e]);
    });
  }
}

template <int kTaps, typename T>
__global__ void __launch_bounds__(kThreads, kTaps == 4 && sizeof(T) < 8 ? 4 : 2)
    forward_kernel(const Problem<T> p, const Walk walk) {
  using C = Compute<T>;
  using L = Chunk<kTaps, T>;
  const Team<kTaps, T> team(p, walk);
  if (!team.is_active) return;
  typename Team<kTaps, T>::Own own[L::kAtOnce];
  typename Team<kTaps, T>::Halo halo[L::kAtOnce];
  unrolled<L::kAtOnce>([&](int turn) {
    const Place place = team.place(turn);
    own[turn] = team.own(p.x, place), halo[turn] = team.halo(place);
    team.add_state(own[turn], place.t);
  });
  C taps[kTaps];
  team.read_taps(taps);
  const C bias = p.bias[team.channel];
  unrolled<L::kAtOnce>([&](int turn) {
    const Place place = team.place(turn);
    const Window<kTaps, T> window(halo[turn], own[turn]);
    C out[L::kEach];
    unrolled<L::kEach>([&](int e) { out[e] = p.activated(window.convolved(taps, team.width, bias, e)); });
    put_chunk(team, p.out, place, out);
  });
  if (team.part + 1 == walk.parts)
    for (int64_t i = team.lane; i < p.s.history(); i += walk.lanes) p.put_state(team.row, i);
}

// Inputs are what the backward pass reads of a chunk.
template <int kTaps, typename T>
struct Inputs {
  typename Team<kTaps, T>::Own x, dout;
  typename Team<kTaps, T>::Halo halo;

  __device__ Inputs(const Team<kTaps, T>& team, const Place& place)
      : x(team.own(team.p.x, place)), dout(team.own(team.p.dout, place)), halo(team.halo(place)) {
    team.add_state(x, place.t);
  }
};

// Gradients are a chunk's g, and whether each of its elements is in the row.
template <int kTaps, typename T>
struct Gradients {
  using C = Compute<T>;
  using L = Chunk<kTaps, T>;
  C g[L::kEach];
  unsigned inside = 0;  // a bit for each

  __device__ Gradients(const Team<kTaps, T>& team, const Place& place, const Inputs<kTaps, T>& in,
                       const Window<kTaps, T>& window, const C (&taps)[kTaps], C bias) {
    const Problem<T>& p = team.p;
    const int64_t last = p.s.length - place.t;  // the first element after the row
    const unsigned to_end = last >= L::kEach ? ~0u : last <= 0 ? 0u : (1u << last) - 1;
    if (team.is_active) inside = place.t >= 0 ? to_end : place.t <= -L::kEach ? 0u : to_end & (~0u << -place.t);
    unrolled<L::kEach>([&](int e) {
      const C z = p.is_silu ? window.convolved(taps, team.width, bias, e) : C(0);
      g[e] = inside >> e & 1 ? p.gradient(in.dout[e], z) : C(0);
    });
  }
};

// Stores the gradient of x of a chunk and, before the row, that of the initial state. `next` is g after the chunk.
template <int kTaps, typename T>
__device__ __forceinline__ void put_gradients(const Team<kTaps, T>& team, const Place& place,
                                              const Compute<T> (&g)[Chunk<kTaps, T>::kEach],
                                              const Compute<T> (&next)[kTaps - 1], const Compute<T> (&taps)[kTaps]) {
  using L = Chunk<kTaps, T>;
  const Sizes& s = team.p.s;
  if (!team.is_active) return;
  Compute<T> dx[L::kEach] = {};
  unrolled<L::kEach>([&](int e) {
    unrolled<kTaps>([&](int q) {
      if (q >= team.width) return;
      dx[e] += taps[q] * (e + q < L::kEach ? g[e + q] : next[e + q - L::kEach]);
    });
  });
  if (place.has(0, L::kEach, s.length - s.history())) return put_chunk(team, team.p.dx, place, dx);
  unrolled<L::kEach>([&](int e) {
    const int64_t t = place.t + e;
    if (t >= -s.history() && t < s.length) team.p.put_gradient(team.row, t, dx[e]);
  });
}

// A team walks from the last of its chunks to the first, so that it has g of the elements after each chunk.
template <int kTaps, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1
                                            : kTaps == 4   ? 3
                                                           : 2) backward_kernel(const Problem<T> p, const Walk walk) {
  using C = Compute<T>;
  using L = Chunk<kTaps, T>;
  using In = Inputs<kTaps, T>;
  const Team<kTaps, T> team(p, walk);
  C taps[kTaps], sums[kTaps + 1] = {}, after[kTaps - 1] = {};  // after: the first of g where the thread was before
  team.read_taps(taps);
  const C bias = p.bias[team.channel];
  if (team.lane == 0) {
    const Place place = team.place(walk.turns);
    const In in(team, place);
    const Gradients<kTaps, T> next_chunk(team, place, in, Window<kTaps, T>(in.halo, in.x), taps, bias);
    unrolled<kTaps - 1>([&](int q) { after[q] = next_chunk.g[q]; });
  }
  In coming(team, team.place(walk.turns - 1));
#pragma unroll 1
  for (int64_t turn = walk.turns - 1; turn >= 0; --turn) {
    const In in = coming;
    const Place place = team.place(turn);
    if (turn > 0) coming = In(team, team.place(turn - 1));
    const Window<kTaps, T> window(in.halo, in.x);
    const Gradients<kTaps, T> here(team, place, in, window, taps, bias);
    unrolled<L::kEach>([&](int e) {
      unrolled<kTaps>([&](int q) {
        if (here.inside >> e & 1) sums[q] += here.g[e] * window.before(e, q);
      });
      sums[kTaps] += here.g[e];
    });
    C next[kTaps - 1];
    unrolled<kTaps - 1>([&](int q) {
      next[q] = __shfl_sync(~0u, team.lane == 0 ? after[q] : here.g[q], (team.lane + 1) & (walk.lanes - 1), walk.lanes);
      after[q] = here.g[q];
    });
    put_gradients(team, place, here.g, next, taps);
  }
  if (team.part == 0 && team.lane == 0) {
    const Place place = team.place(0);
    constexpr C kNone[L::kEach] = {};
    put_gradients(team, {place.at - L::kEach, place.t - L::kEach}, kNone, after, taps);
  }
  team_sum(sums, static_cast<unsigned>(walk.lanes));
  if (team.lane > 0 || !team.is_active) return;
  C* const of_taps = p.sums(team.part, team.sample) + team.channel * p.s.width;
  unrolled<kTaps>([&](int q) {
    if (q < team.width) of_taps[team.width - 1 - q] = sums[q];
  });
  p.sums(team.part, team.sample)[p.s.channels * p.s.width + team.channel] = sums[kTaps];
}

template <int kTaps, typename T>
void convolve_by_teams(Call& call, const Problem<T>& p, bool backward) {
  using L = Chunk<kTaps, T>;
  bool are_packs = true;
  const T* const arrays[] = {p.x, p.dout, p.out, p.dx};
  for (const T* array : arrays) are_packs &= is_aligned<L::kPack>(array);
  const Walk walk(p.s, L::kEach, backward ? 0 : L::kAtOnce, backward ? p.parts : 0, are_packs);
  launch(call, backward ? backward_kernel<kTaps, T> : forward_kernel<kTaps, T>, walk.blocks(), kThreads, 0, p, walk);
}

}  // namespace msops::causal_conv1d
#endif
