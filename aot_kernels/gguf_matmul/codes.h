// Codes of the formats (shared/gguf/formats.h) in the registers of a GPU.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

#include "../common/gpu/f16x2.h"
#include "../common/gpu/unrolled.h"

namespace msops::gguf_matmul {

// kPlace is where a block begins, modulo 4, or kAnywhere, at a multiple of 2.
constexpr int kAnywhere = -1;

// Kernels take chunks of 256 numbers of a row.
template <typename F>
constexpr int kChunkBytes = 256 / F::kNumbers * F::kBytes;

// Returns how many bytes after a multiple of 16, where copies begin, a chunk of a row begins that itself begins at one.
template <typename F>
__device__ __forceinline__ int begin_of_chunk(int chunk) {
  return kChunkBytes<F> % 16 ? chunk * kChunkBytes<F> % 16 : 0;
}

// Reads the word at a place of a block.
template <int kPlace>
__device__ __forceinline__ uint32_t word_at(const uint8_t* block, int at) {
  const uint8_t* const from = block + at;
  if (kPlace != kAnywhere && (kPlace + at) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  const auto* const pairs = reinterpret_cast<const uint16_t*>(from);
  return pairs[0] | uint32_t{pairs[1]} << 16;
}

// Codes of four neighbours: those of the first and the third, and of the second and the fourth, as pairs of float16. A
// code c becomes the subnormal number 2^-24 c, whose bits are those of c, or 16 times that if is_sixteenfold(e).
struct Fours {
  uint32_t even, odd;
};

// WideCodes<F>::fours<kPlace>(first, e) reads the codes of numbers e + 4 quad to + 3, where e is a multiple of 16, in
// blocks that begin at first - 4 quad. The loops over e are unrolled, so that a word is read once.
template <typename F>
struct WideCodes;

constexpr uint32_t kLower = 0x000f000f, kUpper = 0x00f000f0;

template <int kBytes, int kCodes>
struct WideCodesOfHalves {  // in blocks of 32
  static __device__ constexpr bool is_sixteenfold(int) { return false; }
  template <int kPlace>
  static __device__ __forceinline__ Fours fours(const uint8_t* first, int e) {
    const int at = e / 32 * kBytes + kCodes;
    const uint32_t word = word_at<kPlace>(first, at);
    return e / 16 % 2 ? Fours{word >> 4 & kLower, word >> 12 & kLower} : Fours{word & kLower, word >> 8 & kLower};
  }
};
template <>
struct WideCodes<gguf::Q4_0> : WideCodesOfHalves<18, 2> {};
template <>
struct WideCodes<gguf::Q4_1> : WideCodesOfHalves<20, 4> {};

template <>
struct WideCodes<gguf::Q8_0> {
  static __device__ constexpr bool is_sixteenfold(int) { return false; }
  template <int kPlace>
  static __device__ __forceinline__ Fours fours(const uint8_t* first, int e) {
    const uint32_t word = word_at<kPlace>(first, e / 32 * 34 + 2 + e / 16 % 2 * 16);
    return {(word & 0x00ff00ffu) ^ 0x00800080u, (word >> 8 & 0x00ff00ffu) ^ 0x00800080u};
  }
};

template <>
struct WideCodes<gguf::Q4_K> {
  static __device__ constexpr bool is_sixteenfold(int e) { return e / 32 % 2; }
  template <int kPlace>
  static __device__ __forceinline__ Fours fours(const uint8_t* first, int e) {
    const uint32_t word = word_at<kPlace>(first, 16 + e / 64 * 32 + e / 16 % 2 * 16);
    const uint32_t mask = is_sixteenfold(e) ? kUpper : kLower;
    return {word & mask, word >> 8 & mask};
  }
};

// Shifts to the left, or to the right if `bits` is negative.
__device__ __forceinline__ uint32_t shifted(uint32_t word, int bits) { return bits < 0 ? word >> -bits : word << bits; }

template <>
struct WideCodes<gguf::Q5_K> {
  static __device__ constexpr bool is_sixteenfold(int e) { return e / 32 % 2; }
  template <int kPlace>
  static __device__ __forceinline__ Fours fours(const uint8_t* first, int e) {
    const int run = e / 32, at = e / 16 % 2 * 16, shift = is_sixteenfold(e) ? 8 - run : 4 - run;
    const uint32_t word = word_at<kPlace>(first, 48 + run / 2 * 32 + at), fifth = word_at<kPlace>(first, 16 + at);
    const uint32_t mask = is_sixteenfold(e) ? kUpper : kLower, bit = is_sixteenfold(e) ? 0x01000100u : 0x00100010u;
    return {(word & mask) | (shifted(fifth, shift) & bit), (word >> 8 & mask) | (shifted(fifth, shift - 8) & bit)};
  }
};

template <>
struct WideCodes<gguf::Q6_K> {
  static __device__ constexpr bool is_sixteenfold(int e) { return e / 64 % 2; }
  template <int kPlace>
  static __device__ __forceinline__ Fours fours(const uint8_t* first, int e) {
    const int half = e / 128, run = e / 32 % 4, at = e / 16 % 2 * 16, shift = run % 2 ? 2 : 4;
    const uint32_t word = word_at<kPlace>(first, 64 * half + run % 2 * 32 + at);
    const uint32_t upper = word_at<kPlace>(first, 128 + 32 * half + at);
    const uint32_t mask = run / 2 ? kUpper : kLower, bits = run / 2 ? 0x03000300u : 0x00300030u;
    return {(word & mask) | (shifted(upper, shift) & bits), (word >> 8 & mask) | (shifted(upper, shift - 8) & bits)};
  }
};

// Scales<F> are those of 128 numbers of a row, half of the chunk that a warp takes.
template <typename F>
struct Scales {
  static constexpr int kCount = 128 / F::kGroup;
  float scale[kCount], offset[kCount];
};

__device__ __forceinline__ float half_at(const uint8_t* from) {
  Half half;
  half.bits = *reinterpret_cast<const uint16_t*>(from);
  return half;
}

// Returns byte i of a word, less a number, times a float16 number, exactly: a float around 2^15 has its unit in bit 8.
template <int kByte, int kLess>
__device__ __forceinline__ float byte_times(uint32_t word, float times) {
  const float whole = __uint_as_float(prmt<0x7504 | kByte << 4>(word, 0x47000000u));
  return fmaf(whole, times, -(32768.f + kLess) * times);
}
template <int kLess = 0>
__device__ __forceinline__ float byte_times(uint32_t word, int i, float times) {
  if (i == 0) return byte_times<0, kLess>(word, times);
  if (i == 1) return byte_times<1, kLess>(word, times);
  return i == 2 ? byte_times<2, kLess>(word, times) : byte_times<3, kLess>(word, times);
}

// Decodes the scales of the numbers from 128 half on of 256, which begin at `row`; offsets, where the format has
// minima. factor(e) is what a scale is multiplied by, a power of 2; it is the same for e and e + 128.
template <typename F, int kPlace, typename Factor>
__device__ __forceinline__ Scales<F> decode(const uint8_t* row, int half, const Factor& factor) {
  constexpr int kCount = Scales<F>::kCount;
  Scales<F> to;
  if constexpr (F::kNumbers == 32) {
    unrolled<kCount>([&](int i) {
      const uint8_t* const block = row + (kCount * half + i) * F::kBytes;
      to.scale[i] = half_at(block);
      if (F::kHasMinima) to.offset[i] = half_at(block + 2);
    });
  } else if constexpr (F::kHasMinima) {  // see scale_of_eight in formats.h
    const uint32_t low = word_at<kPlace>(row, 4), high = word_at<kPlace>(row, 8), more = word_at<kPlace>(row, 12);
    const float d = half_at(row), dmin = -half_at(row + 2);
    const uint32_t scales = half ? (more & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u) : low & 0x3f3f3f3fu;
    const uint32_t minima = half ? (more >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x30303030u) : high & 0x3f3f3f3fu;
    unrolled<4>([&](int i) {
      to.scale[i] = byte_times(scales, i, d * factor(32 * i)), to.offset[i] = byte_times(minima, i, dmin);
    });
  } else {
    const float d = half_at(row + 208);
    unrolled<2>([&](int word) {
      const uint32_t scales = word_at<kPlace>(row + 8 * half, 192 + 4 * word) ^ 0x80808080u;
      unrolled<4>([&](int i) { to.scale[4 * word + i] = byte_times<128>(scales, i, d * factor(64 * word + 16 * i)); });
    });
  }
  return to;
}

// Reads numbers 2 quad, + 1, + 8 and + 9 of 16 bytes, which begin at from - 2 quad.
__device__ __forceinline__ uint32_t spread_at(const uint8_t* from) {
  const auto* const pairs = reinterpret_cast<const uint16_t*>(from);
  return pairs[0] | uint32_t{pairs[4]} << 16;
}

// Reads the codes of numbers e + 2 quad, + 1, + 8 and + 9, where e is a multiple of 16, in blocks that begin at
// first - 2 quad: a code is a byte.
template <typename F>
__device__ __forceinline__ uint32_t spread_codes(const uint8_t* first, int e) {
  constexpr uint32_t kHalf = 0x0f0f0f0f;
  const uint8_t* const block = first + e / F::kNumbers * F::kBytes;
  const int run = e % F::kNumbers / 32, at = e % 32;
  if constexpr (std::is_same<F, gguf::Q8_0>::value) {
    return spread_at(block + 2 + at) ^ 0x80808080u;
  } else if constexpr (F::kNumbers == 32) {
    return spread_at(block + F::kBytes - 16) >> (at ? 4 : 0) & kHalf;
  } else if constexpr (std::is_same<F, gguf::Q6_K>::value) {
    const uint32_t codes = spread_at(block + run / 4 * 64 + run % 2 * 32 + at) >> (run / 2 % 2 ? 4 : 0) & kHalf;
    return codes | (spread_at(block + 128 + run / 4 * 32 + at) >> run % 4 * 2 & 0x03030303u) << 4;
  } else {
    const uint32_t codes = spread_at(block + F::kBytes - 128 + run / 2 * 32 + at) >> (run % 2 ? 4 : 0) & kHalf;
    if constexpr (std::is_same<F, gguf::Q4_K>::value) return codes;
    return codes | (spread_at(block + 16 + at) >> run & 0x01010101u) << 4;
  }
}

}  // namespace msops::gguf_matmul

#endif
