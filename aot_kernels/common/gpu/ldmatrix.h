// ldmatrix loads four matrices of 8 rows of 16 bytes from shared memory to a warp's registers, as mma takes them, and
// stmatrix, for sm_90 and later, stores them.
//
// Thread `lane` gives the address of row lane % 8 of matrix lane / 8. It gets in words[i], of matrix i, the 4 bytes
// with number lane % 4 of row lane / 4; of the transposed float16 matrix, rows 2 (lane % 4), + 1 of column lane / 4.
#pragma once

#include "instructions.h"

namespace msops {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&words)[4], unsigned row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&words)[4], unsigned row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
#endif
}

__device__ __forceinline__ void stmatrix_x4(const uint32_t (&words)[4], unsigned row) {
  MSOPS_SM90("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" : : "r"(row), "r"(words[0]),
             "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

}  // namespace msops
