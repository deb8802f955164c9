// mma.sync computes a warp's product of two small matrices on the tensor cores, for sm_80 and later.
//
// A thread holds parts of all three matrices in 32-bit registers. In m16n8k16 for float16, these are pairs of
// neighbours:
//   a[i] at row lane / 4 (+ 8 in a[1] and a[3]) and columns 2 (lane % 4), + 1 (+ 8 in a[2] and a[3]);
//   b[i] at column lane / 4 and rows 2 (lane % 4), + 1 (+ 8 in b[1]);
//   d[i] at row lane / 4 (+ 8 in d[2] and d[3]) and column 2 (lane % 4) + i % 2.
// In m16n8k8 for TF32, a register has one number, not a pair: a at columns lane % 4 (+ 4), b at rows lane % 4 (+ 4). In
// m16n8k32 for int8 it has four: a at columns 4 (lane % 4) to + 3 (+ 16), b at rows 4 (lane % 4) to + 3 (+ 16).
#pragma once

#include "instructions.h"

namespace msops {

// d += a b, where a and b are float16 and the sums are float.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// d += a b, where a and b are TF32.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// d += a b, where a and b are int8 and the sums are int32.
__device__ __forceinline__ void mma_m16n8k32(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Rounds float32 to TF32 (8 bits of exponent, 10 of fraction), to nearest, with ties away from zero.
__device__ __forceinline__ uint32_t cvt_rna_tf32(float value) {
  uint32_t bits = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#endif
  return bits;
}

}  // namespace msops
