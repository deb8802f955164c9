// team.reduce (see rows.h) takes statistics of a row that are more than one number, for example
//
//   const auto found = team.reduce(ArgMax<C>(), x[row]);  // found.value, found.column
//
// A statistic of no elements is as constructed. Statistics are combined in a fixed order, so that they are reproducible
// bit for bit. A statistic of your own has of(column, value) and combine(a, b), where combine(a, Statistic()) is a.
#pragma once

#include "functions.h"

namespace msops {

// SeveralSums are sums that one reduction computes.
template <typename C, int kCount>
struct SeveralSums {
  C of[kCount] = {};

  MSOPS_BOTH SeveralSums operator+(const SeveralSums& other) const {
    SeveralSums sums;
    for (int i = 0; i < kCount; ++i) sums.of[i] = of[i] + other.of[i];
    return sums;
  }
};
template <typename C>
using TwoSums = SeveralSums<C, 2>;
template <typename C>
using FourSums = SeveralSums<C, 4>;

// SumsAbout are sums over elements v of a row, less a pivot: those of u^2 and of u = v - pivot. Four sums are also
// those of u g and of g, where g is the element of another row. The pivot is any number near the mean.
template <typename C, int kCount>
struct SumsAbout {
  C pivot = 0;
  SeveralSums<C, kCount> sums;

  // Changes the sums of `count` elements to those about another pivot.
  MSOPS_BOTH void move(C to, C count) {
    const C shift = pivot - to;
    sums.of[0] += shift * (2 * sums.of[1] + count * shift);
    sums.of[1] += shift * count;
    if constexpr (kCount == 4) sums.of[2] += shift * sums.of[3];
    pivot = to;
  }
};

// ArgMax is the largest element, and the first column that has it. NaN counts as larger than all.
template <typename C>
struct ArgMax {
  C value = C(-HUGE_VAL);
  int64_t column = INT64_MAX;

  static MSOPS_BOTH ArgMax of(int64_t column, C value) { return {value, column}; }
  static MSOPS_BOTH ArgMax combine(const ArgMax& a, const ArgMax& b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool larger = b_nan ? !a_nan : b.value > a.value, equal = b_nan ? a_nan : b.value == a.value;
    const bool is_b = larger || (equal && b.column < a.column);
    return {is_b ? b.value : a.value, is_b ? b.column : a.column};
  }
};

// MaxSum is the largest element and the sum of e^(element - largest), in one reading: log sum e^element = max +
// log(sum). Where a row is held, or its function is cheap, team.max and then team.sum take fewer exponentials.
template <typename C>
struct MaxSum {
  C max = C(-HUGE_VAL), sum = 0;

  static MSOPS_BOTH MaxSum of(int64_t, C value) { return {value, 1}; }
  static MSOPS_BOTH MaxSum combine(const MaxSum& a, const MaxSum& b) {
    const C difference = a.max == b.max ? C(0) : a.max - b.max;  // infinity - infinity is NaN
    const C factor = exp(-::fabs(difference));
    const bool a_is_larger = difference >= 0;
    const C larger = a_is_larger ? a.sum : b.sum, smaller = a_is_larger ? b.sum : a.sum;
    return {msops::max(a.max, b.max), larger + smaller * factor};
  }
};

// Moments are the number of elements, their mean, and the sum of their squared distances from it (Welford, Chan).
template <typename C>
struct Moments {
  C count = 0, mean = 0, squares = 0;

  MSOPS_BOTH C variance() const { return squares / count; }

  static MSOPS_BOTH Moments of(int64_t, C value) { return {1, value, 0}; }
  static MSOPS_BOTH Moments combine(const Moments& a, const Moments& b) {
    const C count = a.count + b.count, distance = b.mean - a.mean, share = count > 0 ? b.count / count : C(0);
    return {count, a.mean + distance * share, a.squares + b.squares + distance * distance * (a.count * share)};
  }
};

}  // namespace msops
