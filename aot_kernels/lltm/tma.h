// What sm_90 brought: the tensor memory accelerator (TMA), which copies boxes of arrays to shared memory, barriers that
// count its bytes, clusters of blocks, and launches that begin before the one before has ended.
#pragma once

#include <dlfcn.h>

#include "../common/pack.h"

namespace msops {

#if CUDART_VERSION >= 12000  // the first that knows TMA and wgmma

// For sm_90 and later.
#if __CUDA_ARCH__ >= 900
#define MSOPS_SM90(...) asm volatile(__VA_ARGS__)
constexpr bool kHasSm90 = true;
#else
#define MSOPS_SM90(...)
constexpr bool kHasSm90 = false;
#endif
// For sm_90a alone.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MSOPS_SM90A(...) asm volatile(__VA_ARGS__)
constexpr bool kHasSm90a = true;
#else
#define MSOPS_SM90A(...)
constexpr bool kHasSm90a = false;
#endif

// What the launches before have written is there.
__device__ __forceinline__ void wait_for_launches() { MSOPS_SM90("griddepcontrol.wait;" : : : "memory"); }
// The next launch may use what this one leaves free.
__device__ __forceinline__ void let_next_launch() { MSOPS_SM90("griddepcontrol.launch_dependents;" : : : "memory"); }

// An array of float32 that TMA reads boxes of, as the driver describes it. The function and the constants are those of
// its header cuda.h, which nvcc can lack.
class alignas(64) TensorMap {
 public:
  struct Dimension {
    int64_t size, stride;  // in elements; the first one's stride is 1
    int box;
  };

  // Elements beyond the sizes are read as 0. The first dimension's part of a box is a row of 128 bytes in shared
  // memory; the k-th pack of 16 bytes in it is stored as that with number k ^ row % 8.
  template <int N>
  bool encode(const float* data, const Dimension (&dimensions)[N]) {
    constexpr int kFloat = 7, kSwizzle128 = 3, kPromotion256 = 3;  // of what L2 reads, in bytes
    uint64_t sizes[kRank], strides[kRank];
    uint32_t boxes[kRank], steps[kRank];
    for (int i = 0; i < kRank; ++i) sizes[i] = boxes[i] = steps[i] = 1, strides[i] = 16;
    for (int i = 0; i < N; ++i) {
      sizes[i] = dimensions[i].size;
      strides[i] = dimensions[i].stride * sizeof(float);
      boxes[i] = dimensions[i].box;
    }
    static const auto function =
        reinterpret_cast<Function*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled"));
    return function &&
           function(this, kFloat, kRank, data, sizes, strides + 1, boxes, steps, 0, kSwizzle128, kPromotion256, 0) == 0;
  }

 private:
  static constexpr int kRank = 5;
  using Function = int(TensorMap*, int, uint32_t, const void*, const uint64_t*, const uint64_t*, const uint32_t*,
                       const uint32_t*, int, int, int, int);
  [[maybe_unused]] uint64_t opaque_[16];
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Counts arrivals, and bytes that TMA writes, of one phase after another; in shared memory.
struct Barrier {
  unsigned address;

  __device__ __forceinline__ void init(int arrivals) const {
    MSOPS_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(address), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    MSOPS_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(address) : "memory");
  }
  __device__ __forceinline__ void arrive_and_expect(int bytes) const {
    MSOPS_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(address), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ void wait(int phase) const {
    unsigned done = 1;
    do
      MSOPS_SM90(
          "{.reg .pred p;"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
          "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(address),
          "r"(phase % 2) : "memory");
    while (!done);
  }
};

// Begins to copy a box to shared memory; the barrier counts its bytes.
__device__ __forceinline__ void copy_box(unsigned to, Barrier barrier, const TensorMap& map, int x0, int x1, int x2,
                                         int x3, int x4) {
  MSOPS_SM90(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" : : "r"(to),
      "l"(&map), "r"(barrier.address), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}

// What the cluster's blocks have written to shared memory is there behind it.
__device__ __forceinline__ void cluster_barrier() {
  MSOPS_SM90("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// How many clusters of that launch the GPU runs at once; 0: none.
template <typename Kernel>
int clusters_at_once(Kernel kernel, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) cudaGetLastError();
  return clusters;
}

__device__ __forceinline__ Pack<float, 4> load_from_cluster(const float* from, int block_of_cluster) {
  Pack<float, 4> pack = {};
  MSOPS_SM90(
      "{.reg .b32 there;"
      "mapa.shared::cluster.u32 there, %4, %5;"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}" : "=f"(pack.values[0]),
      "=f"(pack.values[1]), "=f"(pack.values[2]), "=f"(pack.values[3]) : "r"(shared_address(from)),
      "r"(block_of_cluster) : "memory");
  return pack;
}

#endif

}  // namespace msops
