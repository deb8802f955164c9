// This header says what a launch may ask of the GPU: shared memory, and how many blocks or clusters run at once.
#pragma once

#include <algorithm>

#include "instructions.h"

namespace msops {

// Gpu describes the current GPU.
struct Gpu {
  int multiprocessors = 1, shared_bytes = 48 * 1024, cooperative = 0;  // shared_bytes: the most of a block, on request

  Gpu() {
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
  }

  // Returns what is left for dynamic shared memory beside a kernel's own arrays of up to 1 KiB.
  int dynamic_bytes() const { return shared_bytes - 1024; }
};

// Allows a kernel at least this many bytes of dynamic shared memory.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int64_t bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Returns how many blocks the GPU runs at once, or 0 if a block needs more than there is.
template <typename Kernel>
int blocks_at_once(const Gpu& gpu, Kernel kernel, int threads, int64_t bytes) {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, bytes);
  return blocks * gpu.multiprocessors;
}

#if CUDART_VERSION >= 12000
// Returns how many clusters of this launch the GPU runs at once, or 0.
template <typename Kernel>
int clusters_at_once(Kernel kernel, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) cudaGetLastError();
  return clusters;
}
#endif

}  // namespace msops
