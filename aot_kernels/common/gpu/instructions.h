// This header says which instructions the compiled code may use, and which the GPU at hand has. Each header of this
// folder holds one family of PTX's instructions under PTX's names. Where the architecture lacks an instruction, its
// function does nothing: a kernel asks before it calls one, by `has_instructions_of` on the device or `is_compiled_for`
// on the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// CUDA before 11.7 does not know the annotation. There, a parameter is copied if its address is taken.
#ifndef __grid_constant__
#define __grid_constant__
#endif

// MSOPS_SM90 is for sm_90 and later. CUDA 12.0 is the first version that knows TMA and wgmma.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && CUDART_VERSION >= 12000
#define MSOPS_SM90(...) asm volatile(__VA_ARGS__)
#define MSOPS_HAS_SM90 true
#else
#define MSOPS_SM90(...)
#define MSOPS_HAS_SM90 false
#endif
// MSOPS_SM90A is for sm_90a only.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && CUDART_VERSION >= 12000
#define MSOPS_SM90A(...) asm volatile(__VA_ARGS__)
#define MSOPS_HAS_SM90A true
#else
#define MSOPS_SM90A(...)
#define MSOPS_HAS_SM90A false
#endif

namespace msops {

constexpr bool kHasSm90 = MSOPS_HAS_SM90, kHasSm90a = MSOPS_HAS_SM90A;

// Returns whether the GPU and the code for it are of an architecture or a later one: code that was made for an older
// GPU lacks instructions.
template <typename Kernel>
bool is_compiled_for(int architecture, Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= architecture;
}

// Returns whether the code is compiled for an architecture or a later one. A kernel that needs its instructions returns
// at once in other code, which then costs no time to compile.
__device__ __forceinline__ bool has_instructions_of([[maybe_unused]] int architecture) {
#ifdef __CUDA_ARCH__
  return __CUDA_ARCH__ >= 10 * architecture;
#else
  return false;
#endif
}

// Returns an address in the window of shared memory, as the instructions take it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

}  // namespace msops
