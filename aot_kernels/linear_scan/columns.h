// A linear recurrence down the columns of each sample, x -> a x + b at each step, as both directions need it. Tensors
// have `samples` x `length` x `columns` elements. A Program says what the inputs of a step are, the first two of which
// are a and b, and computes its outputs from the state after it. An input may come from the step before or after: its
// shift.
//
//   CPU  a thread walks down some neighbouring columns, whose steps are neighbours in memory
//   GPU  a block walks down a strip of columns, tile by tile. Copies of the next tiles are under way meanwhile. Each
//        warp chains its steps of a tile, then starts from the state before them. Where there are few strips,
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
  const void* h0;  // of each column, elements of T or of float; or null for zeros
  void* dh0;       // elements as those of h0, or null
  bool are_float;  // these two
  C* partial;      // on the GPU: a State of each part and column

  // Returns the place of an element of the i-th step of this walk.
  MSOPS_BOTH int64_t at(int64_t sample, int64_t i, int64_t column) const {
    return (sample * s.length + (s.reverse ? s.length - 1 - i : i)) * s.columns + column;
  }
  MSOPS_BOTH C h0_of(int64_t sample, int64_t column) const {
    const int64_t i = sample * s.columns + column;
    return !h0 ? C(0) : are_float ? C(static_cast<const float*>(h0)[i]) : C(static_cast<const T*>(h0)[i]);
  }
  MSOPS_BOTH C start(int64_t sample, int64_t column) const {
    return Program::kStartsFromH0 ? h0_of(sample, column) : C(0);
  }
  MSOPS_BOTH bool has_step(int64_t i) const { return 0 <= i && i < s.length; }

  // Returns an input of the i-th step. Before the first step and after the last one are zeros, or h0.
  MSOPS_BOTH C input(int k, int64_t sample, int64_t i, int64_t column) const {
    const int64_t from = i + Program::shift(k);
    return has_step(from) ? C(in[k][at(sample, from, column)]) : from < 0 ? C(0) : h0_of(sample, column);
  }
  // Takes a step, and returns the state after it.
  MSOPS_BOTH C step(int64_t sample, int64_t i, int64_t column, C state) const {
    C values[Program::kInputs], results[Program::kOutputs];
    for (int k = 0; k < Program::kInputs; ++k) values[k] = input(k, sample, i, column);
    state = values[0] * state + values[1];
    Program::outputs(state, values, results);
    for (int k = 0; k < Program::kOutputs; ++k) assign(out[k][at(sample, i, column)], results[k]);
    return state;
  }
  // Writes the gradient of h0: the state at the end of the walk, multiplied by the last step's own a.
  MSOPS_BOTH void finish(int64_t sample, int64_t column, C state) const {
    const int64_t i = sample * s.columns + column;
    const C gradient = C(in[0][at(sample, s.length - 1, column)]) * state;
    if (dh0 && are_float) static_cast<float*>(dh0)[i] = static_cast<float>(gradient);
    if (dh0 && !are_float) assign(static_cast<T*>(dh0)[i], gradient);
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
// A tile has a row for each step, of which a warp takes kEach neighbouring ones. Copies move pieces: packs, if all rows
// begin at a pack, else 4 bytes or an element.
template <bool kAligned, typename Program, typename T>
struct Tile {
  static constexpr int kOfLane = sizeof(T) == 2 ? 2 : 1, kStrip = 32 * kOfLane;  // columns
  static constexpr int kWarps = kThreads / 32, kEach = sizeof(T) == 8 ? 4 : 8, kSteps = kWarps * kEach;
  static constexpr int kPiece = kAligned ? kPackWidth<T> : kOfLane;            // elements
  static constexpr int kPieces = kStrip / kPiece + (!kAligned && kPiece > 1);  // of a row, which may begin in a piece
  static constexpr int kTurns = (kSteps * kPieces + kThreads - 1) / kThreads;  // of all threads, to copy an input
  static constexpr int kPitch = kPieces * kPiece, kElements = kSteps * kPitch, kOfStage = Program::kInputs * kElements;
  // An H100 gives three blocks 75 KiB each. Four have enough registers where there are few inputs.
  static constexpr int kBlocks = kAligned && Program::kInputs == 2 ? 4 : 3;
  static constexpr int kStages = 3 * kOfStage * static_cast<int>(sizeof(T)) <= 72 * 1024 ? 3 : 2;
  static constexpr int kBytes = kStages * kOfStage * static_cast<int>(sizeof(T));

  // Returns where in its first piece a row begins.
  static __device__ int offset(const T* row) {
    return kAligned ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kPiece);
  }
  // Copies a piece as far as it is within the array.
  static __device__ void copy(T* to, const T* from, const T* array, const T* end) {
    if (from >= array && from + kPiece <= end) return cp_async<kPiece * sizeof(T)>(to, from);
    for (int j = 0; j < kPiece; ++j)
      if (from + j >= array && from + j < end) to[j] = from[j];
  }
};

// Blocks are (strips of all samples, 1, parts). The first pass writes the State of each part.
template <bool kAligned, bool kIsFirstPass, typename Program, typename T>
__global__ void __launch_bounds__(kThreads, Tile<kAligned, Program, T>::kBlocks)
    columns_kernel(const Columns<Program, T> all) {
  using C = Compute<T>;
  using State = LinearStep<C>;
  using L = Tile<kAligned, Program, T>;
  constexpr int kInputs = kIsFirstPass ? 2 : Program::kInputs;
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ State totals[L::kWarps][L::kStrip];
  T* const stages = reinterpret_cast<T*>(bytes);  // (stage, input, row, element of the pieces)
  const Sizes& s = all.s;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strips = (s.columns + L::kStrip - 1) / L::kStrip;
  const int64_t sample = blockIdx.x / strips, first_column = blockIdx.x % strips * L::kStrip;
  // A lane has neighbouring columns or, without packs, those that leave neighbouring lanes neighbouring elements.
  constexpr int kApart = kAligned ? 1 : 32;
  const int column = kAligned ? lane * L::kOfLane : lane;  // the first one, of the strip
  const int64_t begin = part_begin<int64_t>(s.length, blockIdx.z, gridDim.z);
  const int64_t end = part_begin<int64_t>(s.length, blockIdx.z + 1, gridDim.z);
  const int64_t origin = all.at(sample, 0, 0), stride = s.reverse ? -s.columns : s.columns;  // of steps
  const auto column_of = [&](int v) { return first_column + column + v * kApart; };
  const auto is_inside = [&](int v) { return column_of(v) < s.columns; };
  const auto partial = [&](int64_t part, int v) -> State& {
    return reinterpret_cast<State*>(all.partial)[(part * s.samples + sample) * s.columns + column_of(v)];
  };
  // Returns whether all steps of a tile exist, and the two before it and after it, so that none needs a check.
  const auto is_inner = [&](int64_t first) {
    return first + L::kSteps <= end && all.has_step(first - 2) && all.has_step(first + L::kSteps + 1);
  };

  const auto copy = [&](int64_t tile) {
    const int64_t first = begin + tile * L::kSteps;
    const bool has_all = is_inner(first);
    T* const stage = stages + static_cast<unsigned>(tile) % L::kStages * L::kOfStage;
#pragma unroll(kAligned ? L::kTurns : 1)
    for (int turn = 0; turn < L::kTurns; ++turn) {
      const int n = static_cast<int>(threadIdx.x) + turn * kThreads, piece = n % L::kPieces;
      if (L::kSteps * L::kPieces % kThreads > 0 && n >= L::kSteps * L::kPieces) continue;
      const int64_t i = first + n / L::kPieces;
      if (first_column + piece * L::kPiece >= s.columns + L::kPiece - 1) continue;
      const int64_t at = origin + i * stride + first_column;
      unrolled<kInputs>([&](int k) {
        const T* const row = all.in[k] + at + Program::shift(k) * stride;
        const T* const from = row - L::offset(row) + piece * L::kPiece;
        T* const to = stage + k * L::kElements + n * L::kPiece;
        if (!has_all && (i >= end || !all.has_step(i + Program::shift(k)))) return;
        if (kAligned || has_all) return cp_async<L::kPiece * sizeof(T)>(to, from);
        L::copy(to, from, all.in[k], all.in[k] + s.samples * s.length * s.columns);
      });
    }
    cp_async_commit();
  };

  State carry[L::kOfLane];
  for (int v = 0; v < L::kOfLane; ++v) {
    if (kIsFirstPass || !is_inside(v)) continue;
    carry[v].b = all.start(sample, column_of(v));
    for (int64_t part = 0; part < blockIdx.z; ++part) carry[v] = State::combine(carry[v], partial(part, v));
  }
  const auto walk = [&](int64_t tile, auto are_inner) {
    const int64_t i = begin + tile * L::kSteps + warp * L::kEach;
    [[maybe_unused]] const int64_t at = origin + i * stride;
    const T* const here =
        stages + static_cast<unsigned>(tile) % L::kStages * L::kOfStage + warp * L::kEach * L::kPitch + column;
    Pack<T, L::kOfLane> in[L::kEach][kInputs];
    State total[L::kOfLane];
    unrolled<L::kEach>([&](int step) {
      unrolled<kInputs>([&](int k) {
        const T* const pack = here + k * L::kElements + step * L::kPitch;
        if constexpr (kAligned || L::kOfLane == 1) {
          in[step][k] = load<L::kOfLane>(pack);
        } else {
          const int offset = L::offset(all.in[k] + at + (step + Program::shift(k)) * stride + first_column);
          for (int v = 0; v < L::kOfLane; ++v) in[step][k].values[v] = pack[offset + v * kApart];
        }
        if (!are_inner && !all.has_step(i + step + Program::shift(k))) in[step][k] = {};
      });
      for (int v = 0; v < L::kOfLane; ++v)
        if (are_inner || i + step < end)
          total[v] = State::combine(total[v], State{C(in[step][0].values[v]), C(in[step][1].values[v])});
    });
    for (int v = 0; v < L::kOfLane; ++v) totals[warp][lane * L::kOfLane + v] = total[v];
    __syncthreads();
    C states[L::kOfLane] = {};
    unrolled<L::kWarps>([&](int w) {
      for (int v = 0; v < L::kOfLane; ++v) {
        if (w == warp) states[v] = carry[v].b;
        carry[v] = State::combine(carry[v], totals[w][lane * L::kOfLane + v]);
      }
    });
    if constexpr (!kIsFirstPass) {
      T* to[Program::kOutputs];
      for (int k = 0; k < Program::kOutputs; ++k) to[k] = all.out[k] + at + first_column + column;
      unrolled<L::kEach>([&](int step) {
        if (!are_inner && i + step >= end) return;
        C results[Program::kOutputs][L::kOfLane];
        for (int v = 0; v < L::kOfLane; ++v) {
          C values[Program::kInputs], of_column[Program::kOutputs];
          for (int k = 0; k < Program::kInputs; ++k) values[k] = C(in[step][k].values[v]);
          if (Program::kInputs > 2 && !are_inner && i + step + 1 == s.length && is_inside(v))
            values[Program::kInputs - 1] = all.h0_of(sample, column_of(v));
          states[v] = values[0] * states[v] + values[1];
          Program::outputs(states[v], values, of_column);
          for (int k = 0; k < Program::kOutputs; ++k) results[k][v] = of_column[k];
        }
        for (int k = 0; k < Program::kOutputs; ++k) {
          const Pack<T, L::kOfLane> out = rounded_pack<T>(results[k]);
          if constexpr (kAligned) {
            if (is_inside(0)) store_at_once(to[k], out);
          } else {
            for (int v = 0; v < L::kOfLane; ++v)
              if (is_inside(v)) to[k][v * kApart] = out.values[v];
          }
          to[k] += stride;
        }
      });
    }
  };

  const int64_t tiles = (end - begin + L::kSteps - 1) / L::kSteps;
  for (int n = 0; n < L::kStages - 1; ++n) copy(n);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    cp_async_wait<L::kStages - 2>();
    __syncthreads();  // the tile is there, and all threads have read the one before
    copy(tile + L::kStages - 1);
    if (is_inner(begin + tile * L::kSteps)) {
      walk(tile, std::true_type());
    } else {
      walk(tile, std::false_type());
    }
  }
  cp_async_wait_all();
  for (int v = 0; v < L::kOfLane; ++v) {
    if (threadIdx.x >= 32 || !is_inside(v)) continue;
    if (kIsFirstPass) partial(blockIdx.z, v) = carry[v];
    if (!kIsFirstPass && end == s.length) all.finish(sample, column_of(v), carry[v].b);
  }
}

template <bool kAligned, typename Program, typename T>
void walk_strips(Call& call, const Columns<Program, T>& all) {
  using L = Tile<kAligned, Program, T>;
  const Sizes& s = all.s;
  const Grid grid(s.samples * ((s.columns + L::kStrip - 1) / L::kStrip), 1, s.parts());
  const auto pass = [&](auto kernel) {
    // Three blocks of the backward pass need nearly all shared memory.
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    launch(call, kernel, grid, kThreads, L::kBytes, all);
  };
  if (grid.z > 1) pass(columns_kernel<kAligned, true, Program, T>);
  pass(columns_kernel<kAligned, false, Program, T>);
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
  bool are_packs = s.columns % kPackWidth<T> == 0;
  for (const T* pointer : all.in) are_packs &= is_aligned<kPackWidth<T>>(pointer);
  for (const T* pointer : all.out) are_packs &= is_aligned<kPackWidth<T>>(pointer);
  are_packs ? walk_strips<true>(call, all) : walk_strips<false>(call, all);
#endif
}

}  // namespace msops::linear_scan
