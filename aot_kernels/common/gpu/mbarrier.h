// An mbarrier is a barrier in shared memory, for sm_80 and later. In one phase after another, it counts arrivals and,
// for sm_90 and later, bytes that asynchronous copies write. It takes 8 bytes, and is given by its shared_address.
#pragma once

#include "instructions.h"

// MSOPS_SM80 is for what sm_80 and later have in all versions of CUDA, but for which sm_90 may have something better.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define MSOPS_SM80(...) asm volatile(__VA_ARGS__)
#else
#define MSOPS_SM80(...)
#endif

namespace msops {

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  MSOPS_SM80("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

// Makes what the thread has initialized visible to the cluster and to asynchronous copies; a barrier of all threads
// follows.
__device__ __forceinline__ void fence_mbarrier_init() {
  MSOPS_SM90("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// Makes what the thread has written to shared memory visible to asynchronous copies, such as TMA's, that begin later.
__device__ __forceinline__ void fence_proxy_async() { MSOPS_SM90("fence.proxy.async.shared::cta;" : : : "memory"); }

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  MSOPS_SM80("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" : : "r"(barrier) : "memory");
}

// Arrives at the mbarrier of a block of the cluster, at the place that `barrier` has in this block's shared memory. It
// orders nothing that the thread has written for the other block.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier, int block) {
  MSOPS_SM90(
      "{.reg .b32 there;"
      "mapa.shared::cluster.u32 there, %0, %1;"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" : : "r"(barrier),
      "r"(block) : "memory");
}

// Arrives when all copies by cp.async that the thread has begun are made.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(unsigned barrier) {
  MSOPS_SM80("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  MSOPS_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this number has ended, where the first is 0. At most the phase after it may have begun.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int phase) {
  unsigned done = 1;
  do {
#if MSOPS_HAS_SM90
    MSOPS_SM90(
        "{.reg .pred p;"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
        "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier),
        "r"(phase % 2) : "memory");
#else
    MSOPS_SM80(
        "{.reg .pred p;"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
        "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier),
        "r"(phase % 2) : "memory");
#endif
  } while (!done);
}

}  // namespace msops
