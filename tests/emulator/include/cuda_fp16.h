// float16 for the emulator: numbers of common/dtype.h's Half, under CUDA's names.
#pragma once

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __float2half_rn(float x) {
  const _Float16 rounded = static_cast<_Float16>(x);
  return {with_bits_of<unsigned short>(rounded)};
}
inline float __half2float(__half h) { return static_cast<float>(with_bits_of<_Float16>(h.bits)); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
