// The loss of one row and its gradient. A row of logits x_j of V classes has the label y; w are the weights of classes,
// e is the label smoothing, z the z-loss and s the softcap:
//
//   x_j   = s tanh(logits_j / s), or logits_j if s is 0
//   lse   = log sum_j e^x_j = max + log(sum),  sum = sum_j e^(x_j - max)
//   cross = (1 - e) w_y (lse - x_y) + e / V sum_j w_j (lse - x_j)
//   loss  = sum over rows of cross / total weight + z lse^2 / number of rows
//
// If the losses are not averaged, total weight and number of rows are 1.
#pragma once

#include <type_traits>

#include "../common/call.h"
#include "../common/functions.h"
#include "labels.h"

namespace msops::cross_entropy {

enum class Reduction : int { kNone, kSum, kMean };

// RowSums is what a row's logits sum up to.
template <typename C>
struct RowSums {
  C max = C(-HUGE_VAL), sum = 0;
  C weights = 0, below = 0;  // for label smoothing: the sums of w_j and of w_j (x_j - reference)
};

// RowStats is what the gradient needs of a row: the maximum of x, and the softmax of the element that has it, 1 / sum.
template <typename C>
struct RowStats {
  C max = 0, share = 1;

  MSOPS_BOTH C lse() const { return max + log1p(1 / share - 1); }  // glibc's log needs version 2.29
};

// Totals are sums over the rows that count.
template <typename C>
struct Totals {
  static constexpr int kNumbers = 4;
  C cross = 0, weight = 0, rows = 0, squares = 0;  // squares: of lse

  MSOPS_BOTH void store(C* to) const { to[0] = cross, to[1] = weight, to[2] = rows, to[3] = squares; }
  MSOPS_BOTH Totals& operator+=(const Totals& other) {
    cross += other.cross, weight += other.weight, rows += other.rows, squares += other.squares;
    return *this;
  }
};

// Slope gives the gradient with respect to x_j: exponential * e^(x_j - max) - uniform * w_j, and less by `label` at the
// label.
template <typename C>
struct Slope {
  C exponential = 0, label = 0, uniform = 0;
};

// LseOfRows is each row's lse, where it is a result, and the gradient with respect to it.
template <typename C, bool kGeneral>
struct LseOfRows {};
template <typename C>
struct LseOfRows<C, true> {
  C* lse_of_rows = nullptr;
  const C* dlse_of_rows = nullptr;
};

// If kGeneral, the weights are of the computing type, and lse may be a result.
template <typename T, bool kGeneral = false>
struct Loss : LseOfRows<Compute<T>, kGeneral> {
  using C = Compute<T>;
  using Weight = std::conditional_t<kGeneral, C, T>;
  int64_t rows, classes;
  const T* logits;
  Labels labels;
  const Weight* weight;  // null if all weights are 1
  int64_t ignored;
  Reduction reduction;
  C smoothing, z, softcap;

  bool is_plain() const { return smoothing == 0 && softcap == 0; }
  MSOPS_BOTH bool is_class(int64_t label) const {
    return static_cast<uint64_t>(label) < static_cast<uint64_t>(classes);
  }
  MSOPS_BOTH C weight_of(int64_t label) const {
    if (!is_class(label)) return C(NAN);
    return weight ? C(weight[label]) : C(1);
  }
  // Label smoothing sums w_j (x_j - reference), so that few digits cancel. The reference is x_y where that is finite.
  static MSOPS_BOTH C reference(C own) { return own - own == 0 ? own : C(0); }

  // Returns the cross-entropy of a row with x_y = own.
  MSOPS_BOTH C cross(int64_t label, C own, const RowSums<C>& row) const {
    const C log_sum = log1p(row.sum - 1);  // the sum is at least 1
    C result = (1 - smoothing) * weight_of(label) * (log_sum - (own - row.max));
    if (smoothing > 0)
      result += smoothing / C(classes) * (row.weights * (log_sum + (row.max - reference(own))) - row.below);
    return is_class(label) ? result : C(NAN);
  }

  // Returns the loss of a row or, where losses are added up, its cross-entropy.
  MSOPS_BOTH C of_row(int64_t label, C own, const RowSums<C>& row) const {
    C result = cross(label, own, row);
    if (z > 0 && reduction == Reduction::kNone) {
      const C lse = row.max + log1p(row.sum - 1);
      result += z * lse * lse;
    }
    return result;
  }

  // Stores the lse of row i, if it is a result.
  MSOPS_BOTH void store_lse([[maybe_unused]] int64_t i, [[maybe_unused]] const RowStats<C>& stats) const {
    if constexpr (kGeneral)
      if (this->lse_of_rows) this->lse_of_rows[i] = stats.lse();
  }

  // Returns what a row adds to the totals, given its cross-entropy.
  MSOPS_BOTH Totals<C> totals_of(int64_t label, C cross, const RowStats<C>& stats) const {
    if (label == ignored) return {};
    const C lse = z > 0 ? stats.lse() : C(0);
    return {cross, weight ? weight_of(label) : C(1), C(1), lse * lse};
  }

  // Stores the loss, unless it is one for each row, and what the gradient needs of the totals. `of_classes` is the sum
  // of all weights of classes.
  MSOPS_BOTH void finish(const Totals<C>& sums, C of_classes, C* loss, C* totals) const {
    const bool is_mean = reduction == Reduction::kMean;
    const C by_weight = is_mean ? sums.weight : C(1), by_rows = is_mean ? sums.rows : C(1);
    if (reduction != Reduction::kNone)
      *loss = by_rows == 0 ? C(0) : sums.cross / by_weight + z * sums.squares / by_rows;
    totals[0] = by_weight, totals[1] = by_rows, totals[2] = of_classes / C(classes > 0 ? classes : 1);
  }

  // Returns the gradient of row i, which is not ignored. `dloss` is the gradient of the loss.
  MSOPS_BOTH Slope<C> slope([[maybe_unused]] int64_t i, int64_t label, const RowStats<C>& stats, const C* totals,
                            C dloss) const {
    const C scale = dloss / totals[0], of_label = scale * (1 - smoothing) * weight_of(label);
    const C of_square = z > 0 ? 2 * z * stats.lse() * (dloss / totals[1]) : C(0);
    Slope<C> result = {(of_label + scale * smoothing * totals[2] + of_square) * stats.share, of_label,
                       scale * smoothing / C(classes)};
    if constexpr (kGeneral)
      if (this->dlse_of_rows) result.exponential += this->dlse_of_rows[i] * stats.share;
    return result;
  }
};

}  // namespace msops::cross_entropy
