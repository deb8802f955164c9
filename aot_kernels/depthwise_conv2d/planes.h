// These kernels compute the depthwise convolution of the small images deep in networks: weights of 3 x 3, stride 1,
// padding 1, and images of 14 x 14 or 7 x 7.
//
// The rows of such images cross the caches' lines and sectors, but the images are contiguous. So each warp copies some
// to shared memory, in packs of 16 bytes, and its results back. A lane computes kRows whole rows of one image. The
// distance between two lanes' rows is an odd number of words (or of pairs of words), so that they are in different
// banks. A block is a warp, so that it never waits for another one: four warps to a block were 5 % slower on an H200.
#pragma once

#include "convolution.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"

namespace msops::depthwise::planes {

constexpr int kRows = 7;

// Images are a warp's images, in shared memory.
template <int kSide, typename T>
struct Images {
  static constexpr int kLanes = kSide / kRows;  // of an image
  static constexpr int kCount = 32 / kLanes, kSize = kSide * kSide;
  alignas(16) T values[kCount * kSize];
  alignas(16) T zeros[kSide];  // the row above an image's first one, and below its last one

  // Begins to copy `count` images, or as many as there is room for.
  __device__ void begin_copy(const T* from, int count) {
    if (count < kCount) return copy(values, from, count);
    for_packs([&](int at) { cp_async<16>(values + at, from + at); });
  }
  __device__ static void end_copy() {
    cp_async_wait_all();
    __syncwarp();
  }
  __device__ void copy_to(T* to, int count) const {
    __syncwarp();
    if (count < kCount) return copy(to, values, count);
    for_packs([&](int at) { store(to + at, load<kPackWidth<T>>(values + at)); });
  }

 private:
  static __device__ void copy(T* to, const T* from, int count) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kSize; i += 32) to[i] = from[i];
  }
  // Calls `f` with the offset of each of this lane's packs.
  template <typename F>
  static __device__ void for_packs(const F& f) {
    constexpr int N = kPackWidth<T>;
#pragma unroll
    for (int begin = 0; begin < kCount * kSize; begin += 32 * N)
      if (begin + 32 * N <= kCount * kSize || begin + threadIdx.x * N < kCount * kSize) f(begin + threadIdx.x * N);
  }
};

// Reads a row of an image, with its padding.
template <int kSide, typename T>
__device__ void read_row(const T* from, float (&row)[kSide + 2]) {
  constexpr int N = kSide % 2 ? 1 : 2;
  row[0] = row[kSide + 1] = 0;
#pragma unroll
  for (int j = 0; j < kSide; j += N) {
    const Pack<T, N> pack = load<N>(from + j);
    for (int k = 0; k < N; ++k) row[1 + j + k] = float(pack.values[k]);
  }
}

// `all` is the number of images of all channels.
template <int kSide, typename T>
__global__ void __launch_bounds__(32)
    forward_kernel(int all, Divisor channels, const T* __restrict__ x, const T* __restrict__ weight,
                   const T* __restrict__ bias, T* __restrict__ out) {
  using I = Images<kSide, T>;
  __shared__ I images;
  const int first = blockIdx.x * I::kCount, lane = threadIdx.x, offset = first * I::kSize;
  images.begin_copy(x + offset, all - first);
  int channel;
  channels.divide(first + lane / I::kLanes, &channel);
  float taps[3][3], rows[3][kSide + 2], below[kSide + 2];
  for (int k = 0; k < 9; ++k) taps[k / 3][k % 3] = float(weight[channel * 9 + k]);
  const float start = bias ? float(bias[channel]) : 0;
  if (lane < kSide) images.zeros[lane] = T(0.f);
  I::end_copy();
  T* image = images.values + lane / I::kLanes * I::kSize;
  const int row = lane % I::kLanes * kRows;
  T* own = image + row * kSide;
  read_row<kSide>(row == 0 ? images.zeros : own - kSide, rows[0]);
  read_row<kSide>(row + kRows == kSide ? images.zeros : own + kRows * kSide, below);
  read_row<kSide>(own, rows[1]);
  __syncwarp();  // from here on a lane reads its own rows only, before it writes there
#pragma unroll
  for (int r = 0; r < kRows; ++r, own += kSide) {
    if (r + 1 < kRows) {
      read_row<kSide>(own + kSide, rows[(r + 2) % 3]);
    } else {
#pragma unroll
      for (int j = 0; j < kSide + 2; ++j) rows[(r + 2) % 3][j] = below[j];
    }
    constexpr int N = kSide % 2 ? 1 : 2;
#pragma unroll
    for (int j = 0; j < kSide; j += N) {
      float sums[N];
      for (float& sum : sums) sum = start;
#pragma unroll
      for (int t = 0; t < 9; ++t)
        for (int k = 0; k < N; ++k) sums[k] += taps[t / 3][t % 3] * rows[(r + t / 3) % 3][j + k + t % 3];
      Pack<T, N> pack;
      for (int k = 0; k < N; ++k) pack.values[k] = T(sums[k]);
      store(own + j, pack);
    }
  }
  images.copy_to(out + offset, all - first);
}

// Calls `f(Constant<side>{})` if these kernels take the convolution.
template <typename F>
void with_side(const Convolution& s, int64_t largest, F&& f) {
  for (const Axis& axis : {s.h, s.w}) {
    if (axis.kernel != 3 || axis.stride != 1 || axis.dilation != 1 || axis.pad != 1 || axis.padding != 2) return;
  }
  if (s.multiplier != 1 || s.h.in != s.w.in || largest > kLargest32 || s.batch * s.channels == 0) return;
  with_constant<7, 14>(s.h.in, f);
}

// Returns false, and does nothing, if the convolution is not for these kernels.
template <typename T>
bool forward(Call& call, const Convolution& s, int64_t largest, const T* x, const T* weight, const T* bias, T* out) {
  bool done = false;
  if (!is_aligned<kPackWidth<T>>(x) || !is_aligned<kPackWidth<T>>(out)) return false;
  with_side(s, largest, [&](auto side) {
    constexpr int kSide = side, kCount = Images<kSide, T>::kCount;
    // Without this, a third fewer warps fit on an H200, which leaves more room to the L1 cache.
    const auto kernel = forward_kernel<kSide, T>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    const int64_t all = s.batch * s.channels, blocks = (all - 1) / kCount + 1;
    launch(call, kernel, blocks, 32, 0, static_cast<int>(all), Divisor(s.channels), x, weight, bias, out);
    done = true;
  });
  return done;
}

}  // namespace msops::depthwise::planes

#endif
