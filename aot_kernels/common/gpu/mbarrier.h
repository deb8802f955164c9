// An mbarrier is a barrier in shared memory, for sm_90 and later. In one phase after another, it counts arrivals, and
// bytes that asynchronous copies write. It takes 8 bytes, and is given by its shared_address.
#pragma once

#include "instructions.h"

namespace msops {

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  MSOPS_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

// Makes what the thread has initialized visible to the cluster and to asynchronous copies; a barrier of all threads
// follows.
__device__ __forceinline__ void fence_mbarrier_init() {
  MSOPS_SM90("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// Makes what the thread has written to shared memory visible to asynchronous copies, such as TMA's, that begin later.
__device__ __forceinline__ void fence_proxy_async() { MSOPS_SM90("fence.proxy.async.shared::cta;" : : : "memory"); }

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  MSOPS_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  MSOPS_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this number has ended, where the first is 0. At most the phase after it may have begun.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int phase) {
  unsigned done = 1;
  do
    MSOPS_SM90(
        "{.reg .pred p;"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
        "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier),
        "r"(phase % 2) : "memory");
  while (!done);
}

}  // namespace msops
