// red.release and ld.acquire: a counter in global memory by which the blocks of a launch that all run at once wait for
// each other.
#pragma once

#include "instructions.h"

namespace msops {

// Adds 1. What the block wrote before its __syncthreads is seen by those that wait for the count.
__device__ __forceinline__ void red_release_add(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(counter) : "memory");
}

__device__ __forceinline__ unsigned ld_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace msops
