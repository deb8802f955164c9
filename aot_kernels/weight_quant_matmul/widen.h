// Widens codes on the CPU.
#pragma once

#include <algorithm>

#include "../shared/product/cpu.h"
#include "codes.h"

namespace msops::weight_quant_matmul::cpu {

// Calls f(Constant<bits>{}, Constant<1 if codes are signed>{}).
template <typename T, typename F>
MSOPS_CPU void with_kind(const Codes<T>& codes, const F& f) {
  if (codes.bits == 4) return codes.are_signed ? f(Constant<4>{}, Constant<1>{}) : f(Constant<4>{}, Constant<0>{});
  return codes.are_signed ? f(Constant<8>{}, Constant<1>{}) : f(Constant<8>{}, Constant<0>{});
}

// Return the number of a byte, or of its lower or upper half.
template <int kSigned>
MSOPS_BOTH int32_t number_of(uint8_t code) {
  return kSigned ? static_cast<int32_t>(static_cast<int8_t>(code)) : static_cast<int32_t>(code);
}
template <int kSigned>
MSOPS_BOTH int32_t number_of_half(unsigned half) {
  return static_cast<int32_t>(kSigned ? half ^ 8 : half) - (kSigned ? 8 : 0);
}

// A Run has the numbers of kRun codes, which are widened at once.
constexpr int kRun = 32;
using Floats __attribute__((vector_size(32))) = float;
struct Run {
  Floats eights[kRun / 8];
};

#if defined(__AVX2__) && !defined(__CUDA_ARCH__) && !defined(__clang__)
// GCC's own loops over bytes convert them one by one. <immintrin.h> takes long to parse (see dtype.h).
// nvcc loses such types where they are arguments of templates.
using Bytes __attribute__((vector_size(16))) = char;
using Shorts __attribute__((vector_size(16))) = unsigned short;
using Longs __attribute__((vector_size(16))) = long long;

template <int kSigned>
MSOPS_CPU __attribute__((always_inline)) Floats eight_of(Bytes bytes) {
  if constexpr (kSigned) return __builtin_ia32_cvtdq2ps256(__builtin_ia32_pmovsxbd256(bytes));
  return __builtin_ia32_cvtdq2ps256(__builtin_ia32_pmovzxbd256(bytes));
}
template <int kSigned>
MSOPS_CPU __attribute__((always_inline)) Floats upper_eight_of(Bytes bytes) {
  Longs longs;
  memcpy(&longs, &bytes, sizeof longs);
  longs = __builtin_ia32_psrldqi128(longs, 64);
  memcpy(&bytes, &longs, sizeof bytes);
  return eight_of<kSigned>(bytes);
}

// Returns the numbers of kRun codes, which begin with a byte.
template <int kBits, int kSigned>
MSOPS_CPU __attribute__((always_inline)) Run widened_run(const uint8_t* from) {
  Bytes bytes[2];
  if constexpr (kBits == 8) {
    memcpy(bytes, from, sizeof bytes);
    return {{eight_of<kSigned>(bytes[0]), upper_eight_of<kSigned>(bytes[0]), eight_of<kSigned>(bytes[1]),
             upper_eight_of<kSigned>(bytes[1])}};
  } else {
    Shorts shorts;
    memcpy(&shorts, from, sizeof shorts);
    memcpy(bytes, from, sizeof *bytes);
    shorts >>= 4;
    memcpy(bytes + 1, &shorts, sizeof shorts);
    Bytes lower = bytes[0] & 15, upper = bytes[1] & 15;
    if constexpr (kSigned) lower = (lower ^ 8) - 8, upper = (upper ^ 8) - 8;
    bytes[0] = __builtin_ia32_punpcklbw128(lower, upper), bytes[1] = __builtin_ia32_punpckhbw128(lower, upper);
    return {{eight_of<1>(bytes[0]), upper_eight_of<1>(bytes[0]), eight_of<1>(bytes[1]), upper_eight_of<1>(bytes[1])}};
  }
}
#else
template <int kBits, int kSigned>
MSOPS_CPU __attribute__((always_inline)) Run widened_run(const uint8_t* from) {
  float numbers[kRun];
  for (int j = 0; j < kRun; ++j)
    numbers[j] = static_cast<float>(kBits == 8 ? number_of<kSigned>(from[j])
                                               : number_of_half<kSigned>(from[j / 2] >> j % 2 * 4 & 15u));
  Run run;
  memcpy(&run, numbers, sizeof run);
  return run;
}
#endif

// Writes the numbers of n neighbouring codes, less the zero point, times the scale.
template <typename T, typename C>
MSOPS_CPU void widen_run(const Codes<T>& codes, int64_t row, int64_t column, int64_t n, C zero, C scale, C* to) {
  const uint8_t* const from = codes.at(row, column);
  if (codes.table) {
    for (int64_t j = 0; j < n; ++j) {
      const uint8_t byte = codes.bits == 8 ? from[j] : from[(column % 2 + j) / 2];
      const int half = codes.bits == 8 ? 0 : static_cast<int>((column + j) % 2) * 4;
      to[j] = (C(codes.table[codes.bits == 8 ? byte : byte >> half & 15]) - zero) * scale;
    }
    return;
  }
  with_kind(codes, [=](auto bits, auto is_signed) {
    constexpr int kBits = decltype(bits)::value, kSigned = decltype(is_signed)::value;
    int64_t j = 0;
    if (kBits == 8 || column % 2 == 0)
      for (; j + kRun <= n; j += kRun) {
        const Run run = widened_run<kBits, kSigned>(from + j * kBits / 8);
        float numbers[kRun];
        memcpy(numbers, &run, sizeof run);
        MSOPS_UNROLL
        for (int i = 0; i < kRun; ++i) to[j + i] = (C(numbers[i]) - zero) * scale;
      }
    for (; j < n; ++j) {
      const int64_t half = (column + j) % 2;
      const int32_t number = kBits == 8 ? number_of<kSigned>(from[j])
                                        : number_of_half<kSigned>(from[(column % 2 + j) / 2] >> half * 4 & 15u);
      to[j] = (C(number) - zero) * scale;
    }
  });
}

// Lines are the scales and zero points of a run of columns, which all rows of a group share.
template <typename T>
class Lines {
 public:
  using C = Compute<T>;

  explicit Lines(int64_t columns) : scale_(new C[columns]), zero_(new C[columns]) {}

  // Writes the weights of n neighbouring columns.
  MSOPS_CPU void widen(const Codes<T>& codes, int64_t row, int64_t column, int64_t n, C* to) {
    if (codes.groups_rows) {
      widen_run(codes, row, column, n, C(0), C(1), to);
      find(codes, codes.place(row, column), n);
      const C *const scale = scale_.get(), *const zero = zero_.get();
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) to[j] = (to[j] - zero[j]) * scale[j];
      return;
    }
    for (int64_t j = 0; j < n;) {
      const int64_t place = codes.place(row, column + j);
      const int64_t end = std::min(n, j + codes.group - (column + j) % codes.group);
      widen_run(codes, row, column + j, end - j, codes.zero[place], codes.scale[place], to + j);
      j = end;
    }
  }

 private:
  MSOPS_CPU void find(const Codes<T>& codes, int64_t place, int64_t n) {
    if (place == place_ && n == n_) return;
    for (int64_t j = 0; j < n; ++j) scale_[j] = codes.scale[place + j], zero_[j] = codes.zero[place + j];
    place_ = place, n_ = n;
  }

  std::unique_ptr<C[]> scale_, zero_;
  int64_t place_ = -1, n_ = 0;
};

}  // namespace msops::weight_quant_matmul::cpu
