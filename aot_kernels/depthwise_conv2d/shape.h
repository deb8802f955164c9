// What the depthwise convolution's kernels are told, and how they share work out.
#pragma once

#include <algorithm>
#include <cmath>

#include "../common/pack.h"
#include "../common/parallel.h"

namespace msops {
namespace depthwise {

// One spatial direction.
struct Axis {
  int64_t in, out, kernel, stride, dilation;
  int64_t pad, padding;  // before the first element, and altogether

  int64_t largest() const { return in + padding + dilation * kernel + stride; }

  // Where the window of output o begins in the input; may be negative.
  template <typename I>
  MSOPS_BOTH I start(I o) const {
    return o * static_cast<I>(stride) - static_cast<I>(pad);
  }
};

struct Shape {
  int64_t batch, channels, multiplier;
  Axis h, w;

  int64_t taps() const { return h.kernel * w.kernel; }
  // This shape with another number of samples.
  Shape part(int64_t samples) const { return {samples, channels, multiplier, h, w}; }
  // No index of an element is larger, nor a padded coordinate.
  int64_t largest(int64_t sizes) const { return std::max({sizes, h.largest(), w.largest()}); }
};

// Calls `f(Constant<K>{})` with the K that `k` is; false if it is none of them.
template <int... K, typename F>
bool with_constant(int64_t k, F&& f) {
  return ((k == K && (f(Constant<K>{}), true)) || ...);
}

#ifdef __CUDACC__

MSOPS_BOTH bool within(int i, int n) { return static_cast<unsigned>(i) < static_cast<unsigned>(n); }

// The sizes of a convolution with multiplier 1 in 32 bits.
struct Sizes {
  int batch, channels, h_in, w_in, h_out, w_out, top, left;

  explicit Sizes(const Shape& s)
      : batch(s.batch),
        channels(s.channels),
        h_in(s.h.in),
        w_in(s.w.in),
        h_out(s.h.out),
        w_out(s.w.out),
        top(s.h.pad),
        left(s.w.pad) {}
};

// Division by a number known before the launch.
class Divisor {
 public:
  explicit Divisor(int64_t divisor) : divisor_(static_cast<int>(divisor)) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<unsigned>((((uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }
  MSOPS_BOTH int value() const { return divisor_; }
  // n / divisor, and *rest = n % divisor, for 0 <= n < 2^31
  __device__ int divide(int n, int* rest) const {
    const int quotient = static_cast<int>((__umulhi(n, factor_) + n) >> shift_);
    *rest = n - quotient * divisor_;
    return quotient;
  }

 private:
  int divisor_, shift_ = 0;
  unsigned factor_;
};

// The bytes that a block of this GPU may have on request, less what kernels have besides.
inline int64_t most_shared_memory() {
  int device = 0, bytes = 48 * 1024;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes - 1024;
}

// Always as much, so that no other thread's call allows less before this one's launch.
template <typename Kernel>
void allow_shared_memory(Kernel kernel) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_shared_memory()));
}

// How many blocks the GPU works on at once.
template <typename Kernel>
int blocks_at_once(Kernel kernel, int threads, int bytes) {
  int device = 0, processors = 1, blocks = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, bytes);
  return std::max(1, processors * blocks);
}

// Into how many parts, at most `most`, each channel's work is split, `work` pieces of which a block does `at_once`: so
// that in the last round of blocks, and in each block's last round, few are idle.
inline int64_t best_parts(int64_t channels, int64_t work, int64_t at_once, int64_t most, int64_t blocks_at_once) {
  const auto share = [](double amount) { return amount / std::ceil(amount); };
  double best = 0;
  int64_t result = 1;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const double busy = share(static_cast<double>(channels * parts) / blocks_at_once) *
                        share(static_cast<double>(work) / (parts * at_once));
    if (busy > best * 1.01) best = busy, result = parts;
  }
  return result;
}

#endif

}  // namespace depthwise
}  // namespace msops
