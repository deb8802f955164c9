// The time loop for all other sizes: each round is a product by cuBLAS and a kernel for what the units make of it, all
// launched from here. cuBLAS is the one that the process has: MindSpore's and PyTorch's GPU packages load it.
#pragma once

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "../common/parallel.h"
#include "loop.h"

namespace msops {

// The few functions and constants of cuBLAS 11 to 13 that are needed, without its headers, which nvcc can lack.
class Cublas {
 public:
  // Calls `f(handle)` with the current device's handle on the stream, one thread at a time; false if there is none.
  template <typename F>
  static bool with_handle(cudaStream_t stream, F&& f) {
    static Cublas cublas;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    int device = 0;
    if (!cublas.multiply_ || cudaGetDevice(&device) != cudaSuccess) return false;
    void*& handle = cublas.handles_[device];
    if (!handle && cublas.create_(&handle) != 0) return false;
    return cublas.set_stream_(handle, stream) == 0 && f(cublas, handle);
  }

  // sums (n, m) = numbers (n, k) times weights, which are (m, k) if `transposed`, else (k, m). Of rows without gaps.
  template <typename T>
  bool multiply(void* handle, bool transposed, int64_t m, int64_t n, int64_t k, const T* weights, const T* numbers,
                Compute<T>* sums, bool allow_tf32) const {
    constexpr int kFloat = 0, kDouble = 1, kHalf = 2;                          // cudaDataType
    constexpr int kComputeFloat = 68, kComputeDouble = 70, kComputeTf32 = 77;  // cublasComputeType_t
    constexpr int kType = sizeof(T) == 8 ? kDouble : sizeof(T) == 4 ? kFloat : kHalf;
    const Compute<T> one = 1, zero = 0;
    const int compute = sizeof(T) == 8 ? kComputeDouble : sizeof(T) == 4 && allow_tf32 ? kComputeTf32 : kComputeFloat;
    // cuBLAS takes columns: what is a row here is a column there.
    return multiply_(handle, transposed, 0, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), &one,
                     weights, kType, static_cast<int>(transposed ? k : m), numbers, kType, static_cast<int>(k), &zero,
                     sums, sizeof(T) == 8 ? kDouble : kFloat, static_cast<int>(m), compute, -1) == 0;
  }

 private:
  Cublas() {
    void* library = nullptr;
    for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW})
      for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"})
        if (!library) library = dlopen(name, flags);
    if (!library) return;
    create_ = reinterpret_cast<decltype(create_)>(dlsym(library, "cublasCreate_v2"));
    set_stream_ = reinterpret_cast<decltype(set_stream_)>(dlsym(library, "cublasSetStream_v2"));
    if (create_ && set_stream_) multiply_ = reinterpret_cast<decltype(multiply_)>(dlsym(library, "cublasGemmEx"));
  }

  int (*create_)(void**) = nullptr;
  int (*set_stream_)(void*, cudaStream_t) = nullptr;
  int (*multiply_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                   const void*, void*, int, int, int, int) = nullptr;
  std::map<int, void*> handles_;  // of devices; they live as long as the process
};

// What the units make of a round's sums; round -1 is the start.
template <typename Loop>
struct Round {
  using T = typename Loop::Element;
  using C = Compute<T>;
  Loop loop;
  int64_t round;
  const C* sums;  // (batch, tiles, hidden)
  C* states[2];   // (batch, hidden)
  T* published;   // (batch, segments, hidden)

  __device__ void operator()(int64_t sample, int64_t unit) const {
    const int64_t units = loop.hidden, at = sample * units + unit;
    const auto publish = [&](int segment, T value) {
      published[(sample * Loop::kSegments + segment) * units + unit] = value;
    };
    typename Loop::State state;
    typename Loop::Update update;
    if (round < 0) {
      state = loop.begin(sample, unit);
      update = loop.start(state, sample, unit, publish);
    } else {
      state = {states[0][at], states[1][at]};
      C of_unit[Loop::kTiles];
      for (int tile = 0; tile < Loop::kTiles; ++tile)
        of_unit[tile] = sums[(sample * Loop::kTiles + tile) * units + unit];
      update = loop.finish(round, loop.read(round, sample, unit), of_unit, state, publish);
    }
    loop.write(update, sample, unit);
    states[0][at] = state.h;
    states[1][at] = state.c;
    if (round + 1 == loop.steps) loop.end(state, sample, unit);
  }
};

// Of one sample, so that most of the indices are the whole block's.
template <typename Loop>
__global__ void __launch_bounds__(kThreads) round_kernel(const Round<Loop> body) {
  const int64_t unit = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (unit < body.loop.hidden) body(blockIdx.x, unit);
}

template <typename Loop>
void run_in_steps(Call& call, const Loop& loop, Compute<typename Loop::Element>* scratch, bool allow_tf32) {
  using T = typename Loop::Element;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments;
  const int64_t all = loop.batch * loop.hidden, blocks_of_sample = (loop.hidden - 1) / kThreads + 1;
  call.require(loop.batch <= INT32_MAX && blocks_of_sample <= 65535, kBadShape, "too large for one launch");
  if (!call.ok()) return;
  Compute<T>* const sums = scratch + 2 * all;
  Round<Loop> body{loop, -1, sums, {scratch, scratch + all}, reinterpret_cast<T*>(sums + kTiles * all)};
  const auto run_round = [&] {
    const dim3 blocks(static_cast<unsigned>(loop.batch), static_cast<unsigned>(blocks_of_sample));
    round_kernel<<<blocks, kThreads, 0, call.stream()>>>(body);
    call.check_launch();
    ++body.round;
  };
  run_round();
  if (loop.steps == 0) return;
  const bool done = Cublas::with_handle(call.stream(), [&](const Cublas& cublas, void* handle) {
    for (; loop.steps > body.round && call.ok(); run_round())
      if (!cublas.multiply(handle, kTiles != 1, kTiles * loop.hidden, loop.batch, kSegments * loop.hidden, loop.weight,
                           body.published, sums, allow_tf32))
        return false;
    return true;
  });
  call.require(done, kLaunchFailed, "cuBLAS, which this size needs, is missing or failed");
}

}  // namespace msops
