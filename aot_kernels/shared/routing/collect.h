// out[n] = sum over j of weights[n, j] rows[positions[n, j]], in the order of j. Without weights it is a plain sum,
// such as the gradient of tokens that were copied to these rows.
#pragma once

#include "slots.h"
#ifdef __CUDACC__
#include "../../common/gpu/divisor.h"
#include "../../common/launch.h"
#endif

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
      const int64_t slot = run.token * slots.choices + first;
      int64_t rows[kAtOnce];
      Pack<T, W> packs[kAtOnce];  // what has no row is not set, so that loads need not wait for each other
      C weights[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) rows[j] = first + j < slots.choices ? slots.row(slot + j) : -1;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0) packs[j] = load<W>(all.rows + rows[j] * slots.columns + run.column);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0) weights[j] = all.weights[slot + j];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0)
          for (int c = 0; c < W; ++c) sums[c] += weights[j] * C(packs[j].values[c]);
    }
    store_at_once(all.out + run.token * slots.columns + run.column, rounded_pack<T>(sums));
  }
};

constexpr int kCollectThreads = 256, kPacksOfLane = 4;

// A warp takes kPacksOfLane packs a lane of a token's columns. Its lanes load the token's positions at once.
template <int W, typename T>
__global__ void __launch_bounds__(kCollectThreads) collect_kernel(Sums<T> all, Divisor runs) {
  using C = Compute<T>;
  constexpr int kAtOnce = 2;  // rows that are loaded before they are added
  const Slots& slots = all.slots;
  const int lane = threadIdx.x % 32;
  int run;
  const int64_t token = runs.divide(blockIdx.x * (kCollectThreads / 32) + threadIdx.x / 32, &run);
  if (token >= slots.tokens) return;
  const int64_t column = (int64_t{run} * kPacksOfLane * 32 + lane) * W;
  bool inside[kPacksOfLane];
#pragma unroll
  for (int p = 0; p < kPacksOfLane; ++p) inside[p] = column + p * 32 * W < slots.columns;
  C sums[kPacksOfLane][W] = {};
  for (int64_t first = 0; first < slots.choices; first += 32) {
    const int64_t slot = token * slots.choices + first;
    const int64_t own_row = first + lane < slots.choices ? slots.row(slot + lane) : -1;
    const int count = slots.choices - first < 32 ? static_cast<int>(slots.choices - first) : 32;
    for (int begin = 0; begin < count; begin += kAtOnce) {
      int64_t rows[kAtOnce];
      Pack<T, W> packs[kAtOnce][kPacksOfLane];  // what has no row is not set
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        rows[j] = __shfl_sync(~0u, own_row, begin + j);  // is -1 after the last slot; 32 is even
        if (rows[j] < 0) continue;
        const T* const from = all.rows + rows[j] * slots.columns + column;
#pragma unroll
        for (int p = 0; p < kPacksOfLane; ++p)
          if (inside[p]) packs[j][p] = load<W>(from + p * 32 * W);
      }
      C weights[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0) weights[j] = all.weights[slot + begin + j];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (rows[j] < 0) continue;
#pragma unroll
        for (int p = 0; p < kPacksOfLane; ++p)
#pragma unroll
          for (int c = 0; c < W; ++c) sums[p][c] += weights[j] * C(packs[j][p].values[c]);
      }
    }
  }
  T* const to = all.out + token * slots.columns + column;
#pragma unroll
  for (int p = 0; p < kPacksOfLane; ++p)
    if (inside[p]) store_at_once(to + p * 32 * W, rounded_pack<T>(sums[p]));
}

// Launches that kernel, and returns whether it did, for rows that give most lanes of a warp all their packs.
template <int W, typename T>
bool collect_by_warps([[maybe_unused]] Call& call, [[maybe_unused]] const Sums<T>& all) {
  if constexpr (W == kPackWidth<T>) {
    constexpr int64_t kPacks = 32 * kPacksOfLane, kWarps = kCollectThreads / 32;
    const int64_t packs = all.slots.columns / W, runs = (packs - 1) / kPacks + 1, tokens = all.slots.tokens;
    if (packs < kPacks * 3 / 4 || tokens > (INT32_MAX - kWarps) / runs) return false;
    launch(call, collect_kernel<W, T>, (tokens * runs - 1) / kWarps + 1, kCollectThreads, 0, all, Divisor(runs));
    return true;
  }
  return false;
}
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
    if (!collect_by_warps<W>(call, all)) on_gpu(call, size / W, size, CollectRun<W, T>{all});
  });
#endif
}

}  // namespace msops::routing
