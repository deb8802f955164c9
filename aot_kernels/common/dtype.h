// This header says what a tensor stores, what its elements are computed in, and how MindSpore names each type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// MSOPS_BOTH marks what kernels and loops on the CPU share, such as formulas. It is always inlined, so that loops over
// it vectorize. MSOPS_CPU marks what only the CPU runs; there the compiler decides.
#ifdef __CUDACC__
#include <cuda_fp16.h>
#define MSOPS_BOTH __host__ __device__ __forceinline__
#else
#define MSOPS_BOTH inline __attribute__((always_inline))
#endif
#define MSOPS_CPU inline

// MSOPS_UNROLL stands before a short loop over arrays in a loop that shall vectorize: with -O2, GCC would unroll it too
// late, and keep the arrays in memory. nvcc unrolls such loops by itself.
#ifdef __CUDA_ARCH__
#define MSOPS_UNROLL
#else
#define MSOPS_UNROLL _Pragma("GCC unroll 8")
#endif

namespace msops {

MSOPS_BOTH uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
MSOPS_BOTH float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Half stores an IEEE binary16 number. Conversion to float is exact; conversion from float rounds to nearest even.
struct Half {
  uint16_t bits;

  Half() = default;
  MSOPS_BOTH explicit Half(float value) : bits(from_float(value)) {}
  MSOPS_BOTH operator float() const { return to_float(bits); }

#ifndef __CUDA_ARCH__
  // Equals Half(value), but makes no temporary object, so that loops vectorize.
  static MSOPS_BOTH float rounded(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t subnormal = bits_of(float_of(magnitude < 0x38800000 ? magnitude : 0) + 0.5f - 0.5f);
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & 0xffffe000;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000 ? magnitude : 0x7f800000;
    return float_of((bits & 0x80000000) | (magnitude < 0x477ff000 ? finite : special));
  }
#endif

 private:
#ifdef __CUDA_ARCH__
  static __device__ uint16_t from_float(float value) { return __half_as_ushort(__float2half_rn(value)); }
  static __device__ float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
#else
  // These have no branches, so that loops over them vectorize.
  static MSOPS_BOTH uint16_t from_float(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    // Below 2^-14 the unit of binary16 is 2^-24, which is also float's between 0.5 and 1.
    const uint32_t subnormal = bits_of(float_of(magnitude < 0x38800000 ? magnitude : 0) + 0.5f) - 0x3f000000;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN or infinity
    return static_cast<uint16_t>(sign | (magnitude < 0x477ff000 ? finite : special));
  }
  static MSOPS_BOTH float to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    return float_of(sign | (magnitude < 0x400 ? subnormal : normal));
  }
#endif
};

// BFloat16 stores the upper half of a float. MindSpore has it on the CPU only, so no GPU code is compiled for it.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  MSOPS_BOTH explicit BFloat16(float value) : bits(from_float(bits_of(value))) {}
  MSOPS_BOTH operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }

 private:
  static MSOPS_BOTH uint16_t from_float(uint32_t value) {
    const uint32_t rounded = value + 0x7fff + (value >> 16 & 1);  // to nearest even
    return static_cast<uint16_t>(((value & 0x7fffffff) > 0x7f800000 ? value | 0x400000 : rounded) >> 16);  // NaN stays
  }
};

template <typename T>
struct Type {
  using type = T;
};

// Types lists element types, such as the ones that a call runs for.
template <typename... T>
struct Types {};

template <typename T>
struct ComputeOf : Type<T> {};
template <>
struct ComputeOf<Half> : Type<float> {};
template <>
struct ComputeOf<BFloat16> : Type<float> {};

// A Constant passes a number to a lambda as a constant: [](auto width) { constexpr int N = width; }.
template <int N>
using Constant = std::integral_constant<int, N>;

// Arithmetic on elements of T is done in Compute<T>, and rounded once, when stored.
template <typename T>
using Compute = typename ComputeOf<T>::type;

// Stores the value in `to`, rounded. This is a function because GCC does not vectorize loops over temporary objects.
template <typename T>
MSOPS_BOTH void assign(T& to, Compute<T> value) {
  to = T(value);
}

// Returns the value that an element of T stores for `value`, such as the nearest float16.
template <typename T>
MSOPS_BOTH Compute<T> rounded(Compute<T> value) {
#ifndef __CUDA_ARCH__
  if constexpr (std::is_same<T, Half>::value) return Half::rounded(value);
#endif
  return Compute<T>(T(value));
}

#if defined(__F16C__) && !defined(__CUDA_ARCH__)
// <immintrin.h> names the instructions that these types belong to, but takes as long to parse as all other headers.
using EightHalves __attribute__((vector_size(16))) = short;
using EightFloats __attribute__((vector_size(32))) = float;
#endif

// widen() and narrow() convert n neighbouring elements, on the CPU 8 of Half by one instruction. Loops read and write
// buffers of Compute<T> by them, since the conversion of a single Half takes about ten instructions there.
template <typename T, typename C>
MSOPS_BOTH void widen(const T* from, C* to, int64_t n) {
  int64_t done = 0;
#if defined(__F16C__) && !defined(__CUDA_ARCH__)
  if constexpr (std::is_same<T, Half>::value)
    for (EightHalves halves; done + 8 <= n; done += 8) {
      memcpy(&halves, from + done, sizeof halves);
      const EightFloats floats = __builtin_ia32_vcvtph2ps256(halves);
      memcpy(to + done, &floats, sizeof floats);
    }
#endif
#ifndef __CUDA_ARCH__
#pragma omp simd
#endif
  for (int64_t i = done; i < n; ++i) to[i] = C(from[i]);
}
template <typename T>
MSOPS_BOTH void narrow(const Compute<T>* from, T* to, int64_t n) {
  int64_t done = 0;
#if defined(__F16C__) && !defined(__CUDA_ARCH__)
  if constexpr (std::is_same<T, Half>::value)
    for (EightFloats floats; done + 8 <= n; done += 8) {
      memcpy(&floats, from + done, sizeof floats);
      const EightHalves halves = __builtin_ia32_vcvtps2ph256(floats, 0);  // to nearest
      memcpy(to + done, &halves, sizeof halves);
    }
#endif
#ifndef __CUDA_ARCH__
#pragma omp simd
#endif
  for (int64_t i = done; i < n; ++i) assign(to[i], from[i]);
}

// kOnGpu<T> says whether there is GPU code for elements of T.
template <typename T>
constexpr bool kOnGpu = !std::is_same<T, BFloat16>::value;

// Returns MindSpore's name of T.
template <typename T>
constexpr const char* dtype_name() {
  [[maybe_unused]] constexpr const char* kWhole[2][4] = {{"uint8", "uint16", "uint32", "uint64"},
                                                         {"int8", "int16", "int32", "int64"}};
  if constexpr (std::is_same<T, Half>::value) {
    return "float16";
  } else if constexpr (std::is_same<T, BFloat16>::value) {
    return "bfloat16";
  } else if constexpr (std::is_floating_point<T>::value) {
    return sizeof(T) == 4 ? "float32" : "float64";
  } else if constexpr (std::is_same<T, bool>::value) {
    return "bool";
  } else {
    static_assert(std::is_integral<T>::value, "tensors have no elements of this type");
    return kWhole[std::is_signed<T>::value][sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
  }
}

// Calls `f(Type<T>{})` with the T, out of several, that MindSpore calls `dtype`. Returns false if there is none.
template <typename F, typename... T>
bool dispatch(Types<T...>, const char* dtype, F&& f) {
  return ((std::strcmp(dtype, dtype_name<T>()) == 0 && (f(Type<T>{}), true)) || ...);
}

}  // namespace msops
