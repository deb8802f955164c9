// This header runs one loop body on two devices: body(i) for every i in [0, n), on the call's stream or on the CPU's
// threads.
#pragma once

#include <omp.h>

#include <algorithm>
#if defined(__SSE__) && !defined(__CUDA_ARCH__)
#include <xmmintrin.h>
#endif

#include "call.h"
#include "launch.h"

namespace msops {

// Indices up to this one have 32 bits. The rest is room for what a body adds to an index before it compares.
constexpr int64_t kLargest32 = INT32_MAX - 65536;

// Returns the first index of the `part`-th of `parts` nearly equal parts of [0, total).
template <typename I>
MSOPS_BOTH I part_begin(I total, I part, I parts) {
  const I length = total / parts, longer = total % parts;
  return part * length + (part < longer ? part : longer);
}

// MindSpore's own CPU threads flush subnormal numbers to zero, and threads that they start inherit this. A
// KeepSubnormals object undoes it while it lives, so that results depend neither on the mode nor on the thread.
class KeepSubnormals {
#if defined(__SSE__) && !defined(__CUDA_ARCH__)
 public:
  KeepSubnormals() { _mm_setcsr(before_ & ~0x8040u); }  // flush to zero, denormals are zero
  ~KeepSubnormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#endif
};

// Runs body(part, parts). The body is copied, so that its members can stay in registers.
template <typename Body>
__attribute__((noinline)) void run_copy(int64_t part, int64_t parts, Body body) {
  body(part, parts);
}

// Calls body(j) for each j in [0, n), in a loop that vectorizes, with all that the body calls.
template <typename Body>
__attribute__((noinline, flatten)) void run_simd(int64_t n, Body body) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) body(j);
}
#ifdef __x86_64__
template <typename Body>
__attribute__((noinline, flatten, target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
run_avx512(int64_t n, Body body) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) body(j);
}
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Calls body(j), which computes an element in C, for each j in [0, n) on this thread. For float, the loop is compiled
// for AVX-512, too: formulas become 1.3 to 1.5 times as fast, and give the same results.
template <typename C, typename Body>
void for_elements(int64_t n, const Body& body) {
#ifdef __x86_64__
  if constexpr (sizeof(C) == 4)
    if (has_avx512()) return run_avx512(n, body);
#endif
  run_simd(n, body);
}

// Runs body(part, parts) for each part, each on a CPU thread of its own, with at most `most` parts. `work` is the work
// of all parts, in units of one simple element.
template <typename Body>
void on_threads(Call& call, int64_t most, double work, const Body& body) {
  if (!call.ok() || most == 0) return;
  constexpr double kWork = 1 << 18;  // about 60 us: to wake threads and to wait for them takes as long
  const int cores = omp_get_max_threads();
  const double wanted = work / kWork;
  // If there are more threads than cores, threads that wait for others sleep at once (GCC's manual, GOMP_SPINCOUNT). So
  // one thread without work is added when all cores are wanted. Otherwise, waiting threads spin for milliseconds on
  // cores that MindSpore's own threads need: in PyNative mode on two cores, adding 10^5 elements then took 15 ms
  // instead of 0.2.
  const int threads = most == 1 || cores == 1 || wanted < 2 ? 1 : wanted < cores ? static_cast<int>(wanted) : cores + 1;
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] const KeepSubnormals guard;
    const int64_t part = omp_get_thread_num(), parts = std::min<int64_t>({omp_get_num_threads(), cores, most});
    if (part < parts) run_copy(part, parts, body);
  }
}

// ForPart runs body(i) for one part of the indices in [0, n). The body is copied and inlined, too, so that its members
// stay in registers.
template <typename Body>
struct ForPart {
  int64_t n;
  Body body;

  MSOPS_CPU __attribute__((always_inline)) void operator()(int64_t part, int64_t parts) const {
    const int64_t end = part_begin(n, part + 1, parts);
    for (int64_t i = part_begin(n, part, parts); i < end; ++i) body(i);
  }
};

// Runs body(i) for every i in [0, n) on the CPU's threads. `cost` is the work of one i, in units of one simple element.
template <typename Body>
void on_cpu(Call& call, int64_t n, const Body& body, double cost) {
  on_threads(call, n, static_cast<double>(n) * cost, ForPart<Body>{n, body});
}

#ifdef __CUDACC__
constexpr int kThreads = 256;

template <typename Index, typename Body>
__global__ void __launch_bounds__(kThreads) parallel_for_kernel(Index n, Body body) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) body(i);
}
#endif

// Runs body(i) for every i in [0, n) on the call's stream. `body` is an object with `template <typename Index>
// MSOPS_BOTH void operator()(Index i) const`; Index must hold every index that the body computes.
template <typename Index, typename Body>
void on_gpu_with([[maybe_unused]] Call& call, [[maybe_unused]] int64_t n, [[maybe_unused]] const Body& body) {
#ifdef __CUDACC__
  const int64_t blocks = (n + kThreads - 1) / kThreads;
  launch(call, parallel_for_kernel<Index, Body>, blocks, kThreads, 0, static_cast<Index>(n), body);
#endif
}

// Takes indices of 32 bits where that is enough for `largest`, an upper bound of n and of every index that the body
// computes.
template <typename Body>
void on_gpu(Call& call, int64_t n, int64_t largest, const Body& body) {
  largest <= kLargest32 ? on_gpu_with<uint32_t>(call, n, body) : on_gpu_with<int64_t>(call, n, body);
}

// Takes indices of 64 bits if `huge`, for which there is a kernel only if kCanBeHuge. (Before CUDA 11.8, a lambda of
// the caller cannot ask that by `if constexpr`, since nvcc takes no constant from an outer lambda.)
template <bool kCanBeHuge, typename Body>
void on_gpu_if_huge([[maybe_unused]] bool huge, Call& call, int64_t n, const Body& body) {
  if constexpr (kCanBeHuge)
    if (huge) return on_gpu_with<int64_t>(call, n, body);
  on_gpu_with<uint32_t>(call, n, body);
}

// Calls `f(first, count)` for runs that tile [0, n). A run has at least one element; otherwise it is as long as 32-bit
// indices allow if each element has `each` of them. So a kernel for 32 bits serves any n. Runs of 8 or more elements
// begin at multiples of 8, so that packs stay aligned.
template <typename F>
void in_runs(int64_t n, int64_t each, F&& f) {
  int64_t most = std::max<int64_t>(1, kLargest32 / std::max<int64_t>(1, each));
  if (most > 8) most -= most % 8;
  for (int64_t first = 0; first < n; first += most) f(first, std::min(most, n - first));
}

// Runs body(i) for every i in [0, n) on the device of the call.
template <typename Body>
void parallel_for(Call& call, int64_t n, int64_t largest, const Body& body, double cost = 1) {
  if (call.is_on_cpu()) {
    on_cpu(call, n, body, cost);
  } else {
    on_gpu(call, n, largest, body);
  }
}

}  // namespace msops
