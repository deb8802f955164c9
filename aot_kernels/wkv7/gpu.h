// On the GPU, a warp walks with some rows or columns of a matrix in its registers. It needs no other warp: heads, and
// rows or columns of one head, are as many warps as there are. Four lanes share a row: each has a quarter of its
// elements, of several rows, so that an element of a vector that it loads from shared memory serves all of them. The
// vectors of the next steps are on their way to registers meanwhile.
#pragma once

#include "programs.h"
#ifdef __CUDACC__
#include "../common/gpu/unrolled.h"

namespace msops::wkv7 {

constexpr int kWarp = 32, kLanes = 4;  // lanes that share a row

// Tile says what a warp holds, for up to kSize features: kEach elements of each of kRows rows in a lane.
template <int kSize_, typename T>
struct Tile {
  using C = Compute<T>;
  static constexpr int kSize = kSize_, kEach = kSize / kLanes;
  static constexpr int kRows = (sizeof(C) == 8 ? 32 : 64) / kEach, kOwn = kWarp / kLanes * kRows;  // rows of the warp
  static constexpr int kPack = kPackWidth<C>, kPacks = kEach / kPack;
  static constexpr int kSteps = sizeof(C) == 8 || kSize > 64 ? 1 : 2;  // of a load
  static constexpr int kOfLane = kSize / kWarp;                        // elements of a vector that a lane loads
};

// Ahead holds some steps' vectors on their way to shared memory.
template <typename Program, typename L, typename T>
struct Ahead {
  using C = Compute<T>;
  T inputs[L::kSteps][kInputs][L::kOfLane];
  C computed[L::kSteps][kComputed][L::kOfLane];

  static constexpr __device__ bool takes(int v) { return Program::sums_over(v) || Program::owns(v); }

  // Loads the i-th steps of the walk and those after it. Lanes have neighbouring elements.
  __device__ __forceinline__ void load(const Task<T>& task, int64_t begin, int64_t i) {
    const Sizes& s = task.s;
    unrolled<L::kSteps, L::kOfLane>([&](int step, int n) {
      const int feature = static_cast<int>(threadIdx.x) + kWarp * n;
      const bool is_inside = i + step < s.steps && feature < s.features;
      const int64_t at = begin + (Program::kBack ? s.steps - 1 - i - step : i + step) * s.stride() + feature;
      unrolled<kInputs>([&](int v) {
        if (takes(v)) inputs[step][v][n] = is_inside ? task.inputs[v][at] : T(0);
      });
      unrolled<kComputed>([&](int v) {
        if (takes(kInputs + v)) computed[step][v][n] = is_inside ? task.computed[v][at] : C(0);
      });
    });
  }

  __device__ __forceinline__ void store(C (&vectors)[L::kSteps][kVectors][L::kSize]) const {
    unrolled<L::kSteps, L::kOfLane>([&](int step, int n) {
      const int feature = static_cast<int>(threadIdx.x) + kWarp * n;
      unrolled<kInputs>([&](int v) {
        if (takes(v) && v != kW) vectors[step][v][feature] = C(inputs[step][v][n]);
      });
      unrolled<kComputed>([&](int v) {
        if (takes(kInputs + v)) vectors[step][kInputs + v][feature] = computed[step][v][n];
      });
      const C rate = std::exp(C(inputs[step][kW][n]));
      vectors[step][kW][feature] = Activations<T>::exp(-rate);
      if (Program::owns(kRate)) vectors[step][kRate][feature] = rate;
    });
  }
};

// Blocks are the warps of all matrices.
template <typename Program, typename L, typename T>
__global__ void __launch_bounds__(kWarp, 8) walk_kernel(const Task<T> task) {
  using C = Compute<T>;
  __shared__ __align__(16) C vectors[L::kSteps][kVectors][L::kSize];
  const Sizes& s = task.s;
  const int features = static_cast<int>(s.features), strips = (features + L::kOwn - 1) / L::kOwn;
  const int64_t matrix = blockIdx.x / strips, begin = s.begin(matrix);
  const int lane = threadIdx.x % kLanes, first = blockIdx.x % strips * L::kOwn + threadIdx.x / kLanes * L::kRows;
  const int own = first + lane;  // the row whose results this lane stores, if it has one
  const bool stores = lane < L::kRows && own < features;
  const auto index_of = [=](int pack, int e) { return (pack * kLanes + lane) * L::kPack + e; };  // along sums
  // Returns where an element is in an array of matrices.
  const auto place = [=](int64_t of, int row, int index) {
    return (of * features + (Program::kRows ? first + row : index)) * features + (Program::kRows ? index : first + row);
  };
  C m[L::kRows][L::kPacks][L::kPack];
  unrolled<L::kRows, L::kPacks, L::kPack>([&](int row, int pack, int e) {
    const int index = index_of(pack, e);
    m[row][pack][e] =
        first + row < features && index < features ? Program::start(task, place(matrix, row, index)) : C(0);
  });
  Sum<C> product;

  // Adds up the rows' sums over their lanes, and returns that of the row whose results this lane stores.
  const auto reduce = [&](C(&sums)[L::kRows]) {
    C mine = 0;
    unrolled<L::kRows>([&](int row) {
      sums[row] = team_sum<kLanes>(sums[row]);
      if (row == lane) mine = sums[row];
    });
    return mine;
  };

  Ahead<Program, L, T> ahead;
  ahead.load(task, begin, 0);
  for (int64_t i = 0; i < s.steps; i += L::kSteps) {
    __syncwarp();  // all lanes have read the steps before
    ahead.store(vectors);
    ahead.load(task, begin, i + L::kSteps);
    __syncwarp();
#pragma unroll 1
    for (int step = 0; step < L::kSteps && i + step < s.steps; ++step) {
      const int64_t of_step = Program::kBack ? s.steps - 1 - i - step : i + step;
      const C(&here)[kVectors][L::kSize] = vectors[step];
      const auto load_pack = [&](Pack<C, L::kPack>(&x)[kVectors], int pack) {
        unrolled<kVectors>([&](int v) {
          if (Program::sums_over(v)) x[v] = load<L::kPack>(here[v] + index_of(pack, 0));
        });
      };
      Pack<C, L::kRows> owned[kVectors];
      unrolled<kVectors>([&](int v) {
        if (Program::owns(v)) owned[v] = load<L::kRows>(here[v] + first);
      });

      if constexpr (!Program::kRows && !Program::kBack)
        if (of_step % kEvery == 0) {
          C sums[L::kRows] = {};
          unrolled<L::kRows, L::kPacks, L::kPack>([&](int row, int pack, int e) {
            const int index = index_of(pack, e);
            if (first + row < features && index < features)
              sums[row] += m[row][pack][e] * task.kept[place(task.kept_matrix(matrix, of_step), row, index)];
          });
          product = {};
          product += reduce(sums);
        }

      // Phase 1: the sums before the update.
      C sums[L::kRows] = {}, more[L::kRows] = {}, after[L::kRows] = {};
      unrolled<L::kPacks>([&](int pack) {
        Pack<C, L::kPack> x[kVectors];
        load_pack(x, pack);
        unrolled<L::kPack, L::kRows>([&](int e, int row) {
          const auto at = [&](int v) { return x[v].values[e]; };
          m[row][pack][e] = Program::begin(m[row][pack][e], at, [&](int v) { return owned[v].values[row]; });
          Program::add(m[row][pack][e], at, sums[row], more[row]);
        });
      });
      const C mine = reduce(sums), mine_more = Program::kBack ? reduce(more) : C(0);

      // Phase 2: the update, and the sum after it.
      unrolled<L::kPacks>([&](int pack) {
        Pack<C, L::kPack> x[kVectors];
        load_pack(x, pack);
        unrolled<L::kPack, L::kRows>([&](int e, int row) {
          const auto at = [&](int v) { return x[v].values[e]; };
          m[row][pack][e] =
              Program::update(m[row][pack][e], at, [&](int v) { return owned[v].values[row]; }, sums[row], more[row]);
          Program::add_after(m[row][pack][e], at, after[row]);
        });
      });
      const C mine_after = Program::kBack ? C(0) : reduce(after);

      // Phase 3: the results.
      if (stores) {
        const int64_t at = begin + of_step * s.stride() + own;
        Program::finish_step(task, at, [&](int v) { return here[v][own]; }, mine, mine_more, mine_after, product);
      }
      if constexpr (!Program::kRows && Program::kBack)
        if (of_step % kEvery == 0)
          unrolled<L::kRows, L::kPacks, L::kPack>([&](int row, int pack, int e) {
            const int index = index_of(pack, e);
            if (first + row < features && index < features)
              task.kept[place(task.kept_matrix(matrix, of_step), row, index)] = m[row][pack][e];
          });
    }
  }

  if constexpr (Program::kRows)
    unrolled<L::kRows, L::kPacks, L::kPack>([&](int row, int pack, int e) {
      const int index = index_of(pack, e);
      if (first + row < features && index < features) Program::finish(task, place(matrix, row, index), m[row][pack][e]);
    });
}

template <typename Program, int kSize, typename T>
void launch_walk(Call& call, const Task<T>& task) {
  using L = Tile<kSize, T>;
  const Sizes& s = task.s;
  launch(call, walk_kernel<Program, L, T>, s.matrices() * ((s.features + L::kOwn - 1) / L::kOwn), kWarp, 0, task);
}

}  // namespace msops::wkv7
#endif
