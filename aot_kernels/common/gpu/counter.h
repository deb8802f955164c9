// red.release and ld.acquire use a counter in global memory by which the blocks of a launch wait for each other. All of
// them must run at once.
#pragma once

#include "instructions.h"

namespace msops {

// Adds 1. Blocks that wait for the count see what this block wrote before its __syncthreads.
__device__ __forceinline__ void red_release_add(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(counter) : "memory");
}

__device__ __forceinline__ unsigned ld_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace msops
