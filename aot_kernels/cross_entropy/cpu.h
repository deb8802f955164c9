// On the CPU, a thread takes a row at a time, in runs that stay in its first cache.
#pragma once

#include "../common/exponential.h"
#include "../common/parallel.h"
#include "../common/sum.h"
#include "loss.h"

namespace msops::cross_entropy {

constexpr int64_t kRun = 1024;  // elements
constexpr int kLanes = 16;      // a run is computed in whole packs of so many elements

MSOPS_CPU int64_t in_packs(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Writes n elements of a row as x_j, and their derivatives if `derivatives` is not null.
template <typename T>
MSOPS_CPU void cap(Compute<T> softcap, int64_t n, const T* logits, Compute<T>* x, Compute<T>* derivatives) {
  using C = Compute<T>;
  if (softcap > 0) {
    const C inverse = 1 / softcap;
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      const C t = Exponential<C>::tanh(C(logits[k]) * inverse);
      x[k] = softcap * t;
      if (derivatives) derivatives[k] = 1 - t * t;
    }
  } else {
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) x[k] = C(logits[k]);
  }
}

template <typename T, bool kGeneral>
struct LossOfRowOnCpu {
  using C = Compute<T>;
  using Weight = typename Loss<T, kGeneral>::Weight;
  Loss<T, kGeneral> loss;
  C* losses;
  RowStats<C>* stats;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t label = loss.labels[row];
    losses[row] = 0, stats[row] = {};
    if (label != loss.ignored) {
      RowSums<C> sums;
      const T* from = loss.logits + row * loss.classes;
      C own = 0;
      if (loss.is_class(label)) cap(loss.softcap, 1, from + label, &own, static_cast<C*>(nullptr));
      for (int64_t j = 0; j < loss.classes; j += kRun)
        add(sums, std::min(kRun, loss.classes - j), from + j, loss.weight ? loss.weight + j : nullptr, own);
      losses[row] = loss.of_row(label, own, sums);
      stats[row] = {sums.max, 1 / sums.sum};
    }
    loss.store_lse(row, stats[row]);
  }

  MSOPS_CPU void add(RowSums<C>& sums, int64_t n, const T* from, const Weight* weight, C own) const {
    C x[kRun];
    cap(loss.softcap, n, from, x, static_cast<C*>(nullptr));
    const int64_t padded = in_packs(n);
    std::fill(x + n, x + padded, C(-HUGE_VAL));  // e^-infinity is 0
    C most = sums.max, sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t k = 0; k < padded; ++k) most = x[k] > most ? x[k] : most;
    const C shift = most == C(-HUGE_VAL) ? C(0) : most;  // infinity - infinity would be NaN
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < padded; ++k) sum += Exponential<C>::exp(x[k] - shift);
    sums.sum = sums.sum * Exponential<C>::exp(sums.max - shift) + sum;
    sums.max = most;
    if (loss.smoothing > 0) {
      const C reference = loss.reference(own);
      C weights = 0, lost = 0;
      if (weight) {
#pragma omp simd reduction(+ : weights, lost)
        for (int64_t k = 0; k < n; ++k) weights += C(weight[k]), lost += C(weight[k]) * (x[k] - reference);
      } else {
#pragma omp simd reduction(+ : lost)
        for (int64_t k = 0; k < n; ++k) lost += x[k] - reference;
        weights = C(n);
      }
      sums.weights += weights, sums.below += lost;
    }
  }
};

// This body has one index, so that it runs as other loops do (see on_threads).
template <typename T, bool kGeneral>
struct TotalsOnCpu {
  using C = Compute<T>;
  Loss<T, kGeneral> loss;
  const C* losses;
  const RowStats<C>* stats;
  C *result, *totals;

  MSOPS_CPU void operator()(int64_t) const {
    Sum<C> cross, weight, rows, squares, of_classes;
    for (int64_t i = 0; i < (loss.reduction == Reduction::kNone ? 0 : loss.rows); ++i) {
      const Totals<C> row = loss.totals_of(loss.labels[i], losses[i], stats[i]);
      cross += row.cross, weight += row.weight, rows += row.rows, squares += row.squares;
    }
    const bool weighted = loss.weight && loss.smoothing > 0;
    for (int64_t j = 0; weighted && j < loss.classes; ++j) of_classes += C(loss.weight[j]);
    loss.finish({cross.total(), weight.total(), rows.total(), squares.total()},
                weighted ? of_classes.total() : C(loss.classes), result, totals);
  }
};

template <typename T, bool kGeneral>
struct GradientOfRowOnCpu {
  using C = Compute<T>;
  using Weight = typename Loss<T, kGeneral>::Weight;
  Loss<T, kGeneral> loss;
  const RowStats<C>* stats;
  const C *totals, *dloss;
  bool is_per_row;  // whether dloss has an element for each row
  T* dlogits;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t label = loss.labels[row];
    T* to = dlogits + row * loss.classes;
    if (label == loss.ignored) return static_cast<void>(std::fill_n(to, loss.classes, T(0.0f)));
    const T* from = loss.logits + row * loss.classes;
    const Slope<C> slope = loss.slope(row, label, stats[row], totals, dloss[is_per_row ? row : 0]);
    for (int64_t j = 0; j < loss.classes; j += kRun)
      run(slope, stats[row].max, std::min(kRun, loss.classes - j), label - j, from + j,
          loss.weight ? loss.weight + j : nullptr, to + j);
  }

  // `label` is the label's place in this run of n elements, if it is one of them.
  MSOPS_CPU void run(const Slope<C>& slope, C max, int64_t n, int64_t label, const T* from, const Weight* weight,
                     T* to) const {
    C x[kRun], derivatives[kRun];
    cap(loss.softcap, n, from, x, derivatives);
    std::fill(x + n, x + in_packs(n), max);
    for (int64_t k = 0; k < n; k += kLanes)
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane)
        x[k + lane] = slope.exponential * Exponential<C>::exp(x[k + lane] - max);
    if (weight && slope.uniform != 0) {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) x[k] -= slope.uniform * C(weight[k]);
    } else if (slope.uniform != 0) {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) x[k] -= slope.uniform;
    }
    if (0 <= label && label < n) x[label] -= slope.label;
    if (loss.softcap > 0)
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) x[k] *= derivatives[k];
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) assign(to[k], x[k]);
  }
};

}  // namespace msops::cross_entropy
