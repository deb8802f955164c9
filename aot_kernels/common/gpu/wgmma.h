// wgmma.mma_async computes a warpgroup's product of two matrices on the tensor cores, which read the second from shared
// memory; for sm_90a only. Between wgmma_fence and the end of the wait, no thread touches the registers of the sums.
#pragma once

#include "instructions.h"

namespace msops {

// Must come before the first product, and again where registers of its operands were written since.
__device__ __forceinline__ void wgmma_fence() { MSOPS_SM90A("wgmma.fence.sync.aligned;" : : : "memory"); }

// Makes one group of all products that were begun since the last commit.
__device__ __forceinline__ void wgmma_commit_group() { MSOPS_SM90A("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits until at most the kGroups latest groups are in flight.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  MSOPS_SM90A("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}

// Describes a matrix in shared memory whose rows, of 128 bytes, are stored as TMA does with its swizzle of 128 bytes.
__device__ __forceinline__ uint64_t wgmma_matrix(unsigned address) {
  constexpr uint64_t kSwizzle128 = 1, kBytesOf8Rows = 1024;
  return kSwizzle128 << 62 | kBytesOf8Rows / 16 << 32 | 1 << 16 | address / 16;
}

// Begins d += a b of TF32, where b is 64 rows of 8 numbers. A thread holds a as for mma_m16n8k8, of its warp's 16 rows,
// and d[i] is at row lane / 4 (+ 8 where i / 2 % 2) and column i / 4 * 8 + 2 (lane % 4) + i % 2.
__device__ __forceinline__ void wgmma_m64n64k8(float (&d)[32], const uint32_t (&a)[4], [[maybe_unused]] uint64_t b) {
#define MSOPS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
  MSOPS_SM90A(
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1;}" : MSOPS_4(0),
      MSOPS_4(4), MSOPS_4(8), MSOPS_4(12), MSOPS_4(16), MSOPS_4(20), MSOPS_4(24), MSOPS_4(28) : "r"(a[0]), "r"(a[1]),
      "r"(a[2]), "r"(a[3]), "l"(b));
#undef MSOPS_4
}

}  // namespace msops
