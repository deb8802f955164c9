// On the GPU a block takes kChannels channels of a group through a part of the chunks. A team of neighbouring lanes
// holds the states of kEach channels, kOfLane of each in a lane, and walks along the steps, so that decays are computed
// once and no thread waits for another. What the steps need comes through shared memory, a tile at a time.
#pragma once

#include "../common/gpu/unrolled.h"
#include "../common/launch.h"
#include "problem.h"

namespace msops::selective_scan {

template <int lanes, bool kPairs, typename T>
struct Shape {
  static constexpr int kLanes = lanes, kOfLane = 4, kStates = kLanes * kOfLane, kRows = kChannels<T>;
  // With two channels, a lane reads B_t and C_t once for both, and adds up their dB_t and dC_t itself. The forward pass
  // has one: twice as many warps wait less.
  static constexpr int kEach = kPairs && kRows * kLanes > 64 ? 2 : 1, kTeams = kRows / kEach;
  static constexpr int kThreads = kTeams * kLanes, kWarps = kThreads / 32;
  // Rows of shared memory begin at different banks for the threads of a warp that read at once.
  static constexpr int kPitch = kLanes > 1 ? kStates + 4 : kStates;
  static_assert(kStates <= kWidth && kThreads % 32 == 0, "a block has whole warps");
};

// Shared is B_t and C_t of kSteps steps, with the states side by side.
template <typename S, typename C, int kSteps>
struct Shared {
  C inputs[kSteps][S::kPitch], outputs[kSteps][S::kPitch];
};

// Place says what a thread works on. The i-th channel of its team is in row team + i * kTeams of the block's channels.
template <typename S, typename T>
struct Place {
  Block block;
  int team, lane;      // lane: of the team
  int part;            // of the chunks
  int64_t begin, end;  // chunks

  __device__ explicit Place(const Problem<T>& all)
      : block(all.s, blockIdx.x),
        team(static_cast<int>(threadIdx.x) / S::kLanes),
        lane(static_cast<int>(threadIdx.x) % S::kLanes),
        part(static_cast<int>(blockIdx.z)),
        begin(part_begin<int64_t>(all.s.chunks(), blockIdx.z, gridDim.z)),
        end(part_begin<int64_t>(all.s.chunks(), blockIdx.z + 1, gridDim.z)) {}

  __device__ int row(int i) const { return team + i * S::kTeams; }
  __device__ bool has(int i) const { return row(i) < block.channels; }
  __device__ int64_t channel(int i) const { return block.channel + row(i); }

  // Calls f(i, j, channel, n) for each state n of a channel that the lane holds as its (i, j)-th one, if those of the
  // block begin with `state`.
  template <typename F>
  __device__ void for_states(const Sizes& s, int64_t state, const F& f) const {
    unrolled<S::kEach, S::kOfLane>([&](int i, int j) {
      const int64_t n = state + lane * S::kOfLane + j;
      if (has(i) && n < s.states) f(i, j, channel(i), n);
    });
  }
};

// Spot is where a pack of steps of a channel begins: in shared memory, and `at` in arrays (B, D, L).
struct Spot {
  int row, t;
  bool is_inside;
  int64_t channel, at;
};

constexpr int kRow = kChunk + 4;  // the pitch of rows of a chunk in shared memory

// Returns the number of steps of a chunk.
__device__ __forceinline__ int steps_of(const Sizes& s, int64_t chunk) {
  const int64_t left = s.steps - chunk * kChunk;
  return left < kChunk ? static_cast<int>(left) : kChunk;
}

// Packs are the packs of several arrays at one place.
template <typename T, int W, int kArrays>
struct Packs {
  Pack<T, W> of[kArrays];

  __device__ void get(int array, Compute<T> (&numbers)[W]) const {
    for (int k = 0; k < W; ++k) numbers[k] = Compute<T>(of[array].values[k]);
  }
};

// Loads packs of arrays at one place, or zeros where it is not inside or the array is absent, which is a null pointer.
template <int W, typename T, typename... Pointers>
__device__ __forceinline__ Packs<T, W, 1 + sizeof...(Pointers)> load_packs(bool is_inside, int64_t at, const T* first,
                                                                           Pointers... others) {
  const T* const pointers[] = {first, others...};
  Packs<T, W, 1 + sizeof...(Pointers)> packs = {};
  unrolled<1 + sizeof...(Pointers)>([&](int k) {
    if (is_inside && pointers[k]) packs.of[k] = load<W>(pointers[k] + at);
  });
  return packs;
}

// Calls use(spot, packs, Constant<W>{}) for packs of W neighbouring steps that tile kRows rows of a chunk, where
// packs = load(spot, Constant<W>{}). Several packs are loaded before the first use, so that the loads overlap.
template <typename S, typename T, int W, typename Load, typename Use>
__device__ __forceinline__ void for_packs(const Place<S, T>& place, const Sizes& s, int64_t chunk, const Load& load,
                                          const Use& use) {
  constexpr unsigned kOfRow = kChunk / W, kAtOnce = W == 8 ? 2 : 4;
  static_assert(S::kRows * kOfRow % (kAtOnce * S::kThreads) == 0, "threads have as many packs");
  const int count = steps_of(s, chunk);
  const auto spot = [&](unsigned i) {
    const int row = static_cast<int>(i / kOfRow), t = static_cast<int>(i % kOfRow * W);
    const int64_t channel = place.block.channel + row;
    return Spot{row, t, row < place.block.channels && t < count, channel,
                (place.block.sample * s.channels + channel) * s.steps + chunk * kChunk + t};
  };
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < S::kRows * kOfRow; i += kAtOnce * S::kThreads) {
    decltype(load(spot(i), Constant<W>{})) packs[kAtOnce];
    unrolled<kAtOnce>([&](int k) { packs[k] = load(spot(i + k * S::kThreads), Constant<W>{}); });
    unrolled<kAtOnce>([&](int k) { use(spot(i + k * S::kThreads), packs[k], Constant<W>{}); });
  }
}
template <typename S, typename T, typename Load, typename Use>
__device__ __forceinline__ void for_packs(bool are_packs, const Place<S, T>& place, const Sizes& s, int64_t chunk,
                                          const Load& load, const Use& use) {
  if (are_packs) {
    for_packs<S, T, kPackWidth<T>>(place, s, chunk, load, use);
  } else {
    for_packs<S, T, 1>(place, s, chunk, load, use);
  }
}

// Stores dt and dt u of a pack. What does not exist is zero, so that it changes nothing.
template <int W, typename T, typename Memory>
__device__ __forceinline__ void put_steps(const Problem<T>& all, int row, int t, bool is_inside, Compute<T> bias,
                                          const Packs<T, W, 2>& packs, Memory& memory) {
  using C = Compute<T>;
  C u[W], x[W];
  packs.get(0, u);
  packs.get(1, x);
  for (int k = 0; k < W; ++k) x[k] += bias;
  all.steps.to_dt(x);
  Pack<C, W> dt, terms;
  for (int k = 0; k < W; ++k) {
    dt.values[k] = is_inside ? x[k] : C(0);
    terms.values[k] = dt.values[k] * u[k];
  }
  store(memory.dt[row] + t, dt);
  store(memory.terms[row] + t, terms);
}

// Loads dt and dt u of the block's rows and a chunk.
template <typename S, typename T, typename Memory>
__device__ __forceinline__ void load_steps(const Problem<T>& all, const Place<S, T>& place, bool are_packs,
                                           int64_t chunk, Memory& memory) {
  for_packs(
      are_packs, place, all.s, chunk,
      [&](const Spot& spot, auto width) { return load_packs<width>(spot.is_inside, spot.at, all.u, all.delta); },
      [&](const Spot& spot, const auto& packs, auto width) {
        const Compute<T> bias = spot.is_inside ? all.bias[spot.channel] : Compute<T>(0);
        put_steps<width>(all, spot.row, spot.t, spot.is_inside, bias, packs, memory);
      });
}

// Returns an element of `ends`.
template <typename T>
__device__ __forceinline__ Compute<T>& end_of(const Problem<T>& all, int64_t part, int64_t sample, int64_t channel,
                                              int64_t n) {
  return all.ends[((part * all.s.samples + sample) * all.s.channels + channel) * (all.s.states + 1) + n];
}

// PackOfShared is one of the packs of B and C that a thread moves to shared memory: W steps of a state. Lanes take kRun
// neighbouring packs of each of several states, so that they write without bank conflicts.
template <typename S, int W, int kSteps>
struct PackOfShared {
  static constexpr unsigned kRun = W == 1 ? 8 : 2, kOfRun = kRun * S::kStates, kPacks = 2 * S::kStates * (kSteps / W);
  static constexpr int kOfThread = (kPacks + S::kThreads - 1) / S::kThreads;
  unsigned t, n;
  bool is_output, exists;

  __device__ explicit PackOfShared(int index) {
    const unsigned i = index * S::kThreads + threadIdx.x;
    const unsigned of_all = S::kThreads % (2 * kOfRun) == 0 ? threadIdx.x : i;  // what all packs of the thread have
    t = (i / (2 * kOfRun) * kRun + i % kRun) * W;
    n = of_all / kRun % S::kStates;
    is_output = of_all / kOfRun % 2;
    exists = i < kPacks;
  }
  // Loads the pack, or zeros for steps and states that do not exist.
  template <typename T>
  __device__ Pack<T, W> load(const Problem<T>& all, const Block& block, int64_t first_step, int64_t state) const {
    const int64_t at = all.row_of_state(block.sample, block.group, state + n) + first_step + t;
    const bool is_inside = exists && first_step + t < all.s.steps && state + n < all.s.states;
    Pack<T, W> pack = {};
    if (is_inside) pack = msops::load<W>((is_output ? all.outputs : all.inputs) + at);
    return pack;
  }
  template <typename T>
  __device__ void store(const Pack<T, W>& pack, Shared<S, Compute<T>, kSteps>& shared) const {
    if (!exists) return;
    Compute<T>* const to = &(is_output ? shared.outputs : shared.inputs)[t][n];
    for (int k = 0; k < W; ++k) to[k * S::kPitch] = Compute<T>(pack.values[k]);
  }
};

// Loads B_t and C_t of a chunk and of the states from `state` on.
template <int W, typename S, typename T>
__device__ __forceinline__ void load_shared(const Problem<T>& all, const Place<S, T>& place, int64_t chunk,
                                            int64_t state, Shared<S, Compute<T>, kChunk>& shared) {
  using Each = PackOfShared<S, W, kChunk>;
  constexpr int kAtOnce = Each::kOfThread < 4 ? Each::kOfThread : 4;
#pragma unroll 1
  for (int i = 0; i < Each::kOfThread; i += kAtOnce) {
    Pack<T, W> packs[kAtOnce];
    unrolled<kAtOnce>([&](int k) { packs[k] = Each(i + k).load(all, place.block, chunk * kChunk, state); });
    unrolled<kAtOnce>([&](int k) { Each(i + k).store(packs[k], shared); });
  }
}
template <typename S, typename T>
__device__ __forceinline__ void load_shared(const Problem<T>& all, const Place<S, T>& place, bool are_packs,
                                            int64_t chunk, int64_t state, Shared<S, Compute<T>, kChunk>& shared) {
  if (are_packs) {
    load_shared<kPackWidth<T>>(all, place, chunk, state, shared);
  } else {
    load_shared<1>(all, place, chunk, state, shared);
  }
}

// Returns a state after a part that computes `end` from zeros. The growth over a part may be infinite where the state
// before it is 0.
template <typename C>
__device__ __forceinline__ C after_part(C exponent, C before, C end) {
  return before == 0 ? end : Decay<C>::of(exponent) * before + end;
}

// Loads the lane's A, times what Decay wants.
template <typename S, typename T, typename C>
__device__ __forceinline__ void load_decays(const Problem<T>& all, const Place<S, T>& place, int64_t state,
                                            C (&decays)[S::kEach][S::kOfLane]) {
  unrolled<S::kEach, S::kOfLane>([&](int i, int j) { decays[i][j] = 0; });
  place.for_states(all.s, state, [&](int i, int j, int64_t channel, int64_t n) {
    decays[i][j] = all.A[channel * all.s.states + n] * Decay<C>::scale();
  });
}

// Adds each value up over kLanes lanes at a distance of kStride. Each lane keeps kValues / kLanes of the sums, at the
// beginning of `values`: the first lane the first ones. With fewer values than lanes, several lanes keep the same sum.
template <int kLanes, int kStride = 1, int kValues, typename C>
__device__ __forceinline__ void scatter_sums(C (&values)[kValues]) {
  int left = kValues;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const bool is_upper = threadIdx.x / kStride & distance;
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int k = 0; k < kValues / 2; ++k) {
        if (k >= left) continue;
        const C given = is_upper ? values[k] : values[k + left], kept = is_upper ? values[k + left] : values[k];
        values[k] = kept + __shfl_xor_sync(~0u, given, distance * kStride);
      }
    } else {
      values[0] += __shfl_xor_sync(~0u, values[0], distance * kStride);
    }
  }
}

// Returns whether packs tile the rows of all these arrays, of which absent ones are null.
template <typename T>
bool are_packs(const Sizes& s, std::initializer_list<const T*> pointers) {
  bool fits = s.steps % kPackWidth<T> == 0;
  for (const T* pointer : pointers) fits &= is_aligned<kPackWidth<T>>(pointer);
  return fits;
}

// Calls f(Shape{}) with a shape of blocks: as many lanes as a channel's states need, at most four.
template <bool kPairs, typename T, typename F>
void with_shape(const Sizes& s, const F& f) {
  if constexpr (sizeof(T) < 8) {
    if (s.states <= 4) return f(Shape<1, kPairs, T>{});
    if (s.states <= 8) return f(Shape<2, kPairs, T>{});
  }
  f(Shape<4, kPairs, T>{});
}

}  // namespace msops::selective_scan
