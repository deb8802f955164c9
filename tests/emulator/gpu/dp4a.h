// dp4a in the emulator.
#pragma once

#include "instructions.h"

namespace msops {

inline int32_t dp4a(uint32_t a, uint32_t b, int32_t sum) {
  for (unsigned i = 0; i < 4; ++i) sum += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return sum;
}

}  // namespace msops
