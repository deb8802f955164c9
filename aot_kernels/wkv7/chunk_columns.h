// The columns' walks in chunks of steps (see chunks.h). A row of a tile is a column of the state here.
//
// With vectors over values in place of those over keys, nothing is to be solved. The gradients are those of the scaled
// operands, of which two belong to each walk, times their products of decays:
//
//   dA_t = S' g_t + sum over j < t of (g_t . s_j) B_j + (g_t . v_j) K_j,  dR_t = S' dy_t + the same with dy_t, j <= t
//
// and ColumnsBack has B, K, A and R in place of A, R, B and K, and the vectors that belong to them. What step t has of
// itself is added in float32: the terms of dw then differ by no rounding in what cancels, which is most of them where
// decays are strong.
#pragma once

#include "chunks.h"
#ifdef __CUDACC__
#include "../common/gpu/cp_async.h"

namespace msops::wkv7::chunks {

// Returns the vector over values whose products with the state make the gradient of a vector over keys.
constexpr __device__ int partner_of(int vector) {
  return vector == kA ? kG : vector == kR ? kDy : vector == kB ? kS : kV;
}

struct ColumnOperands : Operands {
  Half inputs[kB + 1][kSteps][kFeatures + 8];
  float terms[kSteps][kFeatures + 8];
  float sums[kSteps + 1][kFeatures + 8];  // of the rates before each step, and of all
  float own[2][kSteps];                   // products of a step's own vectors
};

struct ColumnShared {
  ColumnOperands operands[2];
  float totals[4][kFeatures];
};

// Returns where the steps of the i-th chunk are. Chunks begin at multiples of kSteps, in either order.
template <typename Program>
__device__ __forceinline__ Steps steps_of(const Sizes& s, int64_t matrix, int64_t i, int64_t chunks, int& count) {
  const int64_t first = (Program::kBack ? chunks - 1 - i : i) * kSteps;
  count = static_cast<int>(std::min<int64_t>(kSteps, s.steps - first));
  const int64_t at = s.begin(matrix) + first * s.stride();
  return Program::kBack ? Steps{at + (count - 1) * s.stride(), -s.stride()} : Steps{at, s.stride()};
}

// Values holds a chunk's vectors over values, and the raw decays, on their way to shared memory. A thread of the first
// four warps has two packs of each vector, and the decays of two features in four steps.
template <typename Program>
struct Values {
  using R = Roles<Program>;
  static constexpr int kOwn = kSteps / 4, kPack = 4;
  Pack<float, kPack> of[kOperands][2];
  Pack<Half, kPack> halves[kOperands][2];
  Pack<Half, 2> raw[kOwn];
  int row, column, first, feature;

  __device__ Values() {
    const int thread = static_cast<int>(threadIdx.x);
    row = thread / 8, column = thread % 8 * kPack, first = thread / 32 * kOwn, feature = thread % 32 * 2;
  }

  static constexpr __device__ int vector_of(int operand) { return partner_of(R::vector_of(operand)); }

  // Steps from `count` on are zeros.
  __device__ __forceinline__ void load(const Task<Half>& task, const Steps& steps, int count) {
    const int64_t at = steps.at(row) + column;
    unrolled<kOperands, 2>([&](int operand, int n) {
      const int v = vector_of(operand);
      if (v < kInputs) {
        halves[operand][n] = {};
        if (row < count) halves[operand][n] = msops::load<kPack>(task.inputs[v] + at + 32 * n);
      } else {
        of[operand][n] = {};
        if (row < count) of[operand][n] = msops::load<kPack>(task.computed[v - kInputs] + at + 32 * n);
      }
    });
    unrolled<kOwn>([&](int i) {
      raw[i] = {};
      if (first + i < count) raw[i] = msops::load<2>(task.inputs[kW] + steps.at(first + i) + feature);
    });
  }

  __device__ __forceinline__ void store(ColumnOperands& to) const {
    unrolled<kOperands, 2>([&](int operand, int n) {
      Pack<uint32_t, kPack> words;
      unrolled<kPack>([&](int e) {
        words.values[e] = vector_of(operand) < kInputs ? __float_as_uint(halves[operand][n].values[e])
                                                       : cvt_rna_tf32(of[operand][n].values[e]);
      });
      msops::store<kPack>(&to.vectors[operand][row][column + 32 * n], words);
    });
  }
};

// Begins to copy a whole chunk's vectors over keys.
__device__ __forceinline__ void begin_copies(const Task<Half>& task, const Steps& steps, bool with_terms,
                                             ColumnOperands& to) {
  const int row = static_cast<int>(threadIdx.x) / 8, column = static_cast<int>(threadIdx.x) % 8 * 8;
  const int64_t at = steps.at(row) + column;
  unrolled<kB + 1>([&](int v) { cp_async<16>(&to.inputs[v][row][column], task.inputs[v] + at); });
  if (with_terms)
    unrolled<2>([&](int n) { cp_async<16>(&to.terms[row][column + 4 * n], &task.result(kTerms, at + 4 * n)); });
}

// Makes a chunk's operands by the first four warps, and loads the next chunk's vectors.
template <typename Program, typename LoadNext>
__device__ __forceinline__ void prepare(ColumnShared& shared, const Values<Program>& values, ColumnOperands& to,
                                        bool is_full, const LoadNext& load_next) {
  using R = Roles<Program>;
  using V = Values<Program>;
  values.store(to);
  const int warp = static_cast<int>(threadIdx.x) / 32, feature = values.feature;
  float sums[V::kOwn + 1][2] = {};
  unrolled<V::kOwn, 2>([&](int i, int e) { sums[i + 1][e] = sums[i][e] + rate_of(values.raw[i].values[e]); });
  store<2>(&shared.totals[warp][feature], Pack<float, 2>{sums[V::kOwn][0], sums[V::kOwn][1]});
  load_next();
  float before[2] = {};
  if (!add_up_rates(shared, feature, is_full, before, to)) return;
  unrolled<V::kOwn + 1>([&](int i) {
    if (i > 0 || warp == 0)
      store<2>(&to.sums[V::kOwn * warp + i][feature], Pack<float, 2>{before[0] + sums[i][0], before[1] + sums[i][1]});
  });
  const int of_left = warp / 2, of_right = kOfB + warp % 2;
  const bool has_own = R::has_own(of_left, of_right);
  multiply_vectors(to, of_left, of_right, [&](int t, int j, float (&products)[2]) {
    unrolled<2>([&](int e) {
      if (j + e == t && has_own) to.own[R::kBack ? of_left : of_right - kOfB][t] = products[e];
      if (j + e >= t) products[e] = 0;
    });
    store<2>(&to.products[warp][t][j], Pack<uint32_t, 2>{cvt_rna_tf32(products[0]), cvt_rna_tf32(products[1])});
  });
}

// Columns of the state or of its gradient, of a warp.
template <typename Program>
struct ColumnTile : Tile {
  using R = Roles<Program>;
  static constexpr bool kBack = Program::kBack;
  const Task<Half>& task;
  const int64_t matrix;
  Sum<float> product[2];

  __device__ ColumnTile(const Task<Half>& task_, int64_t matrix_) : task(task_), matrix(matrix_) {}

  // Returns where an element is in an array of matrices.
  __device__ int64_t place(int64_t of, int key, int value) const {
    return (of * kFeatures + value) * kFeatures + row + key;
  }

  __device__ __forceinline__ void multiply_kept(int64_t step) {
    float sums[2] = {};
    for_all([&](float& m, int key, int value) {
      sums[key] += m * task.kept[place(task.kept_matrix(matrix, step), key, value)];
    });
    unrolled<2>([&](int key) { set_product(key, team_sum<4>(sums[key])); });
  }
  __device__ __forceinline__ void keep(int64_t step) {
    for_all([&](float& m, int key, int value) { task.kept[place(task.kept_matrix(matrix, step), key, value)] = m; });
  }

  // Takes the steps of a chunk one by one. All lanes of a column store its results.
  __device__ __forceinline__ void walk(const Steps& steps, const ColumnOperands& of, int count) {
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      const int64_t at = steps.at(step) + row;
      float owned[kVectors][2], sums[3][2] = {};
      unrolled<kVectors, 2>([&](int v, int key) {
        if (!Program::owns(v) || v == kRate) return;
        const float x = v < kInputs ? float(task.inputs[v][at + key]) : task.result(v, at + key);
        if (v == kW) owned[kRate][key] = ex2_approx_ftz(x * kLog2E<float>);
        owned[v][key] = v == kW ? ex2_approx_ftz(-rate_of(x)) : x;
      });
      const auto with_vectors = [&](const auto& f) {
        for_all([&](float& element, int key, int value) {
          const auto x = [&](int v) {
            float result = 0;
            unrolled<kOperands>([&](int operand) {
              if (Values<Program>::vector_of(operand) == v) result = __uint_as_float(of.vectors[operand][step][value]);
            });
            return result;
          };
          f(element, key, x, [&](int v) { return owned[v][key]; });
        });
      };
      take_step<Program>(with_vectors, sums);
      unrolled<2>([&](int key) {
        const auto own = [&](int v) { return owned[v][key]; };
        Program::finish_step(task, at + key, own, sums[0][key], sums[1][key], sums[2][key], product[key]);
      });
    }
  }

  // Takes a whole chunk.
  __device__ __forceinline__ void advance(const Steps& steps, const ColumnOperands& of) {
    float out[2][2][4] = {};
    read(of, out[0], out[1]);
    uint32_t x[2][2][4];
    const auto sums_at = [&](int n, int e, int operand) {
      return load<2>(&of.sums[8 * n + 2 * quad + e + R::includes(operand)][row]);
    };
    const auto input = [&](int v, int n, int e) { return pair_at(&of.inputs[v][8 * n + 2 * quad + e][row]); };
    unrolled<2, 2, 2>([&](int n, int e, int i) {
      const Pack<float, 2> sums = sums_at(n, e, kOfB + i), own = input(R::vector_of(kOfB + i), n, e);
      unrolled<2>([&](int key) { x[i][n][2 * key + e] = rounded(own.values[key] * ex2_approx_ftz(sums.values[key])); });
    });
    add(of, out[0], x[0], kAB), add(of, out[0], x[1], kAK);
    add(of, out[1], x[0], kRB), add(of, out[1], x[1], kRK);
    extend(of, x[0], x[1]);
    const Pack<float, 2> total = load<2>(&of.sums[kSteps][row]);
    const float decays[2] = {ex2_approx_ftz(-total.values[0]), ex2_approx_ftz(-total.values[1])};
    for_all([&](float& m, int key, int) { m *= decays[key]; });

    // `changes` is how the product changes over a step, from before its own gradient of a to before the next one's.
    float changes[2][2][2] = {}, of_a[2][2][2] = {};
    unrolled<2, 2>([&](int n, int e) {
      const int64_t at = steps.at(8 * n + 2 * quad + e) + row;
      float parts[2] = {};
      unrolled<2>([&](int i) {
        const int v = R::vector_of(i);
        const Pack<float, 2> sums = sums_at(n, e, i);
        float gradients[2];
        unrolled<2>([&](int key) {
          gradients[key] = out[i][n][2 * key + e] * ex2_approx_ftz(-sums.values[key]);
          const auto add_own = [&](int of_vector, int product) {
            gradients[key] += input(of_vector, n, e).values[key] * of.own[product][8 * n + 2 * quad + e];
          };
          if (kBack) add_own(kR, i);
          if (!kBack && v == kR) add_own(kB, 0), add_own(kK, 1);
          const float part = input(v, n, e).values[key] * gradients[key];
          parts[key] += part;
          if (v == kA) of_a[key][n][e] = part;
        });
        store<2>(task.gradients[v] + at, rounded_pack<Half, 2>(gradients));
      });
      if (kBack) return store<2>(&task.result(kTerms, at), Pack<float, 2>{parts[0], parts[1]});
      const Pack<float, 2> terms = load<2>(&of.terms[8 * n + 2 * quad + e][row]);
      unrolled<2>([&](int key) { changes[key][n][e] = terms.values[key] - parts[key]; });
    });
    if (kBack) return;
    float rates[2][2][2];
    unrolled<2>([&](int key) {
      float before = product[key].total();
      unrolled<2>([&](int n) {
        const float own = changes[key][n][0] + changes[key][n][1];
        float own_before = before;
        unrolled<4>([&](int lane) {
          const float other = __shfl_sync(~0u, own, lane, 4);
          if (lane < quad) own_before += other;
          before += other;
        });
        unrolled<2>([&](int e) {
          const float rate = ex2_approx_ftz(input(kW, n, e).values[key] * kLog2E<float>);
          const float decay = ex2_approx_ftz(-rate * kLog2E<float>);
          const float of_decay = own_before - of_a[key][n][e];
          rates[n][e][key] = decay < kSmall<float> ? 0 : -rate * of_decay;
          own_before += changes[key][n][e];
        });
      });
      set_product(key, before);
    });
    unrolled<2, 2>([&](int n, int e) {
      const int64_t at = steps.at(8 * n + 2 * quad + e) + row;
      store<2>(task.gradients[kW] + at, rounded_pack<Half, 2>(rates[n][e]));
    });
  }

 private:
  __device__ void set_product(int key, float value) { product[key] = {}, product[key] += value; }
};

template <typename Program, typename T>
__global__ void __launch_bounds__(kThreads, 2) columns_kernel(const Task<T> task) {
  if (!has_instructions_of(80)) return;
  extern __shared__ __align__(16) unsigned char memory[];
  ColumnShared& shared = *reinterpret_cast<ColumnShared*>(memory);
  const Sizes& s = task.s;
  const int64_t matrix = blockIdx.x, chunks = (s.steps + kSteps - 1) / kSteps;
  int count = 0;

  if (threadIdx.x < kGroup) {
    Values<Program> values;
    Steps steps{};
    const auto load_values = [&](int64_t i) {
      if (i >= chunks) return;
      steps = steps_of<Program>(s, matrix, i, chunks, count);
      values.load(task, steps, count);
    };
    load_values(0);
    for (int64_t i = 0; i < chunks; ++i) {
      ColumnOperands& operands = shared.operands[i % 2];
      const bool is_full = count == kSteps;
      wait_for_room(i);
      if (is_full) begin_copies(task, steps, !Program::kBack, operands);
      prepare(shared, values, operands, is_full, [&] { load_values(i + 1); });
      cp_async_wait_all();
      hand_on(i);
    }
  } else {
    ColumnTile<Program> columns(task, matrix);
    columns.for_all([&](float& m, int key, int value) { m = Program::start(task, columns.place(matrix, key, value)); });
    for (int64_t i = 0; i < chunks; ++i) {
      const Steps steps = steps_of<Program>(s, matrix, i, chunks, count);
      const ColumnOperands& operands = shared.operands[i % 2];
      const int64_t first = (Program::kBack ? chunks - 1 - i : i) * kSteps;
      if (!Program::kBack && first % kEvery == 0) columns.multiply_kept(first);
      wait_for_operands(i);
      operands.are_whole ? columns.advance(steps, operands) : columns.walk(steps, operands, count);
      give_back(i, chunks);
      if (Program::kBack && first % kEvery == 0) columns.keep(first);
    }
  }
}

// Returns whether the walk is one for this kernel, which it launched then.
template <typename Program, typename T>
bool launch_columns(Call& call, const Task<T>& task) {
  bool are_aligned = task.s.features == kFeatures;
  for (int v = 0; v < kInputs; ++v) are_aligned &= is_aligned<8>(task.inputs[v]);
  for (int v = 0; v < kDy; ++v) are_aligned &= is_aligned<2>(task.gradients[v]);
  for (int v = 0; v < kComputed; ++v) are_aligned &= is_aligned<4>(task.computed[v]);
  return are_aligned && launch_walk<Program>(call, columns_kernel<Program, T>, sizeof(ColumnShared), task);
}

}  // namespace msops::wkv7::chunks
#endif
