// The naive versions of the operators share this header. They are written as one writes them first: a thread for each
// element of the result, no tiles, no packs, no scratch. The tuned kernels are measured beside them.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

constexpr int kThreads = 256;

inline unsigned blocks(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__device__ inline int64_t thread() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }

// dx[k] = sum over o, i of dout[o, k, i]
template <typename T>
__global__ void sum(const T* dout, T* dx, int64_t outer, int64_t kept, int64_t inner) {
  const int64_t k = thread();
  if (k >= kept) return;
  float total = 0;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i) total += float(dout[(o * kept + k) * inner + i]);
  dx[k] = T(total);
}

#define ENTRY extern "C" __attribute__((visibility("default"))) int

// naive_NAME(half, arrays, sizes, stream) launches NAME on arrays of half or float, inputs then outputs, and returns
// CUDA's error. The benchmark calls OPERATOR_forward and OPERATOR_backward.
#define EXPORT(NAME)                                                                       \
  ENTRY naive_##NAME(int half, void** arrays, const int64_t* sizes, cudaStream_t stream) { \
    half ? NAME(reinterpret_cast<__half**>(arrays), sizes, stream)                         \
         : NAME(reinterpret_cast<float**>(arrays), sizes, stream);                         \
    return cudaGetLastError();                                                             \
  }
