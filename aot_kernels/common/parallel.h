// One loop body, two devices: body(i) for every i in [0, n), on the call's stream or on the CPU's threads.
#pragma once

#if defined(__SSE__) && !defined(__CUDA_ARCH__)
#include <xmmintrin.h>
#endif

#include "call.h"

namespace msops {

// Up to here indices have 32 bits. Some room is left for what a body adds to an index before it compares.
constexpr int64_t kLargest32 = INT32_MAX - 65536;

// The first of the `part`-th of `parts` nearly equal parts of [0, total).
template <typename I>
MSOPS_BOTH I part_begin(I total, I part, I parts) {
  const I length = total / parts, longer = total % parts;
  return part * length + (part < longer ? part : longer);
}

// MindSpore's own CPU threads flush subnormal numbers to zero; threads that start from them inherit it. Undone while
// one of these lives, so that results depend neither on the mode nor on the thread.
class KeepSubnormals {
#if defined(__SSE__) && !defined(__CUDA_ARCH__)
 public:
  KeepSubnormals() { _mm_setcsr(before_ & ~0x8040u); }  // flush to zero, denormals are zero
  ~KeepSubnormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#endif
};

#ifdef __CUDACC__
constexpr int kThreads = 256;

template <typename Index, typename Body>
__global__ void __launch_bounds__(kThreads) parallel_for_kernel(Index n, Body body) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) body(i);
}
#endif

// `body` is an object with `template <typename Index> MSOPS_BOTH void operator()(Index i) const`. Index has 32 bits
// where that is enough for `largest`, an upper bound of n and of every index that the body computes. `cost` is the work
// of one i in units of one simple element: below some work, threads do not pay.
template <typename Body>
void parallel_for(Call& call, int64_t n, [[maybe_unused]] int64_t largest, const Body& body, double cost = 1) {
  if (!call.ok() || n == 0) return;
  if (call.on_cpu()) {
    const bool worthwhile = n > 1 && static_cast<double>(n) * cost > 32768;
#pragma omp parallel if (worthwhile)
    {
      [[maybe_unused]] const KeepSubnormals guard;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < n; ++i) body(i);
    }
    return;
  }
#ifdef __CUDACC__
  const int64_t blocks = (n - 1) / kThreads + 1;
  call.require(blocks <= INT32_MAX, kBadShape, "too many elements for one launch");
  if (!call.ok()) return;
  if (largest <= kLargest32) {
    parallel_for_kernel<<<blocks, kThreads, 0, call.stream()>>>(static_cast<uint32_t>(n), body);
  } else {
    parallel_for_kernel<<<blocks, kThreads, 0, call.stream()>>>(n, body);
  }
  call.check_launch();
#endif
}

}  // namespace msops
