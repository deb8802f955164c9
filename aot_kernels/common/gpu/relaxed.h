// ld.relaxed and st.relaxed move 8 bytes of global memory at once, of which other blocks of the launch see either all
// or nothing. They say nothing of the order in which other bytes become visible: whoever waits for 8 bytes finds out
// from them alone. globaltimer tells how long a wait lasts.
#pragma once

#include "instructions.h"

namespace msops {

__device__ __forceinline__ void st_relaxed_b64(void* to, uint2 value) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;"
               :
               : "l"(to), "l"(static_cast<unsigned long long>(value.y) << 32 | value.x)
               : "memory");
}

__device__ __forceinline__ uint2 ld_relaxed_b64(const void* from) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return {static_cast<unsigned>(value), static_cast<unsigned>(value >> 32)};
}

// Loads twice 8 bytes, each of them at once, from a multiple of 16.
__device__ __forceinline__ uint4 ld_relaxed_v2_b64(const void* from) {
  unsigned long long a, b;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
  return {static_cast<unsigned>(a), static_cast<unsigned>(a >> 32), static_cast<unsigned>(b),
          static_cast<unsigned>(b >> 32)};
}

// Returns the time in nanoseconds, which advances in steps of up to a microsecond.
__device__ __forceinline__ unsigned long long globaltimer() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

}  // namespace msops
