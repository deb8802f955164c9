// Widens codes to pairs of float16 in registers of a GPU. Whole numbers, code - zero point, are exact.
#pragma once

#include "codes.h"

#ifdef __CUDACC__

#include "../common/gpu/f16x2.h"
#include "../common/gpu/unrolled.h"

namespace msops::weight_quant_matmul {

constexpr uint32_t kPairBase = 0x64006400;  // two times 1024, to which 0 to 1023 may be added as whole numbers

// A PairZero is a zero point: what widen_pairs subtracts, a whole number, and the rest of it.
struct PairZero {
  uint32_t pair;
  float rest;

  // Takes a whole number from -512 to 512. Below 1024, the unit of float16 is half as large.
  __device__ __forceinline__ explicit PairZero(int whole) : rest(0) {
    pair = 0x10001u * (0x6400 + whole + min(whole, 0));
  }
  // Codes of two's complement have `most` 2^(bits - 1), others 0.
  __device__ __forceinline__ PairZero(float zero, float most) {
    const float whole = fminf(fmaxf(rintf(zero + most), -512.f), 512.f);
    const uint32_t bits = Half(1024.f + whole).bits;
    pair = bits << 16 | bits, rest = zero + most - whole;
  }
};

// Widens eight codes of 4 bits, less a zero point, to pairs of codes j and j + 4. Odd ones lie 4 bits higher, so that
// they are 1024 + 16 code at first.
__device__ __forceinline__ void widen_fours(uint32_t (&pairs)[4], uint32_t eight, bool are_signed, uint32_t zeros) {
  constexpr uint32_t kSixteenth = 0x2c002c00, k960 = 0x63806380;
  const uint32_t even = are_signed ? kPairBase | 0x80008 : kPairBase,
                 odd = are_signed ? kPairBase | 0x800080 : kPairBase;
  const uint32_t less = sub_f16x2(k960, zeros);  // 1024 / 16 is 64
  unrolled<2>([&](int j) {
    pairs[2 * j] = sub_f16x2((eight >> 8 * j & 0xf000f) ^ even, zeros);
    pairs[2 * j + 1] = fma_f16x2((eight >> 8 * j & 0xf000f0) ^ odd, kSixteenth, less);
  });
}

// Widens eight neighbouring codes, less a zero point. Pair j has codes j and j + 4 if they have 4 bits, else codes 2 j
// and 2 j + 1.
template <int kBits>
__device__ __forceinline__ void widen_pairs(uint32_t (&pairs)[4], const unsigned char* codes, bool are_signed,
                                            uint32_t zeros) {
  if constexpr (kBits == 4) {
    widen_fours(pairs, *reinterpret_cast<const uint32_t*>(codes), are_signed, zeros);
  } else {
    const uint32_t flip = are_signed ? 0x80808080 : 0;
    const uint2 eight = *reinterpret_cast<const uint2*>(codes);
    pairs[0] = sub_f16x2(prmt<0x4140>(eight.x ^ flip, kPairBase >> 8), zeros);
    pairs[1] = sub_f16x2(prmt<0x4342>(eight.x ^ flip, kPairBase >> 8), zeros);
    pairs[2] = sub_f16x2(prmt<0x4140>(eight.y ^ flip, kPairBase >> 8), zeros);
    pairs[3] = sub_f16x2(prmt<0x4342>(eight.y ^ flip, kPairBase >> 8), zeros);
  }
}

// Loads a scale and a zero point as they are: the functions below convert them where they are used, so that nothing
// waits for them before. kArePlain says that scales are float16 and zero points whole.
template <bool kArePlain, typename I>
__device__ __forceinline__ void load_scale(const Codes<Half>& codes, I i, uint32_t& scale, uint32_t& zero) {
  const void *const scales = codes.scale.data, *const zeros = codes.zero.numbers.data;
  scale = !kArePlain && codes.scale.are_float ? static_cast<const uint32_t*>(scales)[i]
                                              : static_cast<const uint16_t*>(scales)[i];
  if (!kArePlain && codes.zero.kind == ZeroPoints<Half>::kFloating) {
    zero =
        codes.zero.numbers.are_float ? static_cast<const uint32_t*>(zeros)[i] : static_cast<const uint16_t*>(zeros)[i];
  } else if (zeros) {
    zero = static_cast<const uint8_t*>(zeros)[i];
  }
}

// Returns the number that has these bits, in float or in float16.
__device__ __forceinline__ float number_of(uint32_t bits, bool is_float) {
  Half half;
  half.bits = static_cast<uint16_t>(bits);
  return is_float ? __uint_as_float(bits) : static_cast<float>(half);
}

// Returns a whole zero point, or 0 if there is none.
__device__ __forceinline__ int whole_zero_of(ZeroPoints<Half>::Kind kind, uint32_t bits) {
  if (kind == ZeroPoints<Half>::kNone) return 0;
  return kind == ZeroPoints<Half>::kSigned ? static_cast<int8_t>(bits) : static_cast<int>(bits);
}

}  // namespace msops::weight_quant_matmul

#endif
