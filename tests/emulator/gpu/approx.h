// The approximate instructions in the emulator are exact.
#pragma once

#include <cuda_fp16.h>

#include "instructions.h"

namespace msops {

inline float without_subnormal(float x) { return std::abs(x) < 0x1p-126f ? 0 * x : x; }
inline float ex2_approx_ftz(float x) { return without_subnormal(std::exp2(without_subnormal(x))); }
inline float rcp_approx_ftz(float x) { return without_subnormal(1 / without_subnormal(x)); }
inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (unsigned shift : {0u, 16u}) {
    const __half x{static_cast<uint16_t>(a >> shift)}, y{static_cast<uint16_t>(b >> shift)};
    const __half larger = __float2half_rn(std::fmax(__half2float(x), __half2float(y)));
    result |= uint32_t{larger.bits} << shift;
  }
  return result;
}

}  // namespace msops
