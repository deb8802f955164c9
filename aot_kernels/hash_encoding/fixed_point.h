// Sums whose terms may come in any order: integers in steps of 2^-k, which atomics add up. A float's sum has 64 bits,
// a double's 128, as words of 32 bits with carries. Terms that are not finite are remembered apart.
#pragma once

#include "../common/dtype.h"

namespace msops::hash_encoding {

// Sums are `count` sums of C in memory: word by word, and two flags each.
template <typename C>
struct FixedLayout {
  static constexpr int kWords = sizeof(C) == 8 ? 4 : 2, kFlags = 16;  // kFlags: sums whose flags are in a word
  static constexpr MSOPS_BOTH int64_t words(int64_t count) { return kWords * count + (count + kFlags - 1) / kFlags; }
};

#ifdef __CUDACC__
// Returns an exponent e for which the number, which is not negative, is below 2^e; it is the least one of normal
// numbers.
__device__ __forceinline__ int exponent_of(double number) {
  return static_cast<int>(__double_as_longlong(number) >> 52) - 1022;
}
__device__ __forceinline__ double power_of_2(int exponent) {
  return __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
}

// Steps is the number k, chosen such that no sum overflows.
template <typename C>
struct Steps {
  static constexpr int kWords = FixedLayout<C>::kWords, kBits = 32 * kWords - 2;
  double scales[2], inverses[2];  // The product of the scales is 2^k, which may be too large for one number.

  Steps() = default;
  // Sums are below 2^exponent.
  explicit __device__ Steps(int exponent) {
    const int k = kBits - exponent, halves[2] = {k / 2, k - k / 2};
    for (int i = 0; i < 2; ++i) scales[i] = power_of_2(halves[i]), inverses[i] = power_of_2(-halves[i]);
  }
  // Returns a number in steps.
  __device__ C in_steps(C number) const { return C(static_cast<double>(number) * scales[0] * scales[1]); }
  // Returns the words of a number in steps, from the lowest on.
  static __device__ void words_of(C steps, uint32_t (&words)[kWords]) {
    if constexpr (kWords == 2) {
      const unsigned long long whole = static_cast<unsigned long long>(llrintf(steps));
      words[0] = static_cast<uint32_t>(whole), words[1] = static_cast<uint32_t>(whole >> 32);
    } else {
      const double size = fabs(steps);
      unsigned long long high = static_cast<unsigned long long>(size * 0x1p-64);
      unsigned long long low = static_cast<unsigned long long>(size - static_cast<double>(high) * 0x1p64);
      if (steps < 0) low = 0 - low, high = ~high + (low == 0);
      words[0] = static_cast<uint32_t>(low), words[1] = static_cast<uint32_t>(low >> 32);
      words[2] = static_cast<uint32_t>(high), words[3] = static_cast<uint32_t>(high >> 32);
    }
  }
  // Returns the number that words stand for.
  __device__ C number_of(const uint32_t (&words)[kWords]) const {
    const auto pair = [&](int i) { return static_cast<unsigned long long>(words[i + 1]) << 32 | words[i]; };
    double steps = 0;
    if constexpr (kWords == 2) {
      steps = static_cast<double>(static_cast<long long>(pair(0)));
    } else {
      unsigned long long low = pair(0), high = pair(2);
      const bool is_negative = high >> 63;
      if (is_negative) low = 0 - low, high = ~high + (low == 0);
      const double size = static_cast<double>(high) * 0x1p64 + static_cast<double>(low);
      steps = is_negative ? -size : size;
    }
    return C(steps * inverses[0] * inverses[1]);
  }
};

template <typename C>
struct FixedSums {
  static constexpr int kWords = Steps<C>::kWords, kFlags = FixedLayout<C>::kFlags;
  enum : uint32_t { kInfinite = 1, kNegativeInfinite = 2, kNan = 3 };
  uint32_t* words;
  int64_t count;

  // Adds N terms, of which the i-th goes to sum at[i]. The carries of all are under way at once.
  template <int N, typename Index>
  __device__ __forceinline__ void add(const Index (&at)[N], const uint32_t (&terms)[N][kWords]) const {
    uint32_t carries[N] = {};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t values[N], before[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = terms[i][w] + carries[i];
        carries[i] = values[i] < carries[i];
        before[i] = atomicAdd(words + w * static_cast<Index>(count) + at[i], values[i]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) carries[i] += before[i] > ~values[i];
    }
  }
  // Adds a number in steps.
  __device__ void add(int64_t i, C steps) const {
    if (steps - steps == 0) {
      const int64_t at[1] = {i};
      uint32_t terms[1][kWords];
      Steps<C>::words_of(steps, terms[0]);
      add(at, terms);
    } else {
      add_flags(i, steps > 0 ? kInfinite : steps < 0 ? kNegativeInfinite : kNan);
    }
  }
  // Adds a sum of others.
  __device__ void add(int64_t i, const FixedSums& others, int64_t from) const {
    const int64_t at[1] = {i};
    uint32_t terms[1][kWords];
    for (int w = 0; w < kWords; ++w) terms[0][w] = others.words[w * others.count + from];
    add(at, terms);
    if (const uint32_t flags = others.flags(from)) add_flags(i, flags);
  }
  __device__ C total(int64_t i, const Steps<C>& steps) const {
    uint32_t sum[kWords];
    for (int w = 0; w < kWords; ++w) sum[w] = words[w * count + i];
    const C infinite = C(HUGE_VAL);
    switch (flags(i)) {
      case kInfinite:
        return infinite;
      case kNegativeInfinite:
        return -infinite;
      case kNan:
        return C(NAN);
    }
    return steps.number_of(sum);
  }

 private:
  __device__ uint32_t flags(int64_t i) const { return words[kWords * count + i / kFlags] >> i % kFlags * 2 & kNan; }
  __device__ void add_flags(int64_t i, uint32_t flags) const {
    atomicOr(words + kWords * count + i / kFlags, flags << i % kFlags * 2);
  }
};
#endif

}  // namespace msops::hash_encoding
