// A linear recurrence down the columns of each sample, x -> a x + b at each step, as both directions need it. Tensors
// have `samples` x `length` x `columns` elements. A Program says what the inputs of a step are, the first two of which
// are a and b, and computes its outputs from the state behind it. An input may come from the step before or after: its
// shift.
//
//   CPU  a thread walks down some neighbouring columns, whose steps are neighbours in memory
//   GPU  a block walks down a strip of columns, tile by tile. Copies of the next tiles are under way meanwhile. Each
//   warp
//        chains the steps of its part of a tile, then starts from the state before them. Where there are few strips,
//        blocks share a strip's steps in the same way, in two launches. A thread takes a column of few steps alone.
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
  MSOPS_BOTH C h0_of(int64_t sample, int64_t column) const { return h0 ? h0[sample * s.columns + column] : C(0); }
  MSOPS_BOTH C start(int64_t sample, int64_t column) const {
    return Program::kStartsFromH0 ? h0_of(sample, column) : C(0);
  }
  MSOPS_BOTH bool has_step(int64_t i) const { return 0 <= i && i < s.length; }

  // Returns an input of the i-th step. Beside the first step and behind the last one are zeros, or h0.
  MSOPS_BOTH C input(int k, int64_t sample, int64_t i, int64_t column) const {
    const int64_t from = i + Program::shift(k);
    return has_step(from) ? C(in[k][at(sample, from, column)]) : from < 0 ? C(0) : h0_of(sample, column);
  }
  // Takes a step, and returns the state behind it.
  MSOPS_BOTH C step(int64_t sample, int64_t i, int64_t column, C state) const {
    C values[Program::kInputs], results[Program::kOutputs];
    for (int k = 0; k < Program::kInputs; ++k) values[k] = input(k, sample, i, column);
    state = values[0] * state + values[1];
    Program::outputs(state, values, results);
    for (int k = 0; k < Program::kOutputs; ++k) assign(out[k][at(sample, i, column)], results[k]);
    return state;
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
    for (int64_t c = 0; c < count; ++c) states[c] = all.start(sample, first + c);
    for (int64_t i = 0; i < all.s.length; ++i) {
      if (0 < i && i + 1 < all.s.length) {
        walk(sample, i, first, count, states);
        continue;
      }
      for (int64_t c = 0; c < count; ++c) states[c] = all.step(sample, i, first + c, states[c]);
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

// A thread walks down one column.
template <typename Program, typename T>
struct ByThread {
  Columns<Program, T> all;

  template <typename Index>
  MSOPS_BOTH void operator()(Index n) const {
    const int64_t sample = n / all.s.columns, column = n % all.s.columns;
    Compute<T> state = all.start(sample, column);
    for (int64_t i = 0; i < all.s.length; ++i) state = all.step(sample, i, column, state);
    all.finish(sample, column, state);
  }
};

#ifdef __CUDACC__
// A tile has a row for each step. A row begins anywhere in memory: the packs around it are copied.
template <typename Program, typename T>
struct Tile {
  static constexpr int kWarps = 8, kEach = sizeof(T) == 8 ? 4 : 8, kSteps = kWarps * kEach;  // kEach: of a warp
  static constexpr int kStrip = 32, kPacks = kStrip / kPackWidth<T> + 1, kPitch = kPacks * kPackWidth<T>;
  static constexpr int kElements = kSteps * kPitch, kOfStage = Program::kInputs * kElements;
  static constexpr int kStageBytes = kOfStage * static_cast<int>(sizeof(T));
  static constexpr int kStages = std::min(4, 60 * 1024 / kStageBytes), kBytes = kStages * kStageBytes;
};

// Copies the p-th of the aligned packs around elements [first, first + kStrip) of an array, without what lies beyond
// it.
template <int kStrip, typename T>
__device__ void copy_pack(T* to, const T* array, int64_t size, int64_t first, int p) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t from =
      first - static_cast<int64_t>(reinterpret_cast<uintptr_t>(array + first) / sizeof(T) % kWidth) + p * kWidth;
  if (from >= first + kStrip) return;
  if (from >= 0 && from + kWidth <= size) return cp_async<16>(to, array + from);
  for (int j = 0; j < kWidth; ++j)
    if (0 <= from + j && from + j < size) to[j] = array[from + j];
}

// Blocks are (strips of all samples, 1, parts). The first pass writes the State of each part.
template <typename Program, typename T>
__global__ void __launch_bounds__(kThreads) columns_kernel(const Columns<Program, T> all, bool is_first_pass) {
  using C = Compute<T>;
  using State = LinearStep<C>;
  using L = Tile<Program, T>;
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ State totals[2][L::kWarps][32];
  T* const stages = reinterpret_cast<T*>(bytes);  // (stage, input, step, element of the packs)
  const Sizes& s = all.s;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strips = (s.columns + L::kStrip - 1) / L::kStrip;
  const int64_t sample = blockIdx.x / strips, first_column = blockIdx.x % strips * L::kStrip;
  const int64_t column = first_column + lane;
  const bool is_inside = column < s.columns;
  const int64_t begin = part_begin<int64_t>(s.length, blockIdx.z, gridDim.z);
  const int64_t end = part_begin<int64_t>(s.length, blockIdx.z + 1, gridDim.z);
  const auto partial = [&](int64_t part) -> State& {
    return reinterpret_cast<State*>(all.partial)[(part * s.samples + sample) * s.columns + column];
  };

  const auto copy = [&](int64_t tile) {
    for (int k = 0; k < (is_first_pass ? 2 : Program::kInputs); ++k)
      for (int n = static_cast<int>(threadIdx.x); n < L::kSteps * L::kPacks; n += kThreads) {
        const int64_t i = begin + tile * L::kSteps + n / L::kPacks, from = i + Program::shift(k);
        T* const to = stages + tile % L::kStages * L::kOfStage + k * L::kElements + n * kPackWidth<T>;
        if (i < end && all.has_step(from))
          copy_pack<L::kStrip>(to, all.in[k], s.samples * s.length * s.columns, all.at(sample, from, first_column),
                               n % L::kPacks);
      }
    cp_async_commit();
  };

  State carry;
  if (is_inside && !is_first_pass) {
    carry.b = all.start(sample, column);
    for (int64_t part = 0; part < blockIdx.z; ++part) carry = State::combine(carry, partial(part));
  }
  const int64_t tiles = (end - begin + L::kSteps - 1) / L::kSteps;
  for (int n = 0; n < L::kStages - 1; ++n) copy(n);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    cp_async_wait<L::kStages - 2>();
    __syncthreads();  // the tile is there, and all threads have read the one before
    copy(tile + L::kStages - 1);
    const int64_t i = begin + tile * L::kSteps + warp * L::kEach;
    T in[L::kEach][Program::kInputs];
    unrolled<Program::kInputs>([&](int k) {
      const T* const rows = stages + tile % L::kStages * L::kOfStage + k * L::kElements + warp * L::kEach * L::kPitch;
      const T* const first = all.in[k] + all.at(sample, i + Program::shift(k), first_column);
      const unsigned apart = static_cast<unsigned>(s.reverse ? -s.columns : s.columns);
      const unsigned start = static_cast<unsigned>(reinterpret_cast<uintptr_t>(first) / sizeof(T));
      unrolled<L::kEach>([&](int step) {
        const unsigned offset = (start + step * apart) % kPackWidth<T>;
        in[step][k] = rows[step * L::kPitch + offset + lane];
        if (Program::shift(k) != 0 && !all.has_step(i + step + Program::shift(k))) in[step][k] = T(0);
      });
    });
    State total;
    unrolled<L::kEach>([&](int step) {
      if (i + step < end) total = State::combine(total, State{C(in[step][0]), C(in[step][1])});
    });
    totals[tile % 2][warp][lane] = total;
    __syncthreads();
    C state = 0;
    unrolled<L::kWarps>([&](int w) {
      if (w == warp) state = carry.b;
      carry = State::combine(carry, totals[tile % 2][w][lane]);
    });
    if (is_first_pass || !is_inside) continue;
    unrolled<L::kEach>([&](int step) {
      if (i + step >= end) return;
      C values[Program::kInputs], results[Program::kOutputs];
      for (int k = 0; k < Program::kInputs; ++k) values[k] = C(in[step][k]);
      if (Program::kInputs > 2 && i + step + 1 == s.length) values[Program::kInputs - 1] = all.h0_of(sample, column);
      state = values[0] * state + values[1];
      Program::outputs(state, values, results);
      for (int k = 0; k < Program::kOutputs; ++k) assign(all.out[k][all.at(sample, i + step, column)], results[k]);
    });
  }
  cp_async_wait_all();
  if (warp > 0 || !is_inside) return;
  if (is_first_pass) {
    partial(blockIdx.z) = carry;
  } else if (end == s.length) {
    all.finish(sample, column, carry.b);
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
  constexpr int64_t kFew = 32;
  if (s.length <= kFew) return on_gpu_with<int64_t>(call, s.samples * s.columns, ByThread<Program, T>{all});
#ifdef __CUDACC__
  using L = Tile<Program, T>;
  const Grid grid(s.samples * ((s.columns + L::kStrip - 1) / L::kStrip), 1, s.parts());
  if (grid.z > 1) launch(call, columns_kernel<Program, T>, grid, kThreads, L::kBytes, all, true);
  launch(call, columns_kernel<Program, T>, grid, kThreads, L::kBytes, all, false);
#endif
}

}  // namespace msops::linear_scan
