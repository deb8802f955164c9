// ld and st move up to 16 bytes, and these functions force them to one instruction each.
#pragma once

#include "instructions.h"

namespace msops {

__device__ __forceinline__ void st_global_v4(void* to, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void st_global_v2(void* to, const uint32_t (&words)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(to), "r"(words[0]), "r"(words[1]) : "memory");
}

__device__ __forceinline__ void st_global_b32(void* to, uint32_t word) {
  asm volatile("st.global.b32 [%0], %1;" : : "l"(to), "r"(word) : "memory");
}

// The loads are volatile, so that the compiler does not keep in registers what it loads again, and does not load the
// words of a vector one by one where they are used.
__device__ __forceinline__ void ld_global_v4(uint32_t (&words)[4], const void* from) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}

__device__ __forceinline__ uint32_t ld_shared_b32(unsigned from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}

__device__ __forceinline__ void ld_shared_v4(float* to, unsigned from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(from));
}

}  // namespace msops
