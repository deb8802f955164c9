// The chunks of rows on the GPU, which of them the threads of a team take, and how they read and write them. Arrays are
// cut into chunks of some packs, from their start, so that chunks are aligned whatever the length of a row is. In each
// of its turns, a team of up to 32 threads takes as many neighbouring chunks of a row; the backward pass begins with
// the last ones. Some turns have their chunks in flight at once.
//
// Most turns are whole (kWhole): the team is a warp, all of its chunks are in the row, and packs are aligned. Then
// offsets are constant, and nothing is checked but for the steps before and after the row. In other turns each chunk
// finds out where it is, and those that are partly outside the row are read and written by elements.
#pragma once

#ifdef __CUDACC__
#include <algorithm>

#include "../common/gpu/unrolled.h"
#include "../common/pack.h"
#include "../common/parallel.h"
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

}  // namespace msops::causal_conv1d
#endif
