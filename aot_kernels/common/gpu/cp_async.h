// cp.async copies from global to shared memory; a thread begins a copy and does not wait for it. GPUs before sm_80 copy
// at once instead.
#pragma once

#include <cstring>
#include <type_traits>

#include "instructions.h"

namespace msops {

// 4 or 8 bytes go through the L1 cache (cp.async.ca), 16 bytes past it (cp.async.cg).
template <int kBytes>
__device__ __forceinline__ void cp_async(void* to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_address(to)), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "n"(kBytes)
                 : "memory");
  }
#else
  using Bytes = std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 8, uint2, uint4> >;
  *static_cast<Bytes*>(to) = *static_cast<const Bytes*>(from);
#endif
}

// Copies the bytes if they are `inside`, else writes zeros and reads nothing.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(shared_address(to)), "l"(from), "n"(kBytes), "r"(inside ? kBytes : 0)
                 : "memory");
  }
#else
  if (inside) {
    cp_async<kBytes>(to, from);
  } else {
    memset(to, 0, kBytes);
  }
#endif
}

// Makes one group of all that the thread began since its last commit.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until at most the kGroups latest groups of the thread are in flight. Other threads see the bytes after a
// barrier.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
#endif
}

__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

}  // namespace msops
