// philox() returns random words by counting: four words of 32 bits for each 128-bit counter (a, b), in any order, on
// any device. A kernel needs no state: the element's index is the counter.
//
//   const Words words = philox(seed, i, offset);   // words.at[0] to words.at[3]
//
// This is Philox4x32-10 of Salmon, Moraes, Dror and Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
#pragma once

#include "dtype.h"

namespace msops {

struct Words {
  uint32_t at[4];
};

// The counter's low half is a, its high half is b.
MSOPS_BOTH Words philox(uint64_t seed, uint64_t a, uint64_t b) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(a), c1 = static_cast<uint32_t>(a >> 32);
  uint32_t c2 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(b >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;  // the golden ratio
    k1 += 0xBB67AE85;  // the square root of 3, less 1
  }
  return {{c0, c1, c2, c3}};
}

// Returns a number of [0, 1) with as many bits as T has: the binary fraction of `high` then `low`, rounded down. So a
// float16 is the float32 of the same word, rounded down, and never 1.
template <typename T>
MSOPS_BOTH Compute<T> uniform_of(uint32_t high, [[maybe_unused]] uint32_t low) {
  if constexpr (std::is_same<T, double>::value) {
    return static_cast<double>((uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
  } else {
    const float x = static_cast<float>(high >> 8) * 0x1p-24f;
    constexpr uint32_t kDropped = std::is_same<T, Half>::value ? 0x1fff : sizeof(T) == 2 ? 0xffff : 0;
    return float_of(bits_of(x) & ~kDropped);
  }
}

}  // namespace msops
