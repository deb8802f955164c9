// dp4a adds four products of int8 to an int32.
#pragma once

#include "instructions.h"

namespace msops {

__device__ __forceinline__ int32_t dp4a(uint32_t a, uint32_t b, int32_t sum) {
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
  return sum;
}

}  // namespace msops
