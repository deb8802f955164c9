// This header convolves with up to kFew taps on the GPU. Arrays are cut into chunks of some packs, from their start, so
// that chunks are aligned whatever the length of a row is. In each of its turns, a team of up to 32 threads takes as
// many neighbouring chunks of a row; the backward pass begins with the last ones. Some turns have their chunks in
// flight at once.
//
// Most turns are whole (kWhole): the team is a warp, all of its chunks are in the row, and packs are aligned. Then
// offsets are constant, and nothing is checked but for the steps before and after the row. In other turns each chunk
// finds out where it is, and those that are partly outside the row are read and written by elements.
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
  static constexpr int kTurn = 32 * kEach;              // elements of a whole turn
  static constexpr int kAtOnce = kBytes <= 32 ? 4 : 1;  // chunks of a thread in flight
  static constexpr int kAtOnceBackward = kBytes <= 32 && kTaps == 4 ? 2 : 1;
};

// A Walk says how teams share the chunks of all rows. A team has so many turns, and a lane takes a chunk in each.
struct Walk {
  int lane_bits = 0, stride;  // stride: elements from turn to turn
  int64_t turns, parts, teams;
  bool are_packs, are_warps;  // are_packs: all arrays begin at packs; are_warps: teams are warps, too

  // Turns are a multiple of `at_once`. Without a number of parts, teams have twice `at_once` turns if they still fill a
  // large GPU.
  Walk(const Sizes& s, int each, int at_once, int64_t parts_, bool are_packs_) : parts(parts_), are_packs(are_packs_) {
    constexpr int64_t kMany = 1 << 16;  // teams of `at_once` turns
    const int64_t chunks = s.length % each == 0 ? s.length / each : (s.length - 1) / each + 2;
    while (lane_bits < 5 && lanes() < chunks) ++lane_bits;
    stride = each << lane_bits;
    are_warps = are_packs && lane_bits == 5;
    const int64_t groups = (std::max<int64_t>(1, chunks) - 1) / (lanes() * at_once) + 1;
    if (parts == 0) parts = s.rows() * groups >= kMany ? (groups + 1) / 2 : groups;
    turns = ((groups - 1) / parts + 1) * at_once;
    teams = s.rows() * parts;
  }
  MSOPS_BOTH int lanes() const { return 1 << lane_bits; }
  int64_t blocks() const {
    const int64_t of_block = kThreads >> lane_bits;
    return teams / of_block + (teams % of_block > 0);
  }
};

// Place is where a chunk is, relative to its row.
struct Place {
  int64_t at, t;  // of the chunk's first element, in the array and in the row

  __device__ Place operator+(int64_t n) const { return {at + n, t + n}; }
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
      if constexpr (kOfPack == 4) {  // nvcc would move other loads to where their elements are used
        ld_global_v4(*reinterpret_cast<uint32_t (*)[4]>(words + i * 4), from + i * kWidth);
      } else {
        const Pack<T, kWidth> pack = load<kWidth>(from + i * kWidth);
        memcpy(words + i * kOfPack, &pack, sizeof pack);
      }
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
  int64_t row, channel, sample, part;
  Place begin;  // of the lane's chunk in the first turn

  __device__ Team(const Problem<T>& problem, const Walk& of)
      : p(problem), walk(of), lane(threadIdx.x & (of.lanes() - 1)), width(static_cast<int>(problem.s.width)) {
    const int64_t team = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> walk.lane_bits;
    is_active = team < walk.teams;
    row = is_active ? team / walk.parts : 0, part = is_active ? team - row * walk.parts : 0;
    sample = row / p.s.channels, channel = row - sample * p.s.channels;
    const int64_t first = row * p.s.length / L::kEach;  // of the array's chunks, the first that has elements of the row
    const int64_t at = (first + lane) * L::kEach + part * walk.turns * walk.stride;
    begin = {at, is_active ? at - row * p.s.length : p.s.length + L::kHalo};  // without a row, it is after all steps
  }

  __device__ bool is_in_row(const Place& place) const { return place.has(0, L::kEach, p.s.length); }
  __device__ bool is_outside(const Place& place) const { return place.t >= p.s.length || place.t <= -L::kEach; }
  // Returns whether some turns, of which the first is given, are whole.
  __device__ bool are_whole(const Place& first, int turns) const {
    const int64_t last = p.s.length - (turns - 1) * L::kTurn - L::kEach;  // the last place that such turns begin at
    return __all_sync(~0u, walk.are_warps & (first.t >= 0) & (first.t <= last));
  }
  __device__ void read_taps(C (&taps)[kTaps]) const {
    p.weight.are_float ? read_taps_of<float>(taps) : read_taps_of<T>(taps);
  }
  // Reads all taps before it converts one.
  template <typename W>
  __device__ void read_taps_of(C (&taps)[kTaps]) const {
    const W* const last = static_cast<const W*>(p.weight.data) + channel * width + width - 1;
    W weights[kTaps];
    unrolled<kTaps>([&](int q) { weights[q] = q < width ? last[-q] : W(0.f); });
    unrolled<kTaps>([&](int q) { taps[q] = C(weights[q]); });
  }
  // Returns the chunk's elements of an array; those outside the row are 0.
  template <bool kWhole>
  __device__ Own own(const T* from, const Place& place) const {
    Own result;
    if (kWhole || (walk.are_packs && is_in_row(place))) {
      result.read_packs(from + place.at);
    } else if (!is_outside(place)) {
      unrolled<L::kEach>([&](int e) {
        if (place.has(e, 1, p.s.length)) result.set(e, from[place.at + e]);
      });
    }
    return result;
  }
  // Returns the chunk's elements of x, and those of the initial state before the row.
  template <bool kWhole>
  __device__ Own own_x(const Place& place) const {
    Own result = own<kWhole>(p.x, place);
    if (!kWhole) add_state(result, place.t);
    return result;
  }
  // Returns the elements of x before the chunk, unless that is outside the row. kInRow says that they are in the row
  // and aligned.
  template <bool kInRow>
  __device__ Halo halo(const Place& place) const {
    Halo result;
    if (kInRow || (walk.are_packs && place.has(-L::kHalo, L::kHalo, p.s.length))) {
      result.read_packs(p.x + place.at - L::kHalo);
    } else if (!is_outside(place)) {
      unrolled<L::kHalo>([&](int e) {
        if (place.has(e - L::kHalo, 1, p.s.length)) result.set(e, p.x[place.at - L::kHalo + e]);
      });
      add_state(result, place.t - L::kHalo);
    }
    return result;
  }
  // Reads the elements of x before the chunks of some turns. In whole turns, only those of the first may be outside the
  // row; they are read last, since nvcc moves loads after their branches.
  template <bool kWhole, int kTurns>
  __device__ void read_halos(Halo (&halos)[kTurns], const Place& first) const {
    unrolled<kTurns - 1>([&](int i) { halos[i + 1] = halo<kWhole>(first + (i + 1) * L::kTurn); });
    halos[0] = halo<false>(first);
  }
  // Sets the elements of a run before the first step from the initial state. The run begins at step t.
  template <typename Run>
  __device__ void add_state(Run& run, int64_t t) const {
    const int64_t history = p.s.history();
    if (t >= 0 || !p.initial_state) return;
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
    Compute<T> sum = bias + taps[0] * before(e, 0);
    unrolled<kTaps>([&](int q) {
      if (q > 0 && q < width) sum += taps[q] * before(e, q);
    });
    return sum;
  }
};

// Stores a chunk's elements that are in the row.
template <bool kWhole, int kTaps, typename T>
__device__ __forceinline__ void put_chunk(const Team<kTaps, T>& team, T* to, const Place& place,
                                          const Compute<T> (&values)[Chunk<kTaps, T>::kEach]) {
  using L = Chunk<kTaps, T>;
  if (kWhole || (team.walk.are_packs && team.is_in_row(place))) {
    unrolled<L::kEach / L::kPack>([&](int i) {
      Compute<T> pack[L::kPack];
      unrolled<L::kPack>([&](int j) { pack[j] = values[i * L::kPack + j]; });
      store_at_once(to + place.at + i * L::kPack, rounded_pack<T>(pack));
    });
  } else if (!team.is_outside(place)) {
    unrolled<L::kEach>([&](int e) {
      if (place.has(e, 1, team.p.s.length)) assign(to[place.at + e], values[e]);
    });
  }
}

// Calls turns(Constant<kWhole>, Constant<kTurns>, place) for a team's turns that have steps of the row: for `kAtOnce`
// at a time where they are whole, else for one. The place is that of the first turn.
template <int kAtOnce, bool kBackward, int kTaps, typename T, typename Turns>
__device__ __forceinline__ void for_turns(const Team<kTaps, T>& team, const Turns& turns) {
  const int64_t stride = team.walk.stride;
  Place place = team.begin + (kBackward ? (team.walk.turns - kAtOnce) * stride : 0);
#pragma unroll 1
  for (int64_t left = team.walk.turns; left > 0; left -= kAtOnce) {
    if (team.are_whole(place, kAtOnce)) {
      turns(Constant<1>{}, Constant<kAtOnce>{}, place);
    } else {
      Place each = place + (kBackward ? (kAtOnce - 1) * stride : 0);
#pragma unroll 1
      for (int i = 0; i < kAtOnce; ++i, each = each + (kBackward ? -stride : stride)) {
        if (__all_sync(~0u, each.t >= team.p.s.length)) continue;
        if (kAtOnce > 1 && team.are_whole(each, 1)) {
          turns(Constant<1>{}, Constant<1>{}, each);
        } else {
          turns(Constant<0>{}, Constant<1>{}, each);
        }
      }
    }
    place = place + (kBackward ? -kAtOnce : kAtOnce) * stride;
  }
}

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
