// These kernels measure the device itself: an empty one, and one of multiply-adds.

#include "naive.h"

namespace {

__global__ void nothing() {}

// The chains of multiply-adds wait for nothing: a thread does 2 * kChains * rounds operations.
constexpr int kChains = 8;

__global__ void multiply_add(float* out, int64_t rounds) {
  float x[kChains];
  for (int j = 0; j < kChains; ++j) x[j] = float(threadIdx.x + j);
#pragma unroll 16
  for (int64_t i = 0; i < rounds; ++i)
    for (int j = 0; j < kChains; ++j) x[j] = fmaf(x[j], 0.999f, 0.5f);
  float total = 0;
  for (int j = 0; j < kChains; ++j) total += x[j];
  if (total == -1) out[0] = total;  // this is never true, but keeps the compiler from leaving it all out
}

}  // namespace

ENTRY naive_nothing(int, void**, const int64_t*, cudaStream_t stream) {
  nothing<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

// sizes: blocks, threads of a block, rounds
ENTRY naive_multiply_add(int, void** arrays, const int64_t* sizes, cudaStream_t stream) {
  multiply_add<<<unsigned(sizes[0]), unsigned(sizes[1]), 0, stream>>>(static_cast<float*>(arrays[0]), sizes[2]);
  return cudaGetLastError();
}
