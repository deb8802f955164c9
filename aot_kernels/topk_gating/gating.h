// What both devices share: the settings, the order of experts, and the formulas of scores, weights and gradients.
#pragma once

#include <cmath>

#include "../common/activations.h"
#include "../common/numbers.h"
#include "../common/scratch.h"

namespace msops::gating {

constexpr int64_t kMostHeld = 1024;                          // experts whose keys a GPU keeps in registers
constexpr int64_t kRowsAtOnce = 64, kLongRowsAtOnce = 1024;  // with scratch; where there are more experts
constexpr int64_t kBlockOfKeys = 16;

struct Settings {
  int64_t k, groups, top_groups, group_top;
  bool is_sigmoid, renormalize;
  double scale;

  explicit Settings(Call& call)
      : k(call.attribute("k", 1, INT32_MAX)),
        groups(call.attribute("groups", 1, INT32_MAX)),
        top_groups(call.attribute("top_groups", 1, INT32_MAX)),
        group_top(call.attribute("group_top", 1, INT32_MAX)),
        is_sigmoid(call.attribute("score", 0, 1) != 0),
        renormalize(call.attribute("renormalize", 0, 1) != 0),
        scale(call.number("scale")) {
    call.require(std::isfinite(scale), kBadAttribute, "attribute scale is %g, expected a finite number", scale);
  }

  void require_experts(Call& call, int64_t experts) const {
    const auto require = [&](bool condition, const char* what) {
      call.require(condition, kBadShape, "logits has %lld experts, which do not fit attribute %s",
                   static_cast<long long>(experts), what);
    };
    require(k <= experts && experts <= INT32_MAX, "k");
    require(experts % groups == 0, "groups");
    require(top_groups <= groups && k <= top_groups * (experts / groups), "top_groups");
    require(group_top <= experts / groups, "group_top");
  }
  // Returns how many numbers of scratch a row needs: a key of each expert, the groups' worths and, on the CPU, a
  // group's keys and the largest of blocks of keys, which are the last.
  MSOPS_BOTH int64_t room(int64_t experts) const { return blocks_from(experts) + experts / kBlockOfKeys + 1; }
  MSOPS_BOTH int64_t blocks_from(int64_t experts) const { return experts + groups + experts / groups; }
  // Returns whether weights are shares of the sum over all experts.
  MSOPS_BOTH bool is_share_of_all() const { return !is_sigmoid && !renormalize; }
  MSOPS_BOTH bool selects_groups() const { return top_groups < groups; }
};

// The experts are in the order of their keys, or of their indices if these are equal. A key that is NaN never precedes,
// and so marks an expert that cannot be chosen.
template <typename C>
struct Candidate {
  C key;
  int32_t index;

  static MSOPS_BOTH Candidate none() { return {-C(HUGE_VAL), INT32_MAX}; }
  static MSOPS_BOTH Candidate before_all() { return {C(HUGE_VAL), -1}; }
  MSOPS_BOTH bool precedes(const Candidate& other) const {
    return (key > other.key) | ((key == other.key) & (index < other.index));  // without branches
  }
};

// Logits or scores that are NaN come last.
template <typename C>
MSOPS_BOTH C ordered(C key) {
  return key == key ? key : -C(HUGE_VAL);
}

// Shares are the terms of a softmax: e^(x - largest). If all x are -infinity, all terms are 0.
template <typename C>
struct Shares {
  C shift = 0, total = 1;

  static MSOPS_BOTH C shift_of(C largest) { return largest == -C(HUGE_VAL) ? C(0) : largest; }
  MSOPS_BOTH C term(C x) const { return Activations<C>::exp(x - shift); }
  // Returns a term's share of the total, which is 0 only if all terms are.
  MSOPS_BOTH C share(C term) const { return total == 0 ? C(0) : term / total; }
};

template <typename T>
struct Row {
  using C = Compute<T>;
  Settings s;
  int64_t experts;
  const T* logits;  // of all rows
  OptionalNumbers<T> bias;

  // Experts are in the order of their logits where that is the order of their scores, so that scores which are equal
  // after rounding are no ties.
  MSOPS_BOTH bool is_by_logits() const { return !bias.data && s.group_top == 1; }
  MSOPS_BOTH bool needs_shares() const { return !s.is_sigmoid && !is_by_logits(); }

  MSOPS_BOTH C logit(int64_t row, int64_t expert) const { return C(logits[row * experts + expert]); }
  MSOPS_BOTH C score(C x, const Shares<C>& of_all) const {
    return s.is_sigmoid ? Activations<C>::sigmoid(x) : of_all.share(of_all.term(x));
  }
  MSOPS_BOTH C key(C x, int64_t expert, const Shares<C>& of_all) const {
    return ordered(is_by_logits() ? x : score(x, of_all) + bias[expert]);
  }
  // Returns what a chosen expert's weight is a share of: its score, or its term of the softmax.
  MSOPS_BOTH C term(C x, const Shares<C>& of_weights) const {
    return s.is_sigmoid ? Activations<C>::sigmoid(x) : of_weights.term(x);
  }
  // Returns the gradient of a chosen expert's logit, for its weight before scaling, the weight's gradient, and the sum
  // of products of both over all that were chosen.
  MSOPS_BOTH C gradient(C x, C weight, C dweight, C sum) const {
    const C rest = s.is_sigmoid && !s.renormalize ? C(0) : sum;
    return weight * (s.is_sigmoid ? Activations<C>::sigmoid(-x) : C(1)) * (dweight - rest);
  }
};

template <typename T>
struct Choice {
  Row<T> all;
  int64_t rows;
  T* weights;        // (rows, k)
  int32_t* experts;  // (rows, k)
  Compute<T>* keys;  // (rows_at_once, room)
  int64_t rows_at_once;
};

template <typename T>
struct Gradient {
  Row<T> all;  // without a bias
  int64_t rows;
  const int32_t* experts;  // (rows, k)
  const T* dweights;       // (rows, k)
  T* dlogits;              // (rows, experts)

  // Returns a chosen expert, or -1. On a GPU an expert out of range gets no gradient; on the CPU there is none.
  MSOPS_BOTH int64_t expert(int64_t row, int64_t i) const {
    const int64_t index = experts[row * all.s.k + i];
    return 0 <= index && index < all.experts ? index : -1;
  }
};

// Returns for how many rows there is scratch.
inline int64_t rows_at_once(int64_t rows, int64_t experts) {
  return std::min(rows, experts > kMostHeld ? kLongRowsAtOnce : kRowsAtOnce);
}

}  // namespace msops::gating
