// Operations combine two numbers of type C. A Running number combines many, one after the other.
#pragma once

#include <limits>

#include "../common/sum.h"

namespace msops::reduce {

enum Kind { kSum, kProd, kMax, kMin, kMean, kAny, kAll };  // the numbers of MindSpore's ReduceType_t

// Whole numbers wrap around, so they are added and multiplied without a sign.
template <typename C>
struct WrapsOf : Type<C> {};
template <>
struct WrapsOf<int32_t> : Type<uint32_t> {};
template <>
struct WrapsOf<int64_t> : Type<uint64_t> {};

struct Add {
  template <typename C>
  static MSOPS_BOTH C identity() {
    return C(0);
  }
  template <typename C>
  static MSOPS_BOTH C combine(C a, C b) {
    using Wraps = typename WrapsOf<C>::type;
    return static_cast<C>(static_cast<Wraps>(a) + static_cast<Wraps>(b));
  }
};

// Adds numbers that came from float16, of which a float loses nothing that matters.
struct AddShort : Add {};

struct Multiply {
  template <typename C>
  static MSOPS_BOTH C identity() {
    return C(1);
  }
  template <typename C>
  static MSOPS_BOTH C combine(C a, C b) {
    using Wraps = typename WrapsOf<C>::type;
    return static_cast<C>(static_cast<Wraps>(a) * static_cast<Wraps>(b));
  }
};

// A NaN stays, as it does in MindSpore. Of bools, the maximum tells whether any is true, the minimum whether all are.
struct Maximum {
  template <typename C>
  static MSOPS_BOTH C identity() {
    return std::is_floating_point<C>::value ? -std::numeric_limits<C>::infinity() : std::numeric_limits<C>::lowest();
  }
  template <typename C>
  static MSOPS_BOTH C combine(C a, C b) {
    return a > b || a != a ? a : b;
  }
};

struct Minimum {
  template <typename C>
  static MSOPS_BOTH C identity() {
    if (std::is_same<C, uint8_t>::value) return 1;  // of bools
    return std::is_floating_point<C>::value ? std::numeric_limits<C>::infinity() : std::numeric_limits<C>::max();
  }
  template <typename C>
  static MSOPS_BOTH C combine(C a, C b) {
    return a < b || a != a ? a : b;
  }
};

template <typename Operation, typename C>
struct Running {
  C value = Operation::template identity<C>();

  MSOPS_BOTH void add(C x) { value = Operation::combine(value, x); }
  MSOPS_BOTH C total() const { return value; }
};
template <>
struct Running<Add, float> {
  Sum<float> sum;

  MSOPS_BOTH void add(float x) { sum += x; }
  MSOPS_BOTH float total() const { return sum.total(); }
};
template <>
struct Running<Add, double> {
  Sum<double> sum;

  MSOPS_BOTH void add(double x) { sum += x; }
  MSOPS_BOTH double total() const { return sum.total(); }
};

// A bool is stored as a byte that is 0 or 1.
template <typename T>
struct StoredOf : Type<T> {};
template <>
struct StoredOf<bool> : Type<uint8_t> {};

// y[a, b] = what the operation makes of x[a, r, b] for all r.
struct Across {
  int64_t outer, terms, inner;
};

// y[k] = what the operation makes of x[p, k, l] for all p and l.
struct Along {
  int64_t outer, outputs, length;
};

// Numbers go to `to`, divided by `divisor`: as elements of Rounded if `rounds`, else as they are.
template <typename C, typename Rounded>
struct Output {
  void* to;
  C divisor;
  bool rounds;

  MSOPS_BOTH void put(int64_t at, C number) const {
    if constexpr (std::is_floating_point<C>::value) number /= divisor;
    if constexpr (!std::is_same<C, Rounded>::value)
      if (rounds) return assign(static_cast<Rounded*>(to)[at], number);
    static_cast<C*>(to)[at] = number;
  }
};

}  // namespace msops::reduce
