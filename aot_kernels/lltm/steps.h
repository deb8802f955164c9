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

  // sums (parts, n, m): numbers (n, k) times weights, which are (m, k) if `transposed`, else (k, m), each part of its
  // share of k. The matrices have no gaps between rows.
  template <typename T>
  bool multiply(void* handle, bool transposed, int64_t m, int64_t n, int64_t k, int parts, const T* weights,
                const T* numbers, Compute<T>* sums, bool allow_tf32) const {
    constexpr int kFloat = 0, kDouble = 1, kHalf = 2;                          // cudaDataType
    constexpr int kComputeFloat = 68, kComputeDouble = 70, kComputeTf32 = 77;  // cublasComputeType_t
    constexpr int kType = sizeof(T) == 8 ? kDouble : sizeof(T) == 4 ? kFloat : kHalf;
    const Compute<T> one = 1, zero = 0;
    const int compute = sizeof(T) == 8 ? kComputeDouble : sizeof(T) == 4 && allow_tf32 ? kComputeTf32 : kComputeFloat;
    const int64_t share = k / parts;
    // cuBLAS takes columns: what is a row here is a column there.
    return multiply_(handle, transposed, 0, static_cast<int>(m), static_cast<int>(n), static_cast<int>(share), &one,
                     weights, kType, static_cast<int>(transposed ? k : m), transposed ? share : share * m, numbers,
                     kType, static_cast<int>(k), share, &zero, sums, sizeof(T) == 8 ? kDouble : kFloat,
                     static_cast<int>(m), n * m, parts, compute, -1) == 0;
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
    if (create_ && set_stream_)
      multiply_ = reinterpret_cast<decltype(multiply_)>(dlsym(library, "cublasGemmStridedBatchedEx"));
  }

  int (*create_)(void**) = nullptr;
  int (*set_stream_)(void*, cudaStream_t) = nullptr;
  int (*multiply_)(void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*, int, int,
                   long long, const void*, void*, int, int, long long, int, int, int) = nullptr;
  std::map<int, void*> handles_;  // of devices; they live as long as the process
};

constexpr int kStepThreads = 128, kStepUnits = 4;

// What the units make of a round's sums; round -1 is the start. A thread has units of one sample, kStepThreads apart.
template <typename Loop>
struct Round {
  using T = typename Loop::Element;
  using C = Compute<T>;
  Loop loop;
  int64_t round;
  int parts;
  const C* sums;  // (parts, batch, tiles, hidden)
  C* states[2];   // (batch, hidden)
  T* published;   // (batch, segments, hidden)

  __device__ void operator()(int64_t sample, int64_t first_unit) const {
    const int64_t units = loop.hidden;
    const auto for_units = [&](const auto& f) {
#pragma unroll
      for (int u = 0; u < kStepUnits; ++u)
        if (first_unit + u * kStepThreads < units) f(u, first_unit + u * kStepThreads);
    };
    typename Loop::State state[kStepUnits];
    typename Loop::Inputs inputs[kStepUnits];
    C total[kStepUnits][Loop::kTiles] = {};
    for_units([&](int u, int64_t unit) {
      if (round < 0) {
        state[u] = loop.begin(sample, unit);
      } else {
        state[u] = {states[0][sample * units + unit], states[1][sample * units + unit]};
        inputs[u] = loop.read(round, sample, unit);
        for (int part = 0; part < parts; ++part)
          for (int tile = 0; tile < Loop::kTiles; ++tile)
            total[u][tile] += sums[((part * loop.batch + sample) * Loop::kTiles + tile) * units + unit];
      }
    });
    for_units([&](int u, int64_t unit) {
      const auto publish = [&](int segment, T value) {
        published[(sample * Loop::kSegments + segment) * units + unit] = value;
      };
      const typename Loop::Update update = round < 0 ? loop.start(state[u], sample, unit, publish)
                                                     : loop.finish(round, inputs[u], total[u], state[u], publish);
      loop.write(update, sample, unit);
      states[0][sample * units + unit] = state[u].h;
      states[1][sample * units + unit] = state[u].c;
      if (round + 1 == loop.steps) loop.end(state[u], sample, unit);
    });
  }
};

template <typename Loop>
__global__ void __launch_bounds__(kStepThreads) round_kernel(const Round<Loop> body, unsigned blocks_each) {
  body(blockIdx.x / blocks_each, blockIdx.x % blocks_each * (kStepThreads * kStepUnits) + threadIdx.x);
}

// In how many parts a float32 product (n, k) times (k, m) is made, so that cuBLAS' tiles of 128 x 128 fill the
// multiprocessors: of 96 tiles, 132 would be idle by a quarter, while four parts of each take three turns.
inline int parts_of(int64_t m, int64_t n, int64_t k, int multiprocessors) {
  const int64_t tiles = ((m + 127) / 128) * ((n + 127) / 128);
  const auto turns = [&](int parts) { return static_cast<double>((tiles * parts - 1) / multiprocessors + 1) / parts; };
  int best = 1;
  for (int parts : {2, 4})
    if (n > 64 && k % (32 * parts) == 0 && turns(parts) < 0.9 * turns(best)) best = parts;
  return best;
}

template <typename Loop>
void run_in_steps(Call& call, const Loop& loop, Compute<typename Loop::Element>* scratch, int multiprocessors,
                  bool allow_tf32) {
  using T = typename Loop::Element;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments;
  const int64_t all = loop.batch * loop.hidden, m = kTiles * loop.hidden, k = kSegments * loop.hidden;
  const int64_t blocks_each = (loop.hidden - 1) / (kStepThreads * kStepUnits) + 1, blocks = loop.batch * blocks_each;
  call.require(blocks <= INT32_MAX && kGates * loop.hidden <= INT32_MAX, kBadShape, "too large for one launch");
  if (!call.ok()) return;
  const int parts = sizeof(T) == 4 && !allow_tf32 ? parts_of(m, loop.batch, k, multiprocessors) : 1;
  Compute<T>* const sums = scratch + 2 * all;
  Round<Loop> body{loop, -1, parts, sums, {scratch, scratch + all}, reinterpret_cast<T*>(sums + parts * kTiles * all)};
  const auto run_round = [&] {
    round_kernel<<<static_cast<unsigned>(blocks), kStepThreads, 0, call.stream()>>>(body,
                                                                                    static_cast<unsigned>(blocks_each));
    call.check_launch();
    ++body.round;
  };
  run_round();
  if (loop.steps == 0) return;
  const bool done = Cublas::with_handle(call.stream(), [&](const Cublas& cublas, void* handle) {
    for (; loop.steps > body.round && call.ok(); run_round())
      if (!cublas.multiply(handle, kTiles != 1, m, loop.batch, k, parts, loop.weight, body.published, sums, allow_tf32))
        return false;
    return true;
  });
  call.require(done, kLaunchFailed, "cuBLAS, which this size needs, is missing or failed");
}

}  // namespace msops
