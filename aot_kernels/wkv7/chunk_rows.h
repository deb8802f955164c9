// The rows' walks in chunks of steps (see chunks.h).
#pragma once

#include "chunks.h"
#ifdef __CUDACC__
#include "../common/gpu/cp_async.h"

namespace msops::wkv7::chunks {

struct Shared {
  static constexpr int kAhead = 2, kChunks = kAhead + 2;  // one is in use by each group of warps
  Half given[kChunks][kInputs - 1][kSteps][kGivenRow];
  Operands operands[2];
  float totals[4][kFeatures], columns[kSteps][kSteps];  // N, by columns
};

using Given = Half[kInputs - 1][kSteps][kGivenRow];

// Begins to copy a chunk's vectors, among them the added one in place of v. Steps after the last one are zeros.
template <typename Program>
__device__ __forceinline__ void begin_copies(const Task<Half>& task, const Steps& steps, int64_t chunk, Given& to) {
  constexpr int kPack = 8, kPacks = kFeatures / kPack, kRows = kGroup / kPacks;
  static_assert(kRows == kSteps, "a thread copies a pack of each vector");
  const int row = static_cast<int>(threadIdx.x) / kPacks, column = static_cast<int>(threadIdx.x) % kPacks * kPack;
  const int64_t step = chunk * kSteps + row;
  const bool is_inside = step < task.s.steps;
  const int64_t at = steps.at(is_inside ? step : 0) + column;
  unrolled<kInputs - 1>([&](int v) {
    const Half* const from = task.inputs[v == kV ? Roles<Program>::kAdded : v];
    cp_async<16>(&to[v][row][column], from + at, is_inside);
  });
}

// Writes (I - N)^-1 - I by a warp; each column is a lane's own.
__device__ __forceinline__ void invert(const float (&columns)[kSteps][kSteps], Operands& to) {
  const int lane = static_cast<int>(threadIdx.x) % kSteps;
  float x[kSteps];
  unrolled<kSteps>([&](int t) { x[t] = t == lane; });
  unrolled<kSteps>([&](int j) {
    unrolled<kSteps / 4>([&](int part) {
      if (4 * part + 3 <= j) return;
      const Pack<float, 4> column = load<4>(&columns[j][4 * part]);
      unrolled<4>([&](int e) { x[4 * part + e] += column.values[e] * x[j]; });  // 0 where j is not before it
    });
  });
  unrolled<kSteps>([&](int t) { to.products[kAB][t][lane] = rounded(t == lane ? 0 : x[t]); });
}

// Makes a chunk's operands by the first four warps. A warp has four steps, and a lane two features of them; later, a
// warp has the products of two operands.
template <typename Program>
__device__ __forceinline__ void prepare(Shared& shared, const Given& given, Operands& to, bool is_full) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, feature = 2 * lane;
  constexpr int kOwn = kSteps / 4;
  using R = Roles<Program>;
  Pack<float, 2> x[kOwn][kOperands];
  float sums[kOwn + 1][2] = {}, sum_of_all[2] = {};
  unrolled<kOwn>([&](int i) {
    const int step = kOwn * warp + i;
    const Pack<float, 2> raw = pair_at(&given[kW][step][feature]), value = pair_at(&given[kV][step][feature]);
    unrolled<kOperands>([&](int v) { x[i][v] = pair_at(&given[R::vector_of(v)][step][feature]); });
    unrolled<2>([&](int e) {
      sums[i + 1][e] = sums[i][e] + rate_of(raw.values[e]);
      sum_of_all[e] += value.values[e];
      unrolled<kOperands>([&](int v) { sum_of_all[e] += x[i][v].values[e]; });
    });
  });
  // Where an input is not finite, the total is NaN.
  store<2>(&shared.totals[warp][feature],
           Pack<float, 2>{sums[kOwn][0] + 0 * sum_of_all[0], sums[kOwn][1] + 0 * sum_of_all[1]});
  float before[2] = {};
  if (!add_up_rates(shared, feature, is_full, before, to)) return;  // as all four warps do

  float decays[2][2], growths[2][2];  // without the step's own, and with it
  unrolled<2>([&](int e) { decays[1][e] = ex2_approx_ftz(-before[e]), growths[1][e] = ex2_approx_ftz(before[e]); });
  unrolled<kOwn>([&](int i) {
    uint32_t words[kOperands][2];
    unrolled<2>([&](int e) {
      const float sum = before[e] + sums[i + 1][e];
      decays[0][e] = decays[1][e], growths[0][e] = growths[1][e];
      decays[1][e] = ex2_approx_ftz(-sum), growths[1][e] = ex2_approx_ftz(sum);
      unrolled<kOperands>(
          [&](int v) { words[v][e] = rounded(x[i][v].values[e] * (v < kOfB ? decays : growths)[R::includes(v)][e]); });
    });
    unrolled<kOperands>([&](int v) {
      store<2>(&to.vectors[v][kOwn * warp + i][feature], Pack<uint32_t, 2>{words[v][0], words[v][1]});
    });
  });
  if (warp == 3) store<2>(&to.decays[feature], Pack<float, 2>{decays[1][0], decays[1][1]});
  sync_group();

  const int product = warp, of_left = product / 2, of_right = kOfB + product % 2;
  const bool has_own = R::has_own(of_left, of_right);
  multiply_vectors(to, of_left, of_right, [&](int t, int j, float (&sums)[2]) {
    unrolled<2>([&](int e) {
      if (j + e > t || (j + e == t && !has_own)) sums[e] = 0;
      if (product == kAB) shared.columns[j + e][t] = sums[e];
    });
    if (product != kAB) store<2>(&to.products[product][t][j], Pack<uint32_t, 2>{rounded(sums[0]), rounded(sums[1])});
  });
  if (product == kAB) {
    __syncwarp();
    invert(shared.columns, to);
  }
}

template <typename Program>
struct Rows : Tile {
  using R = Roles<Program>;
  const Task<Half>& task;
  const Steps steps;

  __device__ Rows(const Task<Half>& task_, const Steps& steps_) : task(task_), steps(steps_) {}

  // Takes the steps of a chunk one by one.
  __device__ __forceinline__ void walk(int64_t begin, const Given& given, int count) {
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      const Pack<float, 2> added = pair_at(&given[kV][step][this->row]);
      float sums[3][2] = {};
      const auto with_vectors = [&](const auto& f) {
        for_all([&](float& element, int row, int key) {
          const auto x = [&](int v) {
            const float number = given[v][step][key];
            return v == kW ? ex2_approx_ftz(-rate_of(number)) : number;
          };
          f(element, row, x, [&](int) { return added.values[row]; });
        });
      };
      take_step<Program>(with_vectors, sums);
      const auto &hidden = sums[R::kBack ? 1 : 0], &result = sums[R::kBack ? 0 : 2];
      if (quad == 0) put(begin + step, hidden[0], hidden[1], result[0], result[1]);
    }
  }

  // Takes a whole chunk.
  __device__ __forceinline__ void advance(int64_t begin, const Given& given, const Operands& of) {
    float s[2][4] = {}, y[2][4] = {};
    read(of, s, y);
    uint32_t v[2][4], of_s[2][4], lower[2][4];
    unrolled<2, 2>([&](int n, int e) {
      const Pack<float, 2> pair = pair_at(&given[kV][8 * n + 2 * quad + e][row]);
      unrolled<2>([&](int i) { v[n][2 * i + e] = __float_as_uint(pair.values[i]); });  // float16 is TF32
    });
    add(of, s, v, kAK);
    unrolled<2, 4>([&](int n, int i) { split(s[n][i], of_s[n][i], lower[n][i]); });
    add(of, s, of_s, kAB);
    add(of, s, lower, kAB);
    unrolled<2, 4>([&](int n, int i) { of_s[n][i] = cvt_rna_tf32(s[n][i]); });
    add(of, y, v, kRK);
    add(of, y, of_s, kRB);
    unrolled<2, 2>(
        [&](int n, int e) { put(begin + 8 * n + 2 * quad + e, s[n][e], s[n][2 + e], y[n][e], y[n][2 + e]); });
    extend(of, of_s, v);
    for_all([&](float& element, int, int key) { element *= of.decays[key]; });
  }

 private:
  // Stores the results of a step for both rows.
  __device__ __forceinline__ void put(int64_t step, float s0, float s1, float y0, float y1) {
    const int64_t at = steps.at(step) + row;
    store<2>(&task.result(R::kHidden, at), Pack<float, 2>{s0, s1});
    store<2>(task.gradients[R::kResult] + at, rounded_pack<Half, 2>({y0, y1}));
  }
};

template <typename Program, typename T>
__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const Task<T> task) {
  if (!has_instructions_of(80)) return;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Sizes& s = task.s;
  const int64_t matrix = blockIdx.x, begin = s.begin(matrix), chunks = (s.steps + kSteps - 1) / kSteps;
  const Steps steps =
      Program::kBack ? Steps{begin + (s.steps - 1) * s.stride(), -s.stride()} : Steps{begin, s.stride()};
  const auto given = [&](int64_t chunk) -> Given& { return shared.given[chunk % Shared::kChunks]; };

  if (threadIdx.x < kGroup) {
    const auto copy = [&](int64_t chunk) {
      if (chunk < chunks) begin_copies<Program>(task, steps, chunk, given(chunk));
      cp_async_commit();
    };
    for (int64_t chunk = 0; chunk < Shared::kAhead; ++chunk) copy(chunk);
    for (int64_t i = 0; i < chunks; ++i) {
      wait_for_room(i);
      copy(i + Shared::kAhead);
      cp_async_wait<Shared::kAhead>();
      sync_group();
      prepare<Program>(shared, given(i), shared.operands[i % 2], (i + 1) * kSteps <= s.steps);
      hand_on(i);
    }
  } else {
    const auto place = [&](int row, int key) { return (matrix * kFeatures + row) * kFeatures + key; };
    Rows<Program> rows(task, steps);
    rows.for_all([&](float& m, int row, int key) { m = Program::start(task, place(rows.row + row, key)); });
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = i * kSteps, count = std::min<int64_t>(kSteps, s.steps - first);
      const Operands& operands = shared.operands[i % 2];
      wait_for_operands(i);
      operands.are_whole ? rows.advance(first, given(i), operands)
                         : rows.walk(first, given(i), static_cast<int>(count));
      give_back(i, chunks);
    }
    rows.for_all([&](float& m, int row, int key) { Program::finish(task, place(rows.row + row, key), m); });
  }
}

// Returns whether the walk is one for this kernel, which it launched then.
template <typename Program, typename T>
bool launch_rows(Call& call, const Task<T>& task) {
  using R = Roles<Program>;
  const bool has_pairs = is_aligned<2>(task.gradients[R::kResult]) && is_aligned<2>(&task.result(R::kHidden, 0));
  if (task.s.features != kFeatures || !has_pairs) return false;
  for (const Vector v : {kR, kW, kK, kA, kB, R::kAdded})
    if (!is_aligned<8>(task.inputs[v])) return false;
  return launch_walk<Program>(call, rows_kernel<Program, T>, sizeof(Shared), task);
}

}  // namespace msops::wkv7::chunks
#endif
