// What a row of `out` is computed from, the samples of a query and a head, and the gradients of their locations and
// weights.
#pragma once

#include "../common/sum.h"
#include "samples.h"

namespace msops::ms_deform_attn {

// Computes N features of a row. kShares lanes take turns along the samples.
template <int N, int kShares, typename T>
struct Forward {
  using C = Compute<T>;
  Task<T> task;
  T* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index item = i / kShares, packs = static_cast<Index>(task.s.features / N), row = item / packs;
    const Index f = (item - row * packs) * N;
    C sums[N] = {};
    for (int64_t k = static_cast<int64_t>(i % kShares); k < task.s.of_row(); k += kShares) {
      const Sample<T> sample(task, row, k);
      const C nothing = sample.weight * sample.nothing();
      for (int j = 0; j < N; ++j) sums[j] += nothing;
      for (int c = 0; c < 4; ++c) {
        if (!sample.corners.from[c]) continue;
        const C factor = sample.weight * sample.corners.share[c];
        const Pack<T, N> pack = load<N>(sample.corners.from[c] + f);
        for (int j = 0; j < N; ++j) sums[j] += factor * C(pack.values[j]);
      }
    }
    for (int j = 0; j < N; ++j) sums[j] = team_sum<kShares>(sums[j]);
    if (i % kShares == 0) store(out + int64_t{row} * task.s.features + f, rounded_pack<T>(sums));
  }
};

// On the CPU, loops along some features vectorize.
template <typename T>
struct ForwardOnCpu {
  using C = Compute<T>;
  static constexpr int64_t kRun = 64;
  Task<T> task;
  T* out;

  MSOPS_CPU void operator()(int64_t row) const {
    for (int64_t f = 0; f < task.s.features; f += kRun) {
      const int64_t count = std::min(kRun, task.s.features - f);
      C sums[kRun] = {};
      for (int64_t k = 0; k < task.s.of_row(); ++k) {
        const Sample<T> sample(task, row, k);
        const C nothing = sample.weight * sample.nothing();
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) sums[j] += nothing;
        for (int c = 0; c < 4; ++c) {
          const T* const from = sample.corners.from[c];
          const C factor = sample.weight * sample.corners.share[c];
          if (!from) continue;
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) sums[j] += factor * C(from[f + j]);
        }
      }
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) assign(out[row * task.s.features + f + j], sums[j]);
    }
  }
};

// Computes the gradients of a row's locations and weights. kLanes lanes take turns along packs of N features.
template <int N, int kLanes, typename T>
struct BackwardOfRow {
  using C = Compute<T>;
  Task<T> task;
  const T* dout;
  Numbers<T> dlocations, dweights;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const int64_t row = i / kLanes, lane = i % kLanes;
    for (int64_t k = 0; k < task.s.of_row(); ++k) {
      const Sample<T> sample(task, row, k);
      C products[4] = {};
      for (int64_t f = lane * N; f < task.s.features; f += kLanes * N) {
        const Pack<T, N> gradient = load<N>(dout + row * task.s.features + f);
        for (int c = 0; c < 4; ++c) {
          if (!sample.corners.from[c]) continue;
          const Pack<T, N> pack = load<N>(sample.corners.from[c] + f);
          for (int j = 0; j < N; ++j) products[c] += C(gradient.values[j]) * C(pack.values[j]);
        }
      }
      team_sum(products, kLanes);
      if (lane == 0) write(row * task.s.of_row() + k, sample, products);
    }
  }

  // Writes the gradients of a sample, given the product of each corner and the gradient of the row.
  MSOPS_BOTH void write(int64_t at, const Sample<T>& sample, const C (&products)[4]) const {
    const Corners<T>& corners = sample.corners;
    C dweight = sample.nothing(), dx = dweight, dy = dweight;
    for (int c = 0; c < 4; ++c) dweight += corners.share[c] * products[c];
    for (int side = 0; side < 2; ++side) {
      dx += corners.down[side] * (products[2 * side + 1] - products[2 * side]);
      dy += corners.across[side] * (products[2 + side] - products[side]);
    }
    dweights.set(at, dweight);
    dlocations.set(2 * at, sample.weight * C(sample.level.width) * dx);
    dlocations.set(2 * at + 1, sample.weight * C(sample.level.height) * dy);
  }
};

template <typename T>
struct BackwardOfRowOnCpu {
  using C = Compute<T>;
  static constexpr int kSums = 16;  // of a product: each of every 16th feature
  BackwardOfRow<1, 1, T> of;

  MSOPS_CPU void operator()(int64_t row) const {
    const Sizes& s = of.task.s;
    const T* const gradient = of.dout + row * s.features;
    for (int64_t k = 0; k < s.of_row(); ++k) {
      const Sample<T> sample(of.task, row, k);
      C products[4];
      for (int c = 0; c < 4; ++c) products[c] = product(gradient, sample.corners.from[c], s.features);
      of.write(row * s.of_row() + k, sample, products);
    }
  }

 private:
  static MSOPS_CPU C product(const T* a, const T* b, int64_t n) {
    if (!b) return 0;
    C sums[kSums] = {}, total = 0;
    int64_t j = 0;
    for (; j + kSums <= n; j += kSums)
#pragma omp simd
      for (int w = 0; w < kSums; ++w) sums[w] += C(a[j + w]) * C(b[j + w]);
    for (; j < n; ++j) total += C(a[j]) * C(b[j]);
    for (const C sum : sums) total += sum;
    return total;
  }
};

}  // namespace msops::ms_deform_attn
