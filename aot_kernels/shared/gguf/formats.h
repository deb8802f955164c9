// Blocks of quantized numbers as they lie in GGUF files, and what they mean, for both devices.
//
//   kind   bytes  numbers   layout
//   Q4_0   18     32        d; 16 bytes of codes
//   Q4_1   20     32        d, m; 16 bytes of codes
//   Q8_0   34     32        d; 32 signed bytes
//   Q4_K   144    256       d, dmin; 12 bytes of scales and minima; 128 of codes
//   Q5_K   176    256       d, dmin; 12 bytes of scales and minima; 32 of fifth bits; 128 of codes
//   Q6_K   210    256       128 bytes of lower halves; 64 of upper bits; 16 of scales; d
//
// d, m and dmin are float16. A number is scale * code + offset, where codes count from 0 on, and kZero is the code of 0
// in kinds without minima. Each kGroup numbers share a scale and an offset. In nibbles, a run of numbers has the lower
// halves of a run of bytes, and the next run of numbers has the upper halves of the same bytes.
#pragma once

#include "../../common/dtype.h"

namespace msops::gguf {

// Returns a word all of whose bytes are the same.
template <typename W>
constexpr W repeated(unsigned byte) {
  return static_cast<W>(~W{0} / 255 * byte);
}

// Reads a word of 4 bytes, or of 8 on the CPU. The address is a multiple of kAlign, unless a tensor begins at another
// one, which kIsSure rules out.
template <typename W, int kAlign, bool kIsSure>
MSOPS_BOTH W read(const uint8_t* from) {
  W word;
#ifdef __CUDA_ARCH__
  const unsigned rest = static_cast<unsigned>(reinterpret_cast<uintptr_t>(from)) % 4;
  const auto* const pairs = reinterpret_cast<const uint16_t*>(from);
  if (kAlign == 4 && (kIsSure || rest == 0)) {
    word = *reinterpret_cast<const uint32_t*>(from);
  } else if (kIsSure || rest % 2 == 0) {
    word = pairs[0] | uint32_t{pairs[1]} << 16;
  } else {
    word = from[0] | uint32_t{from[1]} << 8 | uint32_t{from[2]} << 16 | uint32_t{from[3]} << 24;
  }
#else
  memcpy(&word, from, sizeof word);
#endif
  return word;
}

MSOPS_BOTH float read_half(const uint8_t* from) {
  Half half;
  half.bits = static_cast<uint16_t>(from[0] | from[1] << 8);
#if defined(__F16C__) && !defined(__CUDA_ARCH__)
  const EightHalves halves = {static_cast<short>(half.bits)};
  return __builtin_ia32_vcvtph2ps256(halves)[0];
#else
  return half;
#endif
}

struct Scale {
  float scale, offset;
};

// A Format has
//   codes<W, kIsSure>(block, e)  the codes of numbers e, e + 1, ..., one in each byte of a W, where e is a multiple of
//                                its size
//   scale(block, e)              the scale and the offset of the numbers around e
template <int kBytes_, int kNumbers_, int kGroup_, int kZero_, bool kHasMinima_>
struct Sizes {
  static constexpr int kBytes = kBytes_, kNumbers = kNumbers_, kGroup = kGroup_, kZero = kZero_;
  static constexpr bool kHasMinima = kHasMinima_;
  static constexpr int kAlign = kBytes % 4 == 0 ? 4 : 2;

 protected:
  // Returns the lower or the upper halves of bytes.
  template <typename W, bool kIsSure>
  static MSOPS_BOTH W nibbles(const uint8_t* from, bool upper) {
    return read<W, kAlign, kIsSure>(from) >> (upper ? 4u : 0u) & repeated<W>(0x0f);
  }
};

struct Q4_0 : Sizes<18, 32, 32, 8, false> {
  template <typename W, bool kIsSure = false>
  static MSOPS_BOTH W codes(const uint8_t* block, int e) {
    return nibbles<W, kIsSure>(block + 2 + e % 16, e / 16);
  }
  static MSOPS_BOTH Scale scale(const uint8_t* block, int) {
    const float d = read_half(block);
    return {d, -kZero * d};
  }
};

struct Q4_1 : Sizes<20, 32, 32, 0, true> {
  template <typename W, bool kIsSure = false>
  static MSOPS_BOTH W codes(const uint8_t* block, int e) {
    return nibbles<W, kIsSure>(block + 4 + e % 16, e / 16);
  }
  static MSOPS_BOTH Scale scale(const uint8_t* block, int) { return {read_half(block), read_half(block + 2)}; }
};

struct Q8_0 : Sizes<34, 32, 32, 128, false> {
  template <typename W, bool kIsSure = false>
  static MSOPS_BOTH W codes(const uint8_t* block, int e) {
    return read<W, kAlign, kIsSure>(block + 2 + e) ^ repeated<W>(0x80);
  }
  static MSOPS_BOTH Scale scale(const uint8_t* block, int) {
    const float d = read_half(block);
    return {d, -kZero * d};
  }
};

// The eight groups of a block of Q4_K and Q5_K have scales and minima of 6 bits. Byte g has the scale of group g < 4,
// and byte g + 4 its minimum; their two upper bits belong to group g + 4, whose lower four bits are in byte g + 8.
MSOPS_BOTH Scale scale_of_eight(const uint8_t* block, int g) {
  const uint8_t* const bytes = block + 4;
  const int low = bytes[g % 4], high = bytes[g % 4 + 4], more = bytes[g % 4 + 8];
  const int scale = g < 4 ? low & 63 : (more & 15) | (low >> 6) << 4;
  const int minimum = g < 4 ? high & 63 : more >> 4 | (high >> 6) << 4;
  return {read_half(block) * static_cast<float>(scale), -(read_half(block + 2) * static_cast<float>(minimum))};
}

struct Q4_K : Sizes<144, 256, 32, 0, true> {
  template <typename W, bool kIsSure = false>
  static MSOPS_BOTH W codes(const uint8_t* block, int e) {
    return nibbles<W, kIsSure>(block + 16 + e / 64 * 32 + e % 32, e / 32 % 2);
  }
  static MSOPS_BOTH Scale scale(const uint8_t* block, int e) { return scale_of_eight(block, e / 32); }
};

struct Q5_K : Sizes<176, 256, 32, 0, true> {
  template <typename W, bool kIsSure = false>
  static MSOPS_BOTH W codes(const uint8_t* block, int e) {
    const W fifth = read<W, kAlign, kIsSure>(block + 16 + e % 32) >> static_cast<unsigned>(e / 32) & repeated<W>(1);
    return nibbles<W, kIsSure>(block + 48 + e / 64 * 32 + e % 32, e / 32 % 2) | fifth << 4;
  }
  static MSOPS_BOTH Scale scale(const uint8_t* block, int e) { return scale_of_eight(block, e / 32); }
};

struct Q6_K : Sizes<210, 256, 16, 32, false> {
  template <typename W, bool kIsSure = false>
  static MSOPS_BOTH W codes(const uint8_t* block, int e) {
    const int half = e / 128, run = e % 128 / 32, at = e % 32;
    const W upper =
        read<W, kAlign, kIsSure>(block + 128 + 32 * half + at) >> static_cast<unsigned>(2 * run) & repeated<W>(3);
    return nibbles<W, kIsSure>(block + 64 * half + run % 2 * 32 + at, run / 2) | upper << 4;
  }
  static MSOPS_BOTH Scale scale(const uint8_t* block, int e) {
    const float scale = read_half(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + e / 16]));
    return {scale, -kZero * scale};
  }
};

// The attribute `kind` of the entries is a place in this list.
using Formats = Types<Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K>;
constexpr int kKinds = 6;

// Calls f(Type<F>{}) with the Format of a kind.
template <typename... F, typename Call>
void with_format(Types<F...>, int64_t kind, const Call& call) {
  int64_t i = 0;
  static_cast<void>(((i++ == kind && (call(Type<F>{}), true)) || ...));
}
template <typename Call>
void with_format(int64_t kind, const Call& call) {
  with_format(Formats{}, kind, call);
}

// Returns the number of a code.
MSOPS_BOTH float number_of(const Scale& s, uint32_t code) { return s.scale * static_cast<float>(code) + s.offset; }

// Unpacks four neighbours, from e on.
template <typename F>
MSOPS_BOTH void unpack_four(const uint8_t* block, int e, float (&numbers)[4]) {
  const uint32_t codes = F::template codes<uint32_t>(block, e);
  const Scale s = F::scale(block, e);
  for (int i = 0; i < 4; ++i) numbers[i] = number_of(s, codes >> 8 * i & 0xff);
}

}  // namespace msops::gguf
