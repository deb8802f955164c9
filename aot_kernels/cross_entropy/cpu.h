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
    widen(logits, x, n);
  }
}

// Writes a_j w_j of n probabilities q_j, with a_j = kept q_j + spread.
template <typename T>
MSOPS_CPU void weigh(Compute<T> kept, Compute<T> spread, int64_t n, const T* q, const Compute<T>* weight,
                     Compute<T>* a) {
  using C = Compute<T>;
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) a[k] = kept * C(q[k]) + spread;
  if (weight)
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) a[k] *= weight[k];
}

template <typename T, Form kForm>
struct LossOfRowOnCpu {
  using C = Compute<T>;
  using Weight = typename Loss<T, kForm>::Weight;
  Loss<T, kForm> loss;
  C* losses;
  RowStats<C>* stats;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t label = loss.label_of(row);
    losses[row] = 0, stats[row] = {};
    RowSums<C> sums;
    if (label != loss.ignored) {
      const T* from = loss.logits + row * loss.classes;
      C own = 0;
      if (loss.is_class(label)) cap(loss.softcap, 1, from + label, &own, static_cast<C*>(nullptr));
      for (int64_t j = 0; j < loss.classes; j += kRun)
        add(sums, row, j, std::min(kRun, loss.classes - j), from + j, loss.weight ? loss.weight + j : nullptr, own);
      losses[row] = loss.of_row(label, own, sums);
      stats[row] = {sums.max, 1 / sums.sum};
    }
    loss.store_of_form(row, stats[row], sums);
  }

  // Adds a run of n elements of a row, the first of which has the place j.
  MSOPS_CPU void add(RowSums<C>& sums, [[maybe_unused]] int64_t row, [[maybe_unused]] int64_t j, int64_t n,
                     const T* from, const Weight* weight, C own) const {
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
    if constexpr (kForm == Form::kProbabilities) {
      C a[kRun], mass = 0, below = 0;
      weigh(1 - loss.smoothing, loss.smoothing / C(loss.classes), n, loss.probabilities + row * loss.classes + j,
            weight, a);
#pragma omp simd reduction(+ : mass, below)
      for (int64_t k = 0; k < n; ++k) mass += a[k], below += a[k] * (x[k] - shift);
      sums.below += sums.weights * ((sums.max == C(-HUGE_VAL) ? C(0) : sums.max) - shift) + below;
      sums.weights += mass;
    }
    sums.max = most;
    if (kForm != Form::kProbabilities && loss.smoothing > 0) {
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
template <typename T, Form kForm>
struct TotalsOnCpu {
  using C = Compute<T>;
  Loss<T, kForm> loss;
  const C* losses;
  const RowStats<C>* stats;
  C *result, *totals;

  MSOPS_CPU void operator()(int64_t) const {
    Sum<C> cross, weight, rows, squares, of_classes;
    for (int64_t i = 0; i < (loss.reduction == Reduction::kNone ? 0 : loss.rows); ++i) {
      const Totals<C> row = loss.totals_of(loss.label_of(i), losses[i], stats[i]);
      cross += row.cross, weight += row.weight, rows += row.rows, squares += row.squares;
    }
    const bool weighted = loss.weight && loss.smoothing > 0;
    for (int64_t j = 0; weighted && j < loss.classes; ++j) of_classes += C(loss.weight[j]);
    loss.finish({cross.total(), weight.total(), rows.total(), squares.total()},
                weighted ? of_classes.total() : C(loss.classes), result, totals);
  }
};

template <typename T, Form kForm>
struct GradientOfRowOnCpu {
  using C = Compute<T>;
  using Weight = typename Loss<T, kForm>::Weight;
  Loss<T, kForm> loss;
  const RowStats<C>* stats;
  const C *totals, *dloss;
  bool is_per_row;       // whether dloss has an element for each row
  T *dlogits, *dlabels;  // those of probabilities; one of the two may be null

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t label = loss.label_of(row), first = row * loss.classes;
    if (label == loss.ignored) return static_cast<void>(std::fill_n(dlogits + first, loss.classes, T(0.0f)));
    const Slope<C> slope = loss.slope(row, label, stats[row], totals, dloss[is_per_row ? row : 0]);
    for (int64_t j = 0; j < loss.classes; j += kRun) {
      const int64_t n = std::min(kRun, loss.classes - j);
      const Weight* const weight = loss.weight ? loss.weight + j : nullptr;
      if constexpr (kForm == Form::kProbabilities)
        if (dlabels) run_of_labels(slope.label, stats[row], n, loss.logits + first + j, weight, dlabels + first + j);
      if (dlogits) run(slope, stats[row].max, n, label - j, loss.logits + first + j, weight, first + j);
    }
  }

  MSOPS_CPU void run_of_labels(C scale, const RowStats<C>& of_row, int64_t n, const T* from, const C* weight,
                               T* to) const {
    const C log_sum = of_row.log_sum();
    C x[kRun];
    cap(loss.softcap, n, from, x, static_cast<C*>(nullptr));
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) x[k] = scale * (log_sum + (of_row.max - x[k]));
    if (weight)
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) x[k] *= weight[k];
    narrow(x, to, n);
  }

  // `label` is the label's place in this run of n elements, if it is one of them, and the run begins at `first`.
  MSOPS_CPU void run(const Slope<C>& slope, C max, int64_t n, int64_t label, const T* from, const Weight* weight,
                     int64_t first) const {
    C x[kRun], derivatives[kRun];
    T* const to = dlogits + first;
    cap(loss.softcap, n, from, x, derivatives);
    std::fill(x + n, x + in_packs(n), max);
    for (int64_t k = 0; k < n; k += kLanes)
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane)
        x[k + lane] = slope.exponential * Exponential<C>::exp(x[k + lane] - max);
    if constexpr (kForm == Form::kProbabilities) {
      C a[kRun];
      weigh(slope.label, slope.uniform, n, loss.probabilities + first, weight, a);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) x[k] -= a[k];
    } else if (weight && slope.uniform != 0) {
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
    narrow(x, to, n);
  }
};

}  // namespace msops::cross_entropy
