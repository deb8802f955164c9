// On the CPU, a thread takes one row after the other, each with the scratch of that thread.
#pragma once

#include <algorithm>

#include "../common/parallel.h"
#include "gating.h"

namespace msops::gating {

// Returns the larger number, or a if b is NaN.
template <typename C>
MSOPS_CPU C larger(C a, C b) {
  return b > a ? b : a;
}

// Calls f(first, logits, n) for parts of a row, as numbers of Compute<T>.
template <typename T, typename F>
MSOPS_CPU void for_parts(const Row<T>& all, int64_t row, const F& f) {
  constexpr int64_t kPart = 256;
  Compute<T> numbers[kPart];
  for (int64_t first = 0; first < all.experts; first += kPart) {
    const int64_t n = std::min(kPart, all.experts - first);
    widen(all.logits + row * all.experts + first, numbers, n);
    f(first, numbers, n);
  }
}

template <typename C>
MSOPS_CPU C largest_of(const C* x, int64_t n, C largest = -C(HUGE_VAL)) {
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = larger(largest, x[i]);
  return largest;
}

// Computes the shares of all logits of a row.
template <typename T>
MSOPS_CPU Shares<Compute<T>> shares_of_row(const Row<T>& all, int64_t row) {
  using C = Compute<T>;
  C largest = -C(HUGE_VAL), total = 0;
  for_parts(all, row, [&](int64_t, const C* x, int64_t n) { largest = largest_of(x, n, largest); });
  Shares<C> shares;
  shares.shift = Shares<C>::shift_of(largest);
  for_parts(all, row, [&](int64_t, const C* x, int64_t n) {
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += shares.term(x[i]);
    total += sum;
  });
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

// KeysByBlocks finds the first of n keys by the largest keys of blocks of them, which `blocks` has room for.
template <typename C>
class KeysByBlocks {
 public:
  MSOPS_CPU KeysByBlocks(C* keys, int64_t n, C* blocks) : keys_(keys), n_(n), blocks_(blocks) {
    for (int64_t b = 0; b * kBlockOfKeys < n; ++b) update(b);
  }

  // Takes the first key out, and returns it.
  MSOPS_CPU Candidate<C> take_first() const {
    const C largest = largest_of(blocks_, (n_ + kBlockOfKeys - 1) / kBlockOfKeys);
    int64_t b = 0;
    while (blocks_[b] != largest) ++b;
    int64_t i = b * kBlockOfKeys;
    while (keys_[i] != largest) ++i;
    keys_[i] = C(NAN);
    update(b);
    return {largest, static_cast<int32_t>(i)};
  }

 private:
  // A block without keys has none that is the largest, either.
  MSOPS_CPU void update(int64_t b) const {
    const C* const first = keys_ + b * kBlockOfKeys;
    const int64_t n = std::min(kBlockOfKeys, n_ - b * kBlockOfKeys);
    const C largest = largest_of(first, n);
    blocks_[b] = largest > -C(HUGE_VAL) || std::count(first, first + n, largest) > 0 ? largest : C(NAN);
  }

  C* keys_;
  int64_t n_;
  C* blocks_;
};

template <typename T>
struct ChooseOnCpu {
  using C = Compute<T>;
  Choice<T> choice;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t end = part_begin(choice.rows, part + 1, parts);
    for (int64_t row = part_begin(choice.rows, part, parts); row < end; ++row)
      of_row(row, choice.keys + part * choice.all.s.room(choice.all.experts));
  }

 private:
  MSOPS_CPU void of_row(int64_t row, C* keys) const {
    const Row<T>& all = choice.all;
    const int64_t k = all.s.k;
    int32_t* const experts = choice.experts + row * k;
    Shares<C> shares;
    if (all.needs_shares() || all.s.is_share_of_all()) shares = shares_of_row(all, row);
    write_keys(row, shares, keys);
    if (all.s.selects_groups()) keep_best_groups(keys);
    const KeysByBlocks<C> left(keys, all.experts, keys + all.s.blocks_from(all.experts));
    for (int64_t i = 0; i < k; ++i) experts[i] = left.take_first().index;
    if (all.s.renormalize) shares = shares_of_chosen(all, row, [&](int64_t i) { return experts[i]; });
    for (int64_t i = 0; i < k; ++i) {
      const C term = all.term(all.logit(row, experts[i]), shares);
      assign(choice.weights[row * k + i], C(all.s.scale) * shares.share(term));
    }
  }

  MSOPS_CPU void write_keys(int64_t row, const Shares<C>& shares, C* keys) const {
    const Row<T>& all = choice.all;
    const int64_t size = all.experts;
    widen(all.logits + row * size, keys, size);
    if (all.is_by_logits()) {
    } else if (all.s.is_sigmoid) {
#pragma omp simd
      for (int64_t e = 0; e < size; ++e) keys[e] = Activations<C>::sigmoid(keys[e]);
    } else {
#pragma omp simd
      for (int64_t e = 0; e < size; ++e) keys[e] = shares.share(shares.term(keys[e]));
    }
    if (all.bias.data)
      for (int64_t e = 0; e < size; ++e) keys[e] += all.bias[e];
#pragma omp simd
    for (int64_t e = 0; e < size; ++e) keys[e] = ordered(keys[e]);
  }

  MSOPS_CPU void keep_best_groups(C* keys) const {
    const Settings& s = choice.all.s;
    const int64_t of_group = choice.all.experts / s.groups;
    C *const worths = keys + choice.all.experts, *const copies = worths + s.groups;
    C* const blocks = keys + s.blocks_from(choice.all.experts);
    for (int64_t g = 0; g < s.groups; ++g) {
      std::copy_n(keys + g * of_group, of_group, copies);
      const KeysByBlocks<C> left(copies, of_group, blocks);
      C worth = 0;
      for (int64_t i = 0; i < s.group_top; ++i) worth += left.take_first().key;
      worths[g] = ordered(worth);
    }
    const KeysByBlocks<C> left(worths, s.groups, blocks);
    for (int64_t i = 0; i < s.top_groups; ++i) left.take_first();
    for (int64_t g = 0; g < s.groups; ++g)
      if (worths[g] == worths[g]) std::fill_n(keys + g * of_group, of_group, C(NAN));  // it was not taken
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
    if (all.s.is_share_of_all()) shares = shares_of_row(all, row);
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
      for_parts(all, row, [&](int64_t first, C* x, int64_t n) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = -sum * shares.share(shares.term(x[i]));
        narrow(x, dlogits + first, n);
      });
    } else {
      std::fill_n(dlogits, size, T(0));
    }
    each([&](int64_t e, C x, C weight, C dweight) { assign(dlogits[e], all.gradient(x, weight, dweight, sum)); });
  }
};

}  // namespace msops::gating
