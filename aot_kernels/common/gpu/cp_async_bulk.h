// cp.async.bulk copies contiguous bytes from shared to global memory, and cp.reduce.async.bulk adds numbers there, for
// sm_90 and later. One thread begins them, commits them as a group, and waits for its groups. Copies from global to
// shared memory are counted by an mbarrier instead, and nothing waits for those to the L2 cache. Addresses and sizes
// are multiples of 16 bytes.
#pragma once

#include "instructions.h"

namespace msops {

// Copies from global to shared memory; the mbarrier counts the bytes.
__device__ __forceinline__ void cp_async_bulk_load(unsigned to, const void* from, int bytes, unsigned barrier) {
  MSOPS_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" : : "r"(to),
             "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Brings bytes from global memory to the L2 cache.
__device__ __forceinline__ void cp_async_bulk_prefetch_L2(const void* from, int bytes) {
  MSOPS_SM90("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_bulk(float* to, unsigned from, int bytes) {
  MSOPS_SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" : : "l"(to), "r"(from),
             "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* to, unsigned from, int bytes) {
  MSOPS_SM90("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" : : "l"(to), "r"(from),
             "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  MSOPS_SM90("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until at most the kGroups latest groups have not been read from shared memory, or not been written.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  MSOPS_SM90("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  MSOPS_SM90("cp.async.bulk.wait_group %0;" : : "n"(kGroups) : "memory");
}

// Orders what the thread knows of global memory before its asynchronous copies that follow.
__device__ __forceinline__ void fence_proxy_async_global() { MSOPS_SM90("fence.proxy.async.global;" : : : "memory"); }

}  // namespace msops
