// This time loop is for all other sizes: each round is a product by cuBLAS and a kernel that advances the units, all
// launched from here.
#pragma once

#include "../common/gpu/cublas.h"
#include "../common/gpu/mma.h"
#include "../common/parallel.h"
#include "loop.h"

namespace msops::lltm {

// Round advances N neighbouring units by a round's sums; round -1 is the start.
template <int N, typename Loop>
struct Round {
  using T = typename Loop::Element;
  using C = Compute<T>;
  using State = typename Loop::State;
  Loop loop;
  int64_t round;
  C* states[2];         // (batch, hidden)
  T* published;         // (batch, segments, hidden)
  bool rounds = false;  // to TF32, before it is published

  __device__ __forceinline__ void start(int64_t sample, int64_t unit) const {
    State state[N];
    for (int j = 0; j < N; ++j) state[j] = loop.begin(sample, unit + j);
    end(loop.start(state, sample, unit, publish_to(sample, unit)), state, sample, unit);
  }
  // Before is what a round of the units reads besides their sums.
  struct Before {
    typename Loop::template Inputs<N> in;
    Pack<C, N> h, c;
  };
  __device__ __forceinline__ Before before(int64_t sample, int64_t unit) const {
    const int64_t at = sample * loop.hidden + unit;
    return {loop.template read<N>(round, sample, unit), load<N>(states[0] + at), load<N>(states[1] + at)};
  }
  __device__ __forceinline__ void finish(const Before& before, int64_t sample, int64_t unit,
                                         const C (&sums)[Loop::kTiles][N]) const {
    State state[N];
    for (int j = 0; j < N; ++j) state[j] = {before.h.values[j], before.c.values[j]};
    end(loop.finish(round, before.in, sums, state, publish_to(sample, unit)), state, sample, unit);
  }

 private:
  __device__ __forceinline__ auto publish_to(int64_t sample, int64_t unit) const {
    T* const to = published + sample * Loop::kSegments * loop.hidden + unit;
    return [to, units = loop.hidden, rounds = rounds](int segment, Pack<T, N> pack) {
      if constexpr (std::is_same<T, float>::value)
        if (rounds)
          for (int j = 0; j < N; ++j) pack.values[j] = __uint_as_float(cvt_rna_tf32(pack.values[j]));
      store_at_once(to + segment * units, pack);
    };
  }
  __device__ __forceinline__ void end(const typename Loop::template Update<N>& update, const State (&state)[N],
                                      int64_t sample, int64_t unit) const {
    const int64_t at = sample * loop.hidden + unit;
    loop.write(update, sample, unit);
    Pack<C, N> h, c;
    for (int j = 0; j < N; ++j) h.values[j] = state[j].h, c.values[j] = state[j].c;
    store_at_once(states[0] + at, h);
    store_at_once(states[1] + at, c);
    if (round + 1 == loop.steps)
      for (int j = 0; j < N; ++j) loop.end(state[j], sample, unit + j);
  }
};

constexpr int kRoundThreads = 128;

// Runs a round from sums (batch, tiles, hidden), or the start. A block has units of one sample, so that most of the
// indices are the whole block's.
template <bool kStarts, int N, typename Loop>
__global__ void __launch_bounds__(kRoundThreads)
    round_kernel(const Round<N, Loop> body, const Compute<typename Loop::Element>* sums) {
  const int64_t sample = blockIdx.x, unit = (static_cast<int64_t>(blockIdx.y) * kRoundThreads + threadIdx.x) * N;
  const int64_t units = body.loop.hidden;
  if (unit >= units) return;
  if constexpr (kStarts) {
    body.start(sample, unit);
  } else {
    Compute<typename Loop::Element> of_units[Loop::kTiles][N];
    for (int tile = 0; tile < Loop::kTiles; ++tile) {
      const auto pack = load<N>(sums + (sample * Loop::kTiles + tile) * units + unit);
      for (int j = 0; j < N; ++j) of_units[tile][j] = pack.values[j];
    }
    body.finish(body.before(sample, unit), sample, unit, of_units);
  }
}

template <bool kStarts, int N, typename Loop>
void run_round(Call& call, const Round<N, Loop>& body, const Compute<typename Loop::Element>* sums) {
  const int64_t batch = body.loop.batch, blocks_of_sample = (body.loop.hidden - 1) / (kRoundThreads * N) + 1;
  launch(call, round_kernel<kStarts, N, Loop>, {batch, blocks_of_sample}, kRoundThreads, 0, body, sums);
}

template <int N, typename Loop>
void run_in_steps(Call& call, const Loop& loop, Compute<typename Loop::Element>* scratch, bool allow_tf32) {
  using T = typename Loop::Element;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments;
  const int64_t all = loop.batch * loop.hidden;
  Compute<T>* const sums = scratch + 2 * all;
  Round<N, Loop> body{loop, -1, {scratch, scratch + all}, reinterpret_cast<T*>(sums + kTiles * all)};
  run_round<true>(call, body, sums);
  if (loop.steps == 0) return;
  const bool done = Cublas::with_handle(call.stream(), [&](const Cublas& cublas, void* handle) {
    for (body.round = 0; loop.steps > body.round && call.ok(); ++body.round) {
      if (!cublas.multiply(handle, kTiles != 1, kTiles * loop.hidden, loop.batch, kSegments * loop.hidden, loop.weight,
                           body.published, sums, allow_tf32))
        return false;
      run_round<false>(call, body, sums);
    }
    return true;
  });
  call.require(done, kLaunchFailed, "cuBLAS, which this size needs, is missing or failed");
}

template <typename Loop>
void run_in_steps(Call& call, const Loop& loop, Compute<typename Loop::Element>* scratch, bool allow_tf32) {
  using T = typename Loop::Element;
  constexpr int kWidest = kPackWidth<Compute<T>>;  // packs of the sums, too, have up to 16 bytes
  loop.with_arrays([&](std::initializer_list<const T*> arrays) {
    with_width<T, kWidest>(!is_aligned<kWidest>(scratch), loop.hidden, arrays,
                           [&](auto width) { run_in_steps<width>(call, loop, scratch, allow_tf32); });
  });
}

}  // namespace msops::lltm
