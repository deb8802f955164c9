#pragma once

#include <algorithm>
#include <numeric>

#include "../common/parallel.h"
#include "gating.h"

namespace msops::gating {

// Returns the larger number, or a if b is NaN.
template <typename C>
MSOPS_CPU C larger(C a, C b) {
  return b > a ? b : a;
}

// Computes the shares of n numbers.
template <typename C>
MSOPS_CPU Shares<C> shares_of(const C* x, int64_t n) {
  C largest = -C(HUGE_VAL), total = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = larger(largest, x[i]);
  Shares<C> shares;
  shares.shift = Shares<C>::shift_of(largest);
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += shares.term(x[i]);
  shares.total = total;
  return shares;
}

// Computes the shares of the logits that were chosen: expert(i) is the i-th of them, or -1.
template <typename T, typename F>
MSOPS_CPU Shares<Compute<T>> shares_of_chosen(const Row<T>& all, int64_t row, const F& expert) {
  using C = Compute<T>;
  const auto each = [&](auto&& f) {
    for (int64_t i = 0; i < all.s.k; ++i)
      if (const int64_t e = expert(i); e >= 0) f(all.logit(row, e));
  };
  C largest = -C(HUGE_VAL);
  Shares<C> shares;
  each([&](C x) { largest = larger(largest, x); });
  shares.shift = Shares<C>::shift_of(largest);
  shares.total = 0;
  each([&](C x) { shares.total += all.term(x, shares); });
  return shares;
}

template <typename T>
struct ChooseOnCpu {
  using C = Compute<T>;
  Choice<T> choice;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t end = part_begin(choice.rows, part + 1, parts);
    for (int64_t row = part_begin(choice.rows, part, parts); row < end; ++row) of_row(row, part);
  }

 private:
  MSOPS_CPU void of_row(int64_t row, int64_t part) const {
    const Row<T>& all = choice.all;
    const int64_t size = all.experts, room = size + all.s.groups;
    C* const keys = choice.keys + part * room;
    int32_t* const order = choice.order + part * room;
    widen(all.logits + row * size, keys, size);
    Shares<C> of_all;
    if (all.needs_shares() || all.s.is_share_of_all()) of_all = shares_of(keys, size);
#pragma omp simd
    for (int64_t e = 0; e < size; ++e) keys[e] = all.key(keys[e], e, of_all);
    const int64_t left = all.s.selects_groups() ? members_of_best_groups(keys, order) : size;
    if (left == size) std::iota(order, order + size, 0);
    sort_first(keys, order, all.s.k, left);
    std::copy_n(order, all.s.k, choice.experts + row * all.s.k);
    const Shares<C> of_weights =
        all.s.renormalize ? shares_of_chosen(all, row, [&](int64_t i) { return order[i]; }) : of_all;
    for (int64_t i = 0; i < all.s.k; ++i) {
      const C term = all.term(all.logit(row, order[i]), of_weights);
      assign(choice.weights[row * all.s.k + i], C(all.s.scale) * of_weights.share(term));
    }
  }

  // Brings the first `count` of `size` experts, in their order, to the front.
  static MSOPS_CPU void sort_first(const C* keys, int32_t* order, int64_t count, int64_t size) {
    std::partial_sort(order, order + count, order + size,
                      [keys](int32_t a, int32_t b) { return Candidate<C>{keys[a], a}.precedes({keys[b], b}); });
  }

  // Writes the experts of the groups that stay to `order`, and returns how many there are.
  MSOPS_CPU int64_t members_of_best_groups(C* keys, int32_t* order) const {
    const Settings& s = choice.all.s;
    const int64_t size = choice.all.experts, of_group = size / s.groups;
    C* const worths = keys + size;
    int32_t* const groups = order + size;
    std::iota(order, order + size, 0);
    std::iota(groups, groups + s.groups, 0);
    for (int64_t g = 0; g < s.groups; ++g) {
      int32_t* const members = order + g * of_group;
      sort_first(keys, members, s.group_top, of_group);
      C worth = 0;
      for (int64_t i = 0; i < s.group_top; ++i) worth += keys[members[i]];
      worths[g] = ordered(worth);
    }
    sort_first(worths, groups, s.top_groups, s.groups);
    for (int64_t i = 0; i < s.top_groups; ++i)
      std::iota(order + i * of_group, order + (i + 1) * of_group, static_cast<int32_t>(groups[i] * of_group));
    return s.top_groups * of_group;
  }
};

template <typename T>
struct GradientOnCpu {
  using C = Compute<T>;
  Gradient<T> gradient;

  MSOPS_CPU void operator()(int64_t row) const {
    const Row<T>& all = gradient.all;
    const int64_t k = all.s.k, size = all.experts;
    T* const dlogits = gradient.dlogits + row * size;
    const auto expert = [&](int64_t i) { return gradient.expert(row, i); };
    Shares<C> shares;
    if (all.s.renormalize) shares = shares_of_chosen(all, row, expert);
    if (all.s.is_share_of_all()) shares = shares_of_row(row);
    const auto each = [&](auto&& f) {
      for (int64_t i = 0; i < k; ++i)
        if (const int64_t e = expert(i); e >= 0) {
          const C x = all.logit(row, e);
          f(e, x, shares.share(all.term(x, shares)), C(all.s.scale) * C(gradient.dweights[row * k + i]));
        }
    };
    C sum = 0;
    each([&](int64_t, C, C weight, C dweight) { sum += weight * dweight; });
    if (all.s.is_share_of_all()) {
      for (int64_t e = 0; e < size; ++e) assign(dlogits[e], -sum * shares.share(shares.term(all.logit(row, e))));
    } else {
      std::fill_n(dlogits, size, T(0));
    }
    each([&](int64_t e, C x, C weight, C dweight) { assign(dlogits[e], all.gradient(x, weight, dweight, sum)); });
  }

 private:
  MSOPS_CPU Shares<C> shares_of_row(int64_t row) const {
    const Row<T>& all = gradient.all;
    Shares<C> shares;
    C largest = -C(HUGE_VAL), total = 0;
    for (int64_t e = 0; e < all.experts; ++e) largest = larger(largest, all.logit(row, e));
    shares.shift = Shares<C>::shift_of(largest);
    for (int64_t e = 0; e < all.experts; ++e) total += shares.term(all.logit(row, e));
    shares.total = total;
    return shares;
  }
};

}  // namespace msops::gating
