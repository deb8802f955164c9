// cp.async.bulk.tensor runs the tensor memory accelerator (TMA), which copies boxes of arrays to shared memory while an
// mbarrier counts the bytes; for sm_90 and later.
#pragma once

#include <dlfcn.h>

#include "../dtype.h"
#include "instructions.h"

namespace msops {

#if CUDART_VERSION >= 12000  // the first version that knows TMA

// A TensorMap is an array that TMA reads boxes of, as the driver describes it. The function and the constants come from
// the driver's header cuda.h, which nvcc can lack. A kernel takes a map as a `const __grid_constant__ TensorMap`.
class alignas(64) TensorMap {
 public:
  struct Dimension {
    int64_t size, stride;  // in elements; the first one's stride is 1
    int box;
  };

  // How shared memory has a row, which is the first dimension's part of a box: kSwizzle128 is for rows of 128 bytes, of
  // which the k-th pack of 16 is stored at position k ^ row % 8; with kNoSwizzle, packs of any number keep their
  // places.
  enum Swizzle { kNoSwizzle = 0, kSwizzle128 = 3 };

  // Elements beyond the sizes are read as 0. Dimensions that are not given, up to five, have size 1.
  template <typename T, int N>
  bool encode(const T* data, const Dimension (&dimensions)[N], Swizzle swizzle = kSwizzle128) {
    constexpr int kBytes = 0, kHalf = 6, kFloat = 7, kPromotion256 = 3;  // kPromotion256: bytes that L2 reads
    static_assert(sizeof(T) == 1 || std::is_same<T, Half>::value || std::is_same<T, float>::value,
                  "TMA reads bytes, float16 or float32");
    constexpr int kType = sizeof(T) == 1 ? kBytes : sizeof(T) == 2 ? kHalf : kFloat;
    uint64_t sizes[kRank], strides[kRank];
    uint32_t boxes[kRank], steps[kRank];
    for (int i = 0; i < kRank; ++i) sizes[i] = boxes[i] = steps[i] = 1, strides[i] = 16;
    for (int i = 0; i < N; ++i) {
      sizes[i] = dimensions[i].size;
      strides[i] = dimensions[i].stride * sizeof(T);
      boxes[i] = dimensions[i].box;
    }
    static const auto function =
        reinterpret_cast<Function*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled"));
    return function &&
           function(this, kType, kRank, data, sizes, strides + 1, boxes, steps, 0, swizzle, kPromotion256, 0) == 0;
  }

 private:
  static constexpr int kRank = 5;
  using Function = int(TensorMap*, int, uint32_t, const void*, const uint64_t*, const uint64_t*, const uint32_t*,
                       const uint32_t*, int, int, int, int);
  [[maybe_unused]] uint64_t opaque_[16];
};

// Begins to copy the box that begins at these coordinates to shared memory; the mbarrier counts its bytes. The first
// coordinate times the size of an element must be a multiple of 16 bytes; otherwise, the instruction is illegal.
__device__ __forceinline__ void tma_load_5d(unsigned to, unsigned barrier, const TensorMap& map, int x0, int x1, int x2,
                                            int x3, int x4) {
  MSOPS_SM90(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" : : "r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}
// Does so for all blocks of the cluster whose bits are set in `blocks`: a box comes to the same place in each, and is
// counted by the mbarrier at the same place.
__device__ __forceinline__ void tma_load_5d_multicast(unsigned to, unsigned barrier, const TensorMap& map, int x0,
                                                      int x1, int x2, int x3, int x4,
                                                      [[maybe_unused]] uint16_t blocks) {
  MSOPS_SM90(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" : : "r"(to),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "h"(blocks) : "memory");
}

#endif

}  // namespace msops
