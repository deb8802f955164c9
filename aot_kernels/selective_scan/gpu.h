// On the GPU a block takes kChannels channels of a group through a part of the chunks. A team of neighbouring lanes
// holds the states of a channel, kOfLane of them each, and walks along the steps, so that decays are computed once and
// no thread waits for another. What the steps need comes through shared memory, a chunk at a time.
#pragma once

#include "../common/gpu/unrolled.h"
#include "../common/launch.h"
#include "problem.h"

namespace msops::selective_scan {

template <int lanes, typename T>
struct Shape {
  static constexpr int kLanes = lanes, kOfLane = 4, kStates = kLanes * kOfLane;
  static constexpr int kRows = kChannels<T>, kThreads = kRows * kLanes, kWarps = kThreads / 32;
  // Rows of shared memory begin at different banks for the threads of a warp that read at once.
  static constexpr int kPitch = kLanes > 1 ? kStates + 4 : kStates, kRow = kChunk + 4;
  static_assert(kStates <= kWidth && kThreads % 32 == 0, "a block has whole warps");
};

// Shared is B_t and C_t of a chunk, with the states side by side.
template <typename S, typename C>
struct Shared {
  C inputs[kChunk][S::kPitch], outputs[kChunk][S::kPitch];
};

// Place says what a thread works on.
template <typename S, typename T>
struct Place {
  Block block;
  int row, lane;                // row: of the block's channels; lane: of the team
  int part;                     // of the chunks
  int64_t channel, begin, end;  // begin, end: chunks
  bool is_inside;               // whether there is such a channel

  __device__ explicit Place(const Problem<T>& all)
      : block(all.s, blockIdx.x),
        row(static_cast<int>(threadIdx.x) / S::kLanes),
        lane(static_cast<int>(threadIdx.x) % S::kLanes),
        part(static_cast<int>(blockIdx.z)),
        channel(block.channel + row),
        begin(part_begin<int64_t>(all.s.chunks(), blockIdx.z, gridDim.z)),
        end(part_begin<int64_t>(all.s.chunks(), blockIdx.z + 1, gridDim.z)),
        is_inside(row < block.channels) {}

  // Returns how many of the lane's states there are, from its first one on, if the block's begin with `state`.
  __device__ int count(const Problem<T>& all, int64_t state) const {
    const int64_t left = all.s.states - state - lane * S::kOfLane;
    return !is_inside || left <= 0 ? 0 : left < S::kOfLane ? static_cast<int>(left) : S::kOfLane;
  }
};

// Returns the number of steps of a chunk.
__device__ __forceinline__ int steps_of(const Sizes& s, int64_t chunk) {
  const int64_t left = s.steps - chunk * kChunk;
  return left < kChunk ? static_cast<int>(left) : kChunk;
}

// Calls f(row, step, Constant<W>{}) for packs of W neighbouring steps that tile kRows rows of a chunk.
template <typename S, typename T, typename F>
__device__ __forceinline__ void for_packs(bool are_packs, const F& f) {
  if (are_packs) {
    constexpr int W = kPackWidth<T>, kOfRow = kChunk / W;
    for (int i = static_cast<int>(threadIdx.x); i < S::kRows * kOfRow; i += S::kThreads)
      f(i / kOfRow, i % kOfRow * W, Constant<W>{});
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < S::kRows * kChunk; i += S::kThreads)
      f(i / kChunk, i % kChunk, Constant<1>{});
  }
}

// Loads W numbers, or zeros.
template <int W, typename T>
__device__ __forceinline__ void load_or_zeros(Compute<T> (&numbers)[W], const T* from, bool is_inside) {
  Pack<T, W> pack = {};
  if (is_inside) pack = load<W>(from);
  for (int k = 0; k < W; ++k) numbers[k] = is_inside ? Compute<T>(pack.values[k]) : Compute<T>(0);
}

// Loads dt and dt u of the block's rows and a chunk. What does not exist is zero, so that it changes nothing.
// Calls more(row, t, at, is_inside, width) for each pack, whose first step is at `at`.
template <typename S, typename T, typename Memory, typename More>
__device__ __forceinline__ void load_steps(const Problem<T>& all, const Place<S, T>& place, bool are_packs,
                                           int64_t chunk, Memory& memory, const More& more) {
  using C = Compute<T>;
  const int count = steps_of(all.s, chunk);
  for_packs<S, T>(are_packs, [&](int row, int t, auto width) {
    constexpr int W = width;
    const bool is_inside = row < place.block.channels && t < count;
    const int64_t channel = place.block.channel + row, at = all.row(place.block.sample, channel) + chunk * kChunk + t;
    C u[W], delta[W];
    load_or_zeros<W>(u, all.u + at, is_inside);
    load_or_zeros<W>(delta, all.delta + at, is_inside);
    more(row, t, at, is_inside, width);
    const C bias = is_inside ? all.bias[channel] : C(0);
    for (int k = 0; k < W; ++k) {
      const C dt = is_inside ? all.steps.dt(delta[k] + bias) : C(0);
      memory.dt[row][t + k] = dt;
      memory.terms[row][t + k] = dt * u[k];
    }
  });
}

// Returns an element of `ends` of the thread's channel.
template <typename S, typename T>
__device__ __forceinline__ Compute<T>& end_of(const Problem<T>& all, const Place<S, T>& place, int64_t part,
                                              int64_t n) {
  return all
      .ends[((part * all.s.samples + place.block.sample) * all.s.channels + place.channel) * (all.s.states + 1) + n];
}

// Loads B_t and C_t of the states from `state` on. Steps and states that do not exist are zeros. Eight lanes read
// neighbouring steps of a state, and four of these states' runs are written without bank conflicts.
template <typename S, typename T, typename C>
__device__ __forceinline__ void load_shared(const Problem<T>& all, const Block& block, int64_t chunk, int64_t state,
                                            Shared<S, C>& shared) {
  constexpr int kRun = 8;
  const int count = steps_of(all.s, chunk);
  for (int i = static_cast<int>(threadIdx.x); i < S::kStates * kChunk; i += S::kThreads) {
    const int t = i / (kRun * S::kStates) * kRun + i % kRun, n = i / kRun % S::kStates;
    const bool is_inside = t < count && state + n < all.s.states;
    const int64_t at = all.row_of_state(block.sample, block.group, state + n) + chunk * kChunk + t;
    shared.inputs[t][n] = is_inside ? C(all.inputs[at]) : C(0);
    shared.outputs[t][n] = is_inside ? C(all.outputs[at]) : C(0);
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
                                            C (&decays)[S::kOfLane]) {
  const int count = place.count(all, state);
  const int64_t at = place.channel * all.s.states + state + place.lane * S::kOfLane;
  for (int j = 0; j < S::kOfLane; ++j) decays[j] = j < count ? all.A[at + j] * Decay<C>::scale() : C(0);
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
template <typename T, typename F>
void with_shape(const Sizes& s, const F& f) {
  if constexpr (sizeof(T) < 8) {
    if (s.states <= 4) return f(Shape<1, T>{});
    if (s.states <= 8) return f(Shape<2, T>{});
  }
  f(Shape<4, T>{});
}

}  // namespace msops::selective_scan
