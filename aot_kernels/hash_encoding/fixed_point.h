// Sums whose terms may come in any order: integers in steps of 2^-k, which atomics add up. A float's sum has 64 bits,
// a double's 128, as words of 32 bits with carries. Terms that are not finite are remembered apart.
#pragma once

#include "../common/dtype.h"

namespace msops::hash_encoding {

#ifdef __CUDACC__
// Steps is the number k, chosen such that no sum overflows.
template <typename C>
struct Steps {
  static constexpr int kWords = sizeof(C) == 8 ? 4 : 2, kBits = 32 * kWords - 2;
  int k;
  C scale[2];  // their product is 2^k, which C may be too narrow for

  // Sums are below 2^exponent.
  explicit __device__ Steps(int exponent) : k(kBits - exponent) {
    scale[0] = C(exp2(static_cast<double>(k / 2)));
    scale[1] = C(exp2(static_cast<double>(k - k / 2)));
  }
  // Returns the words of a term, from the lowest on.
  __device__ void words_of(C term, uint32_t (&words)[kWords]) const {
    const C steps = term * scale[0] * scale[1];
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
    if constexpr (kWords == 2) {
      const double steps = static_cast<double>(static_cast<long long>(pair(0)));
      return C(steps * exp2(static_cast<double>(-k)));
    } else {
      unsigned long long low = pair(0), high = pair(2);
      const bool is_negative = high >> 63;
      if (is_negative) low = 0 - low, high = ~high + (low == 0);
      const double steps = static_cast<double>(high) * 0x1p64 + static_cast<double>(low);
      return (is_negative ? -steps : steps) / scale[0] / scale[1];
    }
  }
};

// FixedSums are `count` sums in memory: word by word, and a word of flags each.
template <typename C>
struct FixedSums {
  static constexpr int kWords = Steps<C>::kWords, kAll = kWords + 1;
  enum : uint32_t { kInfinite = 1, kNegativeInfinite = 2 };  // both: NaN
  uint32_t* words;                                           // (kAll, count)
  int64_t count;

  __device__ void add(int64_t i, const uint32_t (&term)[kWords]) const {
    uint32_t carry = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t value = term[w] + carry;
      carry = value < carry;
      if (value == 0) continue;
      uint32_t* const to = words + w * count + i;
      if (w + 1 == kWords) {
        atomicAdd(to, value);
      } else {
        carry += atomicAdd(to, value) > ~value;
      }
    }
  }
  __device__ void add(int64_t i, C term, const Steps<C>& steps) const {
    if (!(term - term == 0)) {
      atomicOr(words + kWords * count + i, term > 0 ? kInfinite : term < 0 ? kNegativeInfinite : 3u);
      return;
    }
    uint32_t of_term[kWords];
    steps.words_of(term, of_term);
    add(i, of_term);
  }
  // Adds a sum of others.
  __device__ void add(int64_t i, const FixedSums& others, int64_t from) const {
    uint32_t term[kWords];
    for (int w = 0; w < kWords; ++w) term[w] = others.words[w * others.count + from];
    add(i, term);
    const uint32_t flags = others.words[kWords * others.count + from];
    if (flags) atomicOr(words + kWords * count + i, flags);
  }
  __device__ C total(int64_t i, const Steps<C>& steps) const {
    uint32_t sum[kWords];
    for (int w = 0; w < kWords; ++w) sum[w] = words[w * count + i];
    const uint32_t flags = words[kWords * count + i];
    const C infinite = C(HUGE_VAL);
    return flags == 0 ? steps.number_of(sum) : flags == kInfinite ? infinite : flags == 2 ? -infinite : C(NAN);
  }
};
#endif

}  // namespace msops::hash_encoding
