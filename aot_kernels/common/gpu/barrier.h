// bar.sync and bar.arrive are barriers of a part of a block's threads, whole warps. A block has 16; __syncthreads is
// number 0. setmaxnreg moves registers between warpgroups, for sm_90a only.
#pragma once

#include "instructions.h"

namespace msops {

// Waits until `threads` threads have come to the barrier by either function.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// Sets how many registers each thread of the warpgroup has from now on. The kernel must limit its registers.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  MSOPS_SM90A("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
// In a block of kThreads, the first warpgroup keeps kOfFirst registers a thread, and the others take kRegisters. If
// these are together more than the block began with, a warpgroup waits for ever.
template <int kThreads, int kOfFirst, int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  constexpr int kOthers = kThreads / 128 - 1, kAtFirst = 65536 / kThreads / 8 * 8;
  static_assert(kOfFirst + kOthers * kRegisters <= (1 + kOthers) * kAtFirst, "the block has too few registers");
  MSOPS_SM90A("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

}  // namespace msops
