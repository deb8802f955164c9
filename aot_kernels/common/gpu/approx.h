// ex2.approx and rcp.approx compute a power of two and a reciprocal in one instruction, to about 2^-22, and flush
// subnormal numbers to zero; __expf and __fdividef take several instructions for the sake of results below 2^-126.
// max.f16x2 compares two pairs of float16, for sm_80 and later.
#pragma once

#include "instructions.h"

namespace msops {

__device__ __forceinline__ float ex2_approx_ftz(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

__device__ __forceinline__ float rcp_approx_ftz(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// Returns the larger number of each half. NaN is passed over.
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, [[maybe_unused]] uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
#endif
  return a;
}

}  // namespace msops
