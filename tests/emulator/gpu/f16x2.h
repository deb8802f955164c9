// sub.f16x2, mul.f16x2, fma.f16x2 and prmt in the emulator.
#pragma once

#include "instructions.h"

namespace msops {

template <typename F>
uint32_t with_halves(uint32_t a, uint32_t b, const F& f) {
  uint32_t result = 0;
  for (unsigned i = 0; i < 2; ++i) {
    const auto number = [=](uint32_t word) { return with_bits_of<_Float16>(static_cast<uint16_t>(word >> 16 * i)); };
    const auto rounded = static_cast<_Float16>(f(static_cast<float>(number(a)), static_cast<float>(number(b))));
    result |= uint32_t{with_bits_of<uint16_t>(rounded)} << 16 * i;
  }
  return result;
}
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  return with_halves(a, b, [](float x, float y) { return x - y; });
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return with_halves(a, b, [](float x, float y) { return x * y; });
}

// The products of two float16 are exact in float; so are their sums with a third in double, which is rounded once.
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (unsigned i = 0; i < 2; ++i) {
    const auto number = [=](uint32_t word) {
      return static_cast<double>(with_bits_of<_Float16>(static_cast<uint16_t>(word >> 16 * i)));
    };
    const auto rounded = static_cast<_Float16>(number(a) * number(b) + number(c));
    result |= uint32_t{with_bits_of<uint16_t>(rounded)} << 16 * i;
  }
  return result;
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
template <uint32_t kSelector>
uint32_t prmt(uint32_t a, uint32_t b) {
  return prmt(a, b, kSelector);
}

}  // namespace msops
