// A cluster is a group of blocks that run at once and reach each other's shared memory, on sm_90 and later. The launch
// needs cudaLaunchAttributeClusterDimension; a block is given by its number in the cluster.
#pragma once

#include "../pack.h"
#include "instructions.h"

namespace msops {

// Makes all threads of the cluster's blocks wait for each other; what they wrote before is visible after it. This is
// one statement, since two let ptxas choose other registers around them.
__device__ __forceinline__ void cluster_arrive_wait() {
  MSOPS_SM90("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// Tells the cluster that the thread has come, without making anything visible that it wrote.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  MSOPS_SM90("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}
// Waits until all threads of the cluster have come.
__device__ __forceinline__ void cluster_wait() { MSOPS_SM90("barrier.cluster.wait.acquire.aligned;" : : : "memory"); }

// cluster_ctarank returns the block's number in its cluster, cluster_nctarank the number of its blocks.
__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank = 0;
  MSOPS_SM90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ unsigned cluster_nctarank() {
  unsigned blocks = 1;
  MSOPS_SM90("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// Loads four floats of another block's shared memory, from the place that `from` has in this block's.
__device__ __forceinline__ Pack<float, 4> ld_shared_cluster(const float* from, int block) {
  Pack<float, 4> pack = {};
  MSOPS_SM90(
      "{.reg .b32 there;"
      "mapa.shared::cluster.u32 there, %4, %5;"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}" : "=f"(pack.values[0]),
      "=f"(pack.values[1]), "=f"(pack.values[2]), "=f"(pack.values[3]) : "r"(shared_address(from)),
      "r"(block) : "memory");
  return pack;
}

#if CUDART_VERSION >= 12010  // the first version that knows st.async
constexpr bool kHasStAsync = true;
// Sends a number to another block's shared memory, at the place that `to` has in this block's. That block's mbarrier at
// the place of `barrier` counts its 4 bytes.
__device__ __forceinline__ void st_async(float number, const float* to, unsigned barrier, int block) {
  MSOPS_SM90(
      "{.reg .b32 there, counted;"
      "mapa.shared::cluster.u32 there, %0, %3;"
      "mapa.shared::cluster.u32 counted, %2, %3;"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [counted];}" : : "r"(shared_address(to)),
      "f"(number), "r"(barrier), "r"(block) : "memory");
}
#else
constexpr bool kHasStAsync = false;
__device__ __forceinline__ void st_async(float, const float*, unsigned, int) {}
#endif

}  // namespace msops
