// launch() runs a kernel on the call's stream, with so many bytes of dynamic shared memory:
//
//   launch(call, scale_kernel<T>, blocks, threads, bytes, n, x, y);
//
// The blocks are a number, or a Grid of up to three dimensions, whose blocks may run in clusters or all at once:
//
//   launch(call, scale_kernel<T>, Grid(8 * rows).in_clusters(8), threads, bytes, n, x, y);
//
// Arguments convert to the kernel's parameters. launch() does nothing if the call has failed or there are no blocks.
// The first error of CUDA becomes the call's status.
#pragma once

#include <atomic>

#include "call.h"

#ifdef __CUDACC__
#include "gpu/instructions.h"

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

// FactOfGpu is a static variable that keeps what a host function finds out about its kernel: an int of at least 0 for
// each GPU, and for each key below kKeys. The driver takes microseconds to tell. Mark the variable [[maybe_unused]],
// since nvcc 11.8 does not see its use.
template <int kKeys = 1>
class FactOfGpu {
 public:
  // Returns find() for the current GPU.
  template <typename Find>
  int get(const Find& find, int key = 0) {
    int gpu = 0;
    cudaGetDevice(&gpu);
    if (gpu >= kGpus) return find();
    std::atomic<int>& known = known_[gpu][key];
    if (known == 0) known = 1 + find();
    return known - 1;
  }

 private:
  static constexpr int kGpus = 16;
  std::atomic<int> known_[kGpus][kKeys];  // one more than find() returned, or 0
};

// Grid says how many blocks a launch has, and which of them run at once.
struct Grid {
  int64_t x, y, z;
  dim3 cluster = dim3(0, 0, 0);  // 0: no clusters, which the GPU may lack
  bool is_cooperative = false, is_programmatic = false;

  Grid(int64_t x_, int64_t y_ = 1, int64_t z_ = 1) : x(x_), y(y_), z(z_) {}

  // Groups of so many blocks run at once and reach each other's shared memory (gpu/cluster.h). Ask clusters_at_once
  // whether the GPU has them.
  Grid in_clusters(dim3 blocks) const {
    Grid result = *this;
    result.cluster = blocks;
    return result;
  }
  // All blocks run at once, so that they may wait for each other. Ask Gpu::cooperative and blocks_at_once.
  Grid cooperative() const {
    Grid result = *this;
    result.is_cooperative = true;
    return result;
  }
  // Blocks may start before those of the launch before have ended, for which they wait (gpu/griddepcontrol.h), if
  // `may_start` says so.
  Grid programmatic(bool may_start = true) const {
    Grid result = *this;
    result.is_programmatic = may_start;
    return result;
  }

  bool is_empty() const { return x == 0 || y == 0 || z == 0; }
  bool fits_launch() const { return x <= INT32_MAX && y <= 65535 && z <= 65535; }
  dim3 blocks() const { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)); }
  unsigned blocks_of_cluster() const { return cluster.x * cluster.y * cluster.z; }
};

// Allows a kernel what CUDA gives it on request only: more than 48 KiB of shared memory, which include the kernel's own
// arrays, and clusters of more than 8 blocks. Each launch asks, since each of several GPUs has to be asked.
template <typename Kernel>
void allow_launch(Kernel kernel, [[maybe_unused]] const Grid& grid, int64_t bytes) {
  constexpr int64_t kAlwaysAllowed = 32 * 1024;  // beside own arrays of up to 16 KiB
  if (bytes > kAlwaysAllowed)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
#if CUDART_VERSION >= 12000
  if (grid.blocks_of_cluster() > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
#endif
}

#if CUDART_VERSION >= 12000
// LaunchConfig is a launch as the runtime of CUDA 12 takes it. Older versions lack what kernels in clusters need (see
// gpu/instructions.h).
class LaunchConfig {
 public:
  LaunchConfig(const Grid& grid, dim3 threads, int64_t bytes, cudaStream_t stream) {
    config_.gridDim = grid.blocks();
    config_.blockDim = threads;
    config_.dynamicSmemBytes = static_cast<size_t>(bytes);
    config_.stream = stream;
    config_.attrs = attributes_;
    if (grid.blocks_of_cluster() > 0)
      add(cudaLaunchAttributeClusterDimension).clusterDim = {grid.cluster.x, grid.cluster.y, grid.cluster.z};
    if (grid.is_cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
    if (grid.is_programmatic)
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  operator const cudaLaunchConfig_t*() const { return &config_; }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }

  cudaLaunchAttribute attributes_[3];
  cudaLaunchConfig_t config_{};
};
#endif

// Returns how many blocks the GPU runs at once, or 0 if a block needs more than there is.
template <typename Kernel>
int blocks_at_once(const Gpu& gpu, Kernel kernel, int threads, int64_t bytes) {
  int blocks = 0;
  allow_launch(kernel, Grid(1), bytes);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(bytes));
  return blocks * gpu.multiprocessors;
}

// Returns how many clusters of a launch the GPU runs at once, or 0. The kernel must be compiled for sm_90.
template <typename Kernel>
int clusters_at_once([[maybe_unused]] Kernel kernel, [[maybe_unused]] const Grid& grid, [[maybe_unused]] int threads,
                     [[maybe_unused]] int64_t bytes) {
  int clusters = 0;
#if CUDART_VERSION >= 12000
  allow_launch(kernel, grid, bytes);
  const LaunchConfig config(grid, threads, bytes, nullptr);
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, config) != cudaSuccess) cudaGetLastError();
#endif
  return clusters;
}

template <typename... P>
void launch(Call& call, void (*kernel)(P...), const Grid& grid, dim3 threads, int64_t bytes,
            const typename Type<P>::type&... arguments) {
  call.require(grid.fits_launch(), kBadShape, "needs too many blocks for one launch");
  if (!call.ok() || grid.is_empty()) return;
  allow_launch(kernel, grid, bytes);
#if CUDART_VERSION >= 12000
  cudaLaunchKernelEx(LaunchConfig(grid, threads, bytes, call.stream()), kernel, arguments...);
#else
  // The kernel is a `const void*`, since the runtime's templates for kernels do not compile before CUDA 12.5.
  const void* const function = reinterpret_cast<const void*>(kernel);
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
  if (grid.is_cooperative) {
    cudaLaunchCooperativeKernel(function, grid.blocks(), threads, pointers, static_cast<size_t>(bytes), call.stream());
  } else {
    cudaLaunchKernel(function, grid.blocks(), threads, pointers, static_cast<size_t>(bytes), call.stream());
  }
#endif
  call.check_launch();
}

}  // namespace msops
#endif
