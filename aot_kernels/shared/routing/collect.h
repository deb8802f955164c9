// out[n] = sum over j of weights[n, j] rows[positions[n, j]], in the order of j. Without weights it is a plain sum,
// such as the gradient of tokens that were copied to these rows.
#pragma once

#include "slots.h"

namespace msops::routing {

template <typename T>
struct Sums {
  Slots slots;
  OptionalNumbers<T> weights;  // (tokens, choices), or 1
  const T* rows;
  T* out;  // (tokens, columns)
};

template <typename T>
struct CollectOnCpu {
  using C = Compute<T>;
  Sums<T> all;

  // Index i is a run of columns of a token.
  MSOPS_CPU void operator()(int64_t i) const {
    const Slots& slots = all.slots;
    const int64_t runs = (slots.columns + kRunOfCpu - 1) / kRunOfCpu, token = i / runs, column = i % runs * kRunOfCpu;
    const int64_t count = std::min(kRunOfCpu, slots.columns - column);
    C sums[kRunOfCpu];
    std::fill_n(sums, count, C(0));
    for (int64_t j = 0; j < slots.choices; ++j) {
      const int64_t slot = token * slots.choices + j, row = slots.row(slot);
      if (row < 0) continue;
      const T* const from = all.rows + row * slots.columns + column;
      const T* const next = slots.run_after(slot, all.rows, column, from);
      const C weight = all.weights[slot];
      for_vectors(count, [&](int64_t c, auto n) {
        C numbers[kVector];
        __builtin_prefetch(next + c);
        widen(from + c, numbers, n);
#pragma omp simd
        for (int k = 0; k < n; ++k) sums[c + k] += weight * numbers[k];
      });
    }
    narrow(sums, all.out + token * slots.columns + column, count);
  }
};

#ifdef __CUDACC__
// Index i is a run of columns of a token.
template <int W, typename T>
struct CollectRun {
  using C = Compute<T>;
  static constexpr int kAtOnce = 4;  // rows that are loaded before they are added
  Sums<T> all;

  template <typename I>
  __device__ void operator()(I i) const {
    const Slots& slots = all.slots;
    const Run<W> run(i, slots.columns);
    C sums[W] = {};
    for (int64_t first = 0; first < slots.choices; first += kAtOnce) {
      int64_t rows[kAtOnce];
      Pack<T, W> packs[kAtOnce];
      C weights[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t slot = run.token * slots.choices + first + j;
        rows[j] = first + j < slots.choices ? slots.row(slot) : -1;
        packs[j] = rows[j] >= 0 ? load<W>(all.rows + rows[j] * slots.columns + run.column) : Pack<T, W>{};
        weights[j] = rows[j] >= 0 ? all.weights[slot] : C(0);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0)
          for (int c = 0; c < W; ++c) sums[c] += weights[j] * C(packs[j].values[c]);
    }
    store(all.out + run.token * slots.columns + run.column, rounded_pack<T>(sums));
  }
};
#endif

template <typename T>
void collect(Call& call, const Sums<T>& all) {
  const Slots& slots = all.slots;
  const int64_t size = slots.tokens * slots.columns;
  if (!call.ok() || size == 0) return;
  if (call.is_on_cpu()) {
    const int64_t runs = (slots.columns + kRunOfCpu - 1) / kRunOfCpu;
    const double cost = static_cast<double>(std::min(kRunOfCpu, slots.columns) * (slots.choices + 1));
    return on_cpu(call, slots.tokens * runs, CollectOnCpu<T>{all}, cost);
  }
#ifdef __CUDACC__
  with_width<T>(false, slots.columns, {all.rows, all.out}, [&](auto width) {
    constexpr int W = width;
    on_gpu(call, size / W, size, CollectRun<W, T>{all});
  });
#endif
}

}  // namespace msops::routing
