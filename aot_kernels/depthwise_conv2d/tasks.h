// The kernels of small.h and staged.h share how results are dealt to threads, the taps, and the sums of gradients.
// Their weights are square, of K = 3, 5 or 7, with a stride S of 1 or 2, no dilation, and multiplier 1.
#pragma once

#include "../common/sum.h"
#include "convolution.h"

#ifdef __CUDACC__

#include "../common/gpu/ld_st.h"

namespace msops::depthwise::tasks {

constexpr int kThreads = 128;

// At least this many blocks run on a multiprocessor at once, which limits a thread's registers. The numbers were
// measured on an H200.
template <int K, int S>
constexpr int kForwardBlocks = S == 1 && K == 3 ? 5
                               : S == 1         ? 3
                                                : 2;
template <int K>
constexpr int kBackwardBlocks = K == 3   ? 6
                                : K == 5 ? 4
                                         : 3;

// Tasks are strips of kRows rows in an image and groups of kColumns columns in a row, both of results.
struct Tasks {
  Divisor strips, groups;
};

// SharedTaps are a channel's taps in shared memory, for threads that need their registers for the gradients of all
// taps.
template <int K>
struct SharedTaps {
  static constexpr int kPitch = (K + 3) / 4 * 4;
  alignas(16) float values[K][kPitch];

  template <typename T>
  __device__ void fill(const T* weight, int channel) {
    for (int k = threadIdx.x; k < K * K; k += kThreads) values[k / K][k % K] = float(weight[channel * K * K + k]);
    __syncthreads();
  }
  // Otherwise the compiler would keep all rows in registers that it does not have.
  __device__ void row(int a, float (&taps)[kPitch]) const {
    for (int b = 0; b < kPitch; b += 4) ld_shared_v4(taps + b, shared_address(values[a] + b));
  }
};

// Writes the sums of all threads, for a channel's taps and its bias, to a part's row of `partial`.
template <int kSums>
__device__ void write_sums(const float (&sums)[kSums], int channel, int channels, int part, float* partial) {
  constexpr int kTaps = kSums - 1, kWarps = kThreads / 32;
  __shared__ float of_warps[kWarps][kSums];
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    const float sum = team_sum<32>(sums[k]);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][k] = sum;
  }
  __syncthreads();
  float* to = partial + static_cast<int64_t>(part) * channels * kSums;
  for (int k = threadIdx.x; k < kSums; k += kThreads) {
    float sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][k];
    to[k < kTaps ? channel * kTaps + k : channels * kTaps + channel] = sum;
  }
}

// Calls `f(Constant<K>{}, Constant<S>{})` if the weights are K x K and the stride is S, as these kernels take them.
template <typename F>
void with_square_weights(const Convolution& s, int64_t largest, F&& f) {
  const int64_t k = s.h.kernel, stride = s.h.stride;
  if (s.multiplier != 1 || s.w.kernel != k || s.w.stride != stride || s.h.dilation != 1 || s.w.dilation != 1) return;
  if (largest > kLargest32 || s.batch * s.channels == 0) return;
  with_constant<3, 5, 7>(k, [&](auto K) { with_constant<1, 2>(stride, [&](auto S) { f(K, S); }); });
}

}  // namespace msops::depthwise::tasks

#endif
