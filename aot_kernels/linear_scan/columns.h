// A linear recurrence down the columns of each sample, x -> a x + b at each step, as both directions need it. Tensors
// have `samples` x `length` x `columns` elements. A Program names the inputs of a step, the first two of which are a
// and b, and computes its outputs from the state behind it. An input may come from the step before or after: its
// `shift`.
//
//   CPU  a thread walks down some neighbouring columns, whose steps are neighbours in memory
//   GPU  a block walks down a strip of columns, tile by tile. Copies of the next tiles are under way meanwhile. Each
//   warp
//        chains the steps of its part of a tile, then starts from the state before them. Where there are few strips,
//        blocks share a strip's steps in the same way, in two launches.
#pragma once

#include <algorithm>

#include "../common/pack.h"
#include "../common/parallel.h"
#include "../common/scan.h"
#include "../common/scratch.h"
#ifdef __CUDACC__
#include "../common/gpu/cp_async.h"
#include "../common/gpu/unrolled.h"
#endif

namespace msops::linear_scan {

struct Sizes {
  int64_t samples, length, columns;
  bool reverse;  // from the last step to the first

  // Returns in how many parts blocks share a strip's steps on the GPU.
  int64_t parts() const {
    constexpr int64_t kStrip = 32, kEnough = 256, kLeast = 512;  // columns, blocks, and steps of a part
    const int64_t strips = samples * ((columns + kStrip - 1) / kStrip);
    return strips == 0 ? 1 : std::max<int64_t>(1, std::min(kEnough / strips, length / kLeast));
  }
};

// h_t = a_t h_(t-1) + b_t
template <typename T>
struct Forward {
  using C = Compute<T>;
  static constexpr int kInputs = 2, kOutputs = 1;
  static constexpr MSOPS_BOTH int shift(int) { return 0; }
  static constexpr bool kStartsFromH0 = true;

  static MSOPS_BOTH void outputs(C state, const C (&)[2], C (&out)[1]) { out[0] = state; }
};

// From the last step to the first, with the gradients dh: g_t = a_(t+1) g_(t+1) + dh_t, db_t = g_t, da_t = g_t h_(t-1).
template <typename T>
struct Backward {
  using C = Compute<T>;
  static constexpr int kInputs = 3, kOutputs = 2;  // a, dh, h; da, db
  static constexpr MSOPS_BOTH int shift(int input) { return input == 0 ? -1 : input == 2 ? 1 : 0; }
  static constexpr bool kStartsFromH0 = false;

  static MSOPS_BOTH void outputs(C state, const C (&in)[3], C (&out)[2]) {
    out[0] = state * in[2];
    out[1] = state;
  }
};

template <typename Program, typename T>
struct Columns {
  using C = Compute<T>;
  Sizes s;
  const T* in[Program::kInputs];
  T* out[Program::kOutputs];
  const C* h0;  // of each column, or null for zeros
  C* dh0;       // or null
  C* partial;   // on the GPU: a State of each part and column

  // Returns the place of an element of the i-th step of this walk.
  MSOPS_BOTH int64_t at(int64_t sample, int64_t i, int64_t column) const {
    return (sample * s.length + (s.reverse ? s.length - 1 - i : i)) * s.columns + column;
  }
  MSOPS_BOTH C start(int64_t sample, int64_t column) const { return h0 ? h0[sample * s.columns + column] : C(0); }
  MSOPS_BOTH bool has_step(int64_t i) const { return 0 <= i && i < s.length; }

  // Returns an input of the i-th step. Beside the first step and behind the last one are zeros, or h0.
  MSOPS_BOTH C input(int k, int64_t sample, int64_t i, int64_t column) const {
    const int64_t from = i + Program::shift(k);
    return has_step(from) ? C(in[k][at(sample, from, column)]) : from < 0 ? C(0) : start(sample, column);
  }
  // Writes the gradient of h0: the state behind the walk, multiplied by the last step's own a.
  MSOPS_BOTH void finish(int64_t sample, int64_t column, C state) const {
    if (dh0) dh0[sample * s.columns + column] = C(in[0][at(sample, s.length - 1, column)]) * state;
  }
};

template <typename Program, typename T>
struct OnCpu {
  using C = Compute<T>;
  static constexpr int64_t kRun = 64;  // columns of an item
  Columns<Program, T> all;

  int64_t runs() const { return (all.s.columns + kRun - 1) / kRun; }

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t sample = item / runs(), first = item % runs() * kRun;
    const int64_t count = std::min(kRun, all.s.columns - first);
    C states[kRun];
    for (int64_t c = 0; c < count; ++c) states[c] = Program::kStartsFromH0 ? all.start(sample, first + c) : C(0);
    for (int64_t i = 0; i < all.s.length; ++i) {
      if (0 < i && i + 1 < all.s.length) {
        walk(sample, i, first, count, states);
        continue;
      }
      for (int64_t c = 0; c < count; ++c) {
        C in[Program::kInputs], out[Program::kOutputs];
        for (int k = 0; k < Program::kInputs; ++k) in[k] = all.input(k, sample, i, first + c);
        states[c] = in[0] * states[c] + in[1];
        Program::outputs(states[c], in, out);
        for (int k = 0; k < Program::kOutputs; ++k) assign(all.out[k][all.at(sample, i, first + c)], out[k]);
      }
    }
    for (int64_t c = 0; c < count; ++c) all.finish(sample, first + c, states[c]);
  }

 private:
  // Takes a step that has neighbours.
  MSOPS_CPU void walk(int64_t sample, int64_t i, int64_t first, int64_t count, C* states) const {
    const T* in[Program::kInputs];
    T* out[Program::kOutputs];
    for (int k = 0; k < Program::kInputs; ++k) in[k] = all.in[k] + all.at(sample, i + Program::shift(k), first);
    for (int k = 0; k < Program::kOutputs; ++k) out[k] = all.out[k] + all.at(sample, i, first);
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) {
      C values[Program::kInputs], results[Program::kOutputs];
      for (int k = 0; k < Program::kInputs; ++k) values[k] = C(in[k][c]);
      states[c] = values[0] * states[c] + values[1];
      Program::outputs(states[c], values, results);
      for (int k = 0; k < Program::kOutputs; ++k) assign(out[k][c], results[k]);
    }
  }
};

#ifdef __CUDACC__
template <typename Program, typename T>
struct Tile {
  static constexpr int kWarps = 8, kEach = sizeof(T) == 8 ? 4 : 8, kSteps = kWarps * kEach;  // kEach: of a warp
  static constexpr int kOfLane = sizeof(T) == 2 ? 2 : 1, kStrip = 32 * kOfLane;              // columns
  static constexpr int kElements = kSteps * kStrip, kStages = 3;
  static constexpr int kBytes = kStages * Program::kInputs * kElements * static_cast<int>(sizeof(T));
};

// Blocks are (strips of all samples, 1, parts). Copies move kWidth elements at once.
template <int kWidth, typename Program, typename T>
__global__ void __launch_bounds__(kThreads) columns_kernel(const Columns<Program, T> all, bool is_first_pass) {
  using C = Compute<T>;
  using State = LinearStep<C>;
  using L = Tile<Program, T>;
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ State totals[2][L::kWarps][L::kStrip];
  T* const stages = reinterpret_cast<T*>(bytes);  // (stage, input, step, column)
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = static_cast<int>(gridDim.z);
  const int64_t strips = (all.s.columns + L::kStrip - 1) / L::kStrip;
  const int64_t sample = blockIdx.x / strips, first_column = blockIdx.x % strips * L::kStrip;
  const int64_t column = first_column + lane * L::kOfLane;
  const int64_t begin = part_begin<int64_t>(all.s.length, blockIdx.z, parts);
  const int64_t end = part_begin<int64_t>(all.s.length, blockIdx.z + 1, parts);
  const auto is_inside = [&](int v) { return column + v < all.s.columns; };
  const auto partial = [&](int64_t part, int v) -> State& {
    const int64_t columns = all.s.samples * all.s.columns;
    return reinterpret_cast<State*>(all.partial)[part * columns + sample * all.s.columns + column + v];
  };

  const auto copy = [&](int64_t tile, int stage) {
    constexpr int kPacks = L::kStrip / kWidth;
    for (int k = 0; k < (is_first_pass ? 2 : Program::kInputs); ++k)
      for (int i = static_cast<int>(threadIdx.x); i < L::kSteps * kPacks; i += kThreads) {
        const int step = i / kPacks, at = i % kPacks * kWidth;
        const int64_t from = begin + tile * L::kSteps + step + Program::shift(k), c = first_column + at;
        const bool is_there = begin + tile * L::kSteps + step < end && all.has_step(from) && c < all.s.columns;
        T* const to = stages + (stage * Program::kInputs + k) * L::kElements + step * L::kStrip + at;
        const T* const source = is_there ? all.in[k] + all.at(sample, from, c) : all.in[k];
        if constexpr (kWidth * sizeof(T) >= 4) {
          cp_async<kWidth * sizeof(T)>(to, source, is_there);
        } else {
          *to = is_there ? *source : T(0);
        }
      }
    cp_async_commit();
  };

  State carry[L::kOfLane];
  for (int v = 0; v < L::kOfLane; ++v) {
    if (Program::kStartsFromH0 && !is_first_pass && is_inside(v)) carry[v].b = all.start(sample, column + v);
    if (!is_first_pass && is_inside(v))
      for (int64_t part = 0; part < blockIdx.z; ++part) carry[v] = State::combine(carry[v], partial(part, v));
  }
  const int64_t tiles = (end - begin + L::kSteps - 1) / L::kSteps;
#pragma unroll
  for (int n = 0; n < L::kStages - 1; ++n) copy(n, n);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    cp_async_wait<L::kStages - 2>();
    __syncthreads();  // the tile is there, and all threads have read the one before
    copy(tile + L::kStages - 1, static_cast<int>((tile + L::kStages - 1) % L::kStages));
    const T* const here = stages + tile % L::kStages * Program::kInputs * L::kElements;
    Pack<T, L::kOfLane> in[L::kEach][Program::kInputs];
    State total[L::kOfLane];
    const int64_t i = begin + tile * L::kSteps + warp * L::kEach;
#pragma unroll
    for (int step = 0; step < L::kEach; ++step) {
      for (int k = 0; k < Program::kInputs; ++k)
        in[step][k] =
            load<L::kOfLane>(here + k * L::kElements + (warp * L::kEach + step) * L::kStrip + lane * L::kOfLane);
      for (int v = 0; v < L::kOfLane; ++v)
        if (i + step < end)
          total[v] = State::combine(total[v], State{C(in[step][0].values[v]), C(in[step][1].values[v])});
    }
    for (int v = 0; v < L::kOfLane; ++v) totals[tile % 2][warp][lane * L::kOfLane + v] = total[v];
    __syncthreads();
    for (int v = 0; v < L::kOfLane; ++v) {
      State before = carry[v];
#pragma unroll
      for (int w = 0; w < L::kWarps; ++w) {
        if (w == warp) before = carry[v];
        carry[v] = State::combine(carry[v], totals[tile % 2][w][lane * L::kOfLane + v]);
      }
      total[v] = before;
    }
    if (is_first_pass) continue;
#pragma unroll
    for (int step = 0; step < L::kEach; ++step) {
      if (i + step >= end) break;
      Pack<T, L::kOfLane> packs[Program::kOutputs];
      for (int v = 0; v < L::kOfLane; ++v) {
        C values[Program::kInputs], results[Program::kOutputs];
        for (int k = 0; k < Program::kInputs; ++k) values[k] = C(in[step][k].values[v]);
        if constexpr (Program::kInputs > 2)
          if (i + step + 1 == all.s.length && is_inside(v)) values[2] = all.start(sample, column + v);
        total[v].b = values[0] * total[v].b + values[1];
        Program::outputs(total[v].b, values, results);
        for (int k = 0; k < Program::kOutputs; ++k) assign(packs[k].values[v], results[k]);
      }
      for (int k = 0; k < Program::kOutputs; ++k) {
        T* const to = all.out[k] + all.at(sample, i + step, column);
        if constexpr (kWidth >= L::kOfLane) {
          if (is_inside(0)) store(to, packs[k]);
        } else {
          for (int v = 0; v < L::kOfLane; ++v)
            if (is_inside(v)) to[v] = packs[k].values[v];
        }
      }
    }
  }
  cp_async_wait_all();
  if (warp > 0) return;
  for (int v = 0; v < L::kOfLane; ++v) {
    if (!is_inside(v)) continue;
    if (is_first_pass) partial(blockIdx.z, v) = carry[v];
    if (!is_first_pass && end == all.s.length) all.finish(sample, column + v, carry[v].b);
  }
}
#endif

// Walks down all columns.
template <typename Program, typename T>
void walk(Call& call, const Columns<Program, T>& all) {
  const Sizes& s = all.s;
  if (s.samples * s.length * s.columns == 0) return;
  if (call.is_on_cpu()) {
    const OnCpu<Program, T> body{all};
    return on_cpu(call, s.samples * body.runs(), body, static_cast<double>(s.length * std::min(s.columns, body.kRun)));
  }
#ifdef __CUDACC__
  using L = Tile<Program, T>;
  const auto run = [&](auto kernel) {
    const Grid grid(s.samples * ((s.columns + L::kStrip - 1) / L::kStrip), 1, s.parts());
    if (grid.z > 1) launch(call, kernel, grid, kThreads, L::kBytes, all, true);
    launch(call, kernel, grid, kThreads, L::kBytes, all, false);
  };
  bool is_aligned_all = s.columns % kPackWidth<T> == 0;
  for (const T* pointer : all.in) is_aligned_all &= is_aligned<kPackWidth<T>>(pointer);
  for (const T* pointer : all.out) is_aligned_all &= is_aligned<kPackWidth<T>>(pointer);
  is_aligned_all ? run(columns_kernel<kPackWidth<T>, Program, T>) : run(columns_kernel<1, Program, T>);
#endif
}

}  // namespace msops::linear_scan
