// The loss of one row and its gradient. A row of logits x_j of V classes has the label y; w are the weights of classes,
// e is the label smoothing, z the z-loss and s the softcap:
//
//   x_j   = s tanh(logits_j / s), or logits_j if s is 0
//   lse   = log sum_j e^x_j = max + log(sum),  sum = sum_j e^(x_j - max)
//   cross = (1 - e) w_y (lse - x_y) + e / V sum_j w_j (lse - x_j)
//   loss  = sum over rows of cross / total weight + z lse^2 / number of rows
//
// If the losses are not averaged, total weight and number of rows are 1.
//
// Instead of a label, a row may have probabilities q_j of the classes, and then has the total weight 1:
//
//   cross = sum_j a_j (lse - x_j),  a_j = ((1 - e) q_j + e / V) w_j,  mass = sum_j a_j
#pragma once

#include <type_traits>

#include "../common/call.h"
#include "../common/functions.h"
#include "../common/pack.h"
#include "labels.h"

namespace msops::cross_entropy {

constexpr int kRowsOfSum = 8192;  // that a block of the GPU adds up, where there are several

enum class Reduction : int { kNone, kSum, kMean };

// Form says what a row has. If it is not kClasses, lse may be a result, and the weights are of the computing type.
enum class Form : int { kClasses, kGeneral, kProbabilities };

// Returns whether rows do not begin at the same distance from a pack as those of the logits.
template <typename T>
bool are_apart(const T* rows, const T* logits) {
  constexpr int N = kPackWidth<T>;
  return elements_to_pack<N>(rows) != elements_to_pack<N>(logits);
}

// RowSums is what a row's logits sum up to.
template <typename C>
struct RowSums {
  C max = C(-HUGE_VAL), sum = 0;
  // For label smoothing, the sums of w_j and of w_j (x_j - reference); for probabilities, those of a_j and of
  // a_j (x_j - max), or of a_j x_j where the maximum is not finite yet.
  C weights = 0, below = 0;
};

// RowStats is what the gradient needs of a row: the maximum of x, and the softmax of the element that has it, 1 / sum.
template <typename C>
struct RowStats {
  C max = 0, share = 1;

  MSOPS_BOTH C log_sum() const { return log1p(1 / share - 1); }  // glibc's log needs version 2.29
  MSOPS_BOTH C lse() const { return max + log_sum(); }
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
// label, or by label * q_j w_j; that with respect to q_j is label * w_j (lse - x_j).
template <typename C>
struct Slope {
  C exponential = 0, label = 0, uniform = 0;
};

// OfForm is what only some forms have: each row's lse or, in a gradient, what the gradient with respect to it is; the
// probabilities, and each row's mass.
template <typename T, Form kForm>
struct OfForm {};
template <typename T>
struct OfForm<T, Form::kGeneral> {
  Compute<T>* lse_of_rows = nullptr;
};
template <typename T>
struct OfForm<T, Form::kProbabilities> : OfForm<T, Form::kGeneral> {
  const T* probabilities = nullptr;
  bool is_apart = false;  // whether they are not aligned as the logits are
  Compute<T>* masses = nullptr;
};

template <typename T, Form kForm = Form::kClasses>
struct Loss : OfForm<T, kForm> {
  using C = Compute<T>;
  using Weight = std::conditional_t<kForm == Form::kClasses, T, C>;
  static constexpr bool kHasClasses = kForm != Form::kProbabilities;
  int64_t rows, classes;
  const T* logits;
  Labels labels;
  const Weight* weight;  // null if all weights are 1
  int64_t ignored;       // 0 for probabilities
  Reduction reduction;
  C smoothing, z, softcap;

  bool is_plain() const { return smoothing == 0 && softcap == 0; }
  // Returns the label of a row. For rows of probabilities it is no class, but is not ignored.
  MSOPS_BOTH int64_t label_of([[maybe_unused]] int64_t row) const {
    if constexpr (kHasClasses) return labels[row];
    return -1;
  }
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
  MSOPS_BOTH C cross([[maybe_unused]] int64_t label, [[maybe_unused]] C own, const RowSums<C>& row) const {
    const C log_sum = log1p(row.sum - 1);  // the sum is at least 1
    if constexpr (!kHasClasses) return classes > 0 ? row.weights * log_sum - row.below : C(0);
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

  // Stores what only some forms have of row i.
  MSOPS_BOTH void store_of_form([[maybe_unused]] int64_t i, [[maybe_unused]] const RowStats<C>& stats,
                                [[maybe_unused]] const RowSums<C>& sums) const {
    if constexpr (kForm != Form::kClasses) this->lse_of_rows[i] = stats.lse();
    if constexpr (!kHasClasses) this->masses[i] = sums.weights;
  }

  // Returns what a row adds to the totals, given its cross-entropy.
  MSOPS_BOTH Totals<C> totals_of(int64_t label, C cross, const RowStats<C>& stats) const {
    if (label == ignored) return {};
    const C lse = z > 0 ? stats.lse() : C(0);
    return {cross, kHasClasses && weight ? weight_of(label) : C(1), C(1), lse * lse};
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
    const C scale = dloss / totals[0], of_square = z > 0 ? 2 * z * stats.lse() * (dloss / totals[1]) : C(0);
    C of_label = scale * (1 - smoothing), of_cross;
    if constexpr (kHasClasses) {
      of_label *= weight_of(label);
      of_cross = of_label + scale * smoothing * totals[2];
    } else {
      of_cross = scale * this->masses[i];
    }
    Slope<C> result = {(of_cross + of_square) * stats.share, of_label, scale * smoothing / C(classes)};
    if constexpr (kForm != Form::kClasses)
      if (this->lse_of_rows) result.exponential += this->lse_of_rows[i] * stats.share;
    return result;
  }
};

}  // namespace msops::cross_entropy
