// What kernels and their launches use of CUDA's runtime, for the emulator.
#pragma once

#include <cmath>
#include <utility>

#include "emulator.h"

#define CUDART_VERSION 12080
#define __CUDACC_VER_MAJOR__ 0
#define __CUDACC_VER_MINOR__ 0
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local

// threadIdx and its like are objects whose parts convert to numbers, since members of structs have the same names.
template <typename F, unsigned F::* kPart, F& (*kFind)()>
struct PartOfIndex {
  operator unsigned() const { return kFind().*kPart; }
};
template <typename F, F& (*kFind)()>
struct Index3 {
  PartOfIndex<F, &F::x, kFind> x;
  PartOfIndex<F, &F::y, kFind> y;
  PartOfIndex<F, &F::z, kFind> z;
};
inline uint3& thread_index() { return emulator::self->index; }
inline uint3& block_index() { return emulator::block->index; }
inline dim3& block_size() { return emulator::block->size; }
inline dim3& grid_size() { return emulator::block->grid; }
inline const Index3<uint3, thread_index> threadIdx;
inline const Index3<uint3, block_index> blockIdx;
inline const Index3<dim3, block_size> blockDim;
inline const Index3<dim3, grid_size> gridDim;
constexpr int warpSize = 32;

#define MSOPS_VECTOR(type, name, bytes)                                       \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                    \
  struct name##3 { type x, y, z; };                                           \
  struct alignas(bytes) name##4 { type x, y, z, w; };                         \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
MSOPS_VECTOR(float, float, 16)
MSOPS_VECTOR(double, double, 16)
MSOPS_VECTOR(int, int, 16)
#undef MSOPS_VECTOR
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- Threads ----

inline void __syncthreads() { emulator::barrier(0); }
inline int __syncthreads_count(int predicate) {
  static thread_local int sum, readers;
  sum += predicate != 0, ++readers;
  emulator::barrier(0);
  const int count = sum;
  if (--readers == 0) sum = 0;
  emulator::barrier(0);
  return count;
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { emulator::exchange(mask, 0); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulator::give_way(); }

// Gives what the lane `from` brought, if it is among the `width` lanes of this one, else the lane's own value.
template <typename T>
T shuffled(unsigned mask, const T& value, int from, bool inside) {
  const auto given = emulator::exchange(mask, value);
  return inside ? given[static_cast<unsigned>(from)] : value;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int lane = static_cast<int>(emulator::self->lane());
  return shuffled(mask, value, lane / width * width + (from & (width - 1)), true);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
  const int lane = static_cast<int>(emulator::self->lane()), from = lane ^ distance;
  return shuffled(mask, value, from, from / width <= lane / width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = static_cast<int>(emulator::self->lane()), from = lane + static_cast<int>(distance);
  return shuffled(mask, value, from, from / width == lane / width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const int lane = static_cast<int>(emulator::self->lane()), from = lane - static_cast<int>(distance);
  return shuffled(mask, value, from, from >= lane / width * width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto given = emulator::exchange(mask, predicate != 0);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) bits |= unsigned{given[lane]} << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const auto given = emulator::exchange(mask, value);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) bits |= unsigned{given[lane] == value} << lane;
  return bits;
}
template <typename T, typename F>
T reduced(unsigned mask, T value, F f) {
  const auto given = emulator::exchange(mask, value);
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) value = f(value, given[lane]);
  return value;
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_or_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return a | b; });
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  const auto given = emulator::exchange(mask, value);
  T sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) sum += given[lane];
  return sum;
}

// ---- Numbers ----

template <typename To, typename From>
To with_bits_of(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "sizes differ");
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return with_bits_of<unsigned>(x); }
inline int __float_as_int(float x) { return with_bits_of<int>(x); }
inline float __uint_as_float(unsigned x) { return with_bits_of<float>(x); }
inline float __int_as_float(int x) { return with_bits_of<float>(x); }
inline long long __double_as_longlong(double x) { return with_bits_of<long long>(x); }
inline double __longlong_as_double(long long x) { return with_bits_of<double>(x); }
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll(static_cast<long long>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, const T& value) {
  *to = value;
}
template <typename T>
void __stcg(T* to, const T& value) {
  *to = value;
}
inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::shared_address(pointer); }

template <typename T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicOr(T* to, T value) {
  return __atomic_fetch_or(to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicMax(T* to, T value) {
  T old = __atomic_load_n(to, __ATOMIC_SEQ_CST);
  while (old < value && !__atomic_compare_exchange_n(to, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <typename T>
T atomicMin(T* to, T value) {
  T old = __atomic_load_n(to, __ATOMIC_SEQ_CST);
  while (value < old && !__atomic_compare_exchange_n(to, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <typename T>
T atomicExch(T* to, T value) {
  return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicCAS(T* to, T expected, T value) {
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

// ---- The host's functions ----

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorUnknown };
namespace emulator {
inline cudaError_t pending_error = cudaSuccess;  // what a function of the runtime left
}
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrCooperativeLaunch
};
struct cudaFuncAttributes {
  int ptxVersion, maxThreadsPerBlock;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim{1, 1, 1};
  int cooperative = 0, programmaticStreamSerializationAllowed = 0;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id = cudaLaunchAttributeIgnore;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline cudaError_t cudaGetLastError() { return std::exchange(emulator::pending_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
// An older GPU has another number, since operators keep what they find out about a GPU.
inline cudaError_t cudaGetDevice(int* device) {
  return *device = emulator::gpu + (emulator::architecture() < 90 ? 8 : 0), cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? emulator::kMultiprocessors * (1 + device % 8)
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulator::kSharedBytes
                                                                  : 1;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  return *attributes = {__CUDA_ARCH__ / 10, 1024}, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 2, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t* config) {
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) return *clusters = 2, cudaSuccess;
  return cudaErrorUnknown;  // CUDA requires the size of a cluster, also where it is 1
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  return std::memset(to, byte, bytes), cudaSuccess;
}
constexpr int cudaMemcpyDeviceToDevice = 3;
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), const A&... arguments) {
  const dim3 grid = config->gridDim;
  unsigned together = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) together = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeCooperative) together = grid.x * grid.y * grid.z;
  }
  emulator::launch(grid, config->blockDim, config->dynamicSmemBytes, together, [&] { kernel(arguments...); });
  return cudaSuccess;
}
