// wgmma in the emulator multiplies at once.
#pragma once

#include "instructions.h"
#include "tma.h"

namespace msops {

inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit_group() { __syncwarp(); }
template <int kGroups>
void wgmma_wait_group() {
  __syncwarp();
}

inline uint64_t wgmma_matrix(unsigned address) {
  constexpr uint64_t kSwizzle128 = 1, kBytesOf8Rows = 1024;
  return kSwizzle128 << 62 | kBytesOf8Rows / 16 << 32 | 1 << 16 | address % (1 << 18) / 16;
}

inline void wgmma_m64n64k8(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  const unsigned lane = emulator::self->lane(), first = static_cast<unsigned>(b & 0x3fff) * 16;
  const unsigned bytes_of_8_rows = static_cast<unsigned>(b >> 32 & 0x3fff) * 16;
  struct Words {
    uint32_t of[4];
  } own;
  std::memcpy(own.of, a, sizeof own);
  const auto given = emulator::exchange(~0u, own);
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 8; ++k) {
      const uint32_t left = given[lane / 4 * 4 + k % 4].of[i / 2 % 2 + k / 4 * 2];
      const unsigned place = first + column / 8 * bytes_of_8_rows + column % 8 * 128 + 4 * k;
      uint32_t right;
      std::memcpy(&right, emulator::shared_memory(emulator::swizzled_128(place)), 4);
      sum += double{__uint_as_float(left & 0xffffe000)} * __uint_as_float(right & 0xffffe000);
    }
    d[i] += static_cast<float>(sum);
  }
}

inline uint64_t wgmma_transposed(unsigned address, unsigned bytes) {
  constexpr uint64_t kSwizzle128 = 1, kBytesOf8Rows = 1024;
  return kSwizzle128 << 62 | kBytesOf8Rows / 16 << 32 | static_cast<uint64_t>(bytes / 16) << 16 |
         address % (1 << 18) / 16;
}

template <typename T, int kN>
void wgmma_fence_operand(T (&)[kN][4]) {}

}  // namespace msops

namespace emulator {

inline float half_at(unsigned place) {
  uint16_t bits;
  std::memcpy(&bits, shared_memory(swizzled_128(place)), 2);
  return static_cast<float>(with_bits_of<_Float16>(bits));
}

// Returns where number k of row `row` is in a matrix of rows of 128 bytes, or of its transposed one.
inline unsigned place_in_matrix(uint64_t matrix, unsigned row, unsigned k, bool transposed) {
  const unsigned first = static_cast<unsigned>(matrix & 0x3fff) * 16;
  const unsigned bytes_of_64_columns = static_cast<unsigned>(matrix >> 16 & 0x3fff) * 16;
  const unsigned bytes_of_8_rows = static_cast<unsigned>(matrix >> 32 & 0x3fff) * 16;
  if (!transposed) return first + row / 8 * bytes_of_8_rows + row % 8 * 128 + 2 * k;
  return first + row / 64 * bytes_of_64_columns + row % 64 * 2 + k / 8 * bytes_of_8_rows + k % 8 * 128;
}

// d = a b or d += a b, where left(row, k) is a number of the warp's 16 rows of a.
template <int kN, typename Left>
void multiply_with_matrix(float (&d)[kN][4], const Left& left, uint64_t b, int adds, bool transposed) {
  const unsigned lane = self->lane();
  float rows[2][16];
  for (unsigned k = 0; k < 16; ++k)
    for (unsigned half = 0; half < 2; ++half) rows[half][k] = left(lane / 4 + 8 * half, k);
  for (unsigned n = 0; n < kN; ++n)
    for (unsigned j = 0; j < 2; ++j) {
      double sums[2] = {};
      for (unsigned k = 0; k < 16; ++k) {
        const double right = half_at(place_in_matrix(b, 8 * n + 2 * (lane % 4) + j, k, transposed));
        for (unsigned half = 0; half < 2; ++half) sums[half] += rows[half][k] * right;
      }
      for (unsigned half = 0; half < 2; ++half) {
        float& sum = d[n][2 * half + j];
        sum = (adds ? sum : 0) + static_cast<float>(sums[half]);
      }
    }
}

}  // namespace emulator

namespace msops {

template <int kTransposed, int kTransposedA, int kN>
void multiply_matrices(float (&d)[kN][4], uint64_t a, uint64_t b, int adds) {
  __syncwarp();
  const unsigned first = emulator::self->number / 32 % 4 * 16;
  const auto left = [&](unsigned row, unsigned k) {
    return emulator::half_at(emulator::place_in_matrix(a, first + row, k, kTransposedA));
  };
  emulator::multiply_with_matrix(d, left, b, adds, kTransposed);
}
template <int kTransposed, int kN>
void wgmma_k16(float (&d)[kN][4], uint64_t a, uint64_t b, int adds) {
  multiply_matrices<kTransposed, 0>(d, a, b, adds);
}
template <int kTransposed, int kTransposedA>
void wgmma_m64n64k16(float (&d)[8][4], uint64_t a, uint64_t b, int adds) {
  multiply_matrices<kTransposed, kTransposedA>(d, a, b, adds);
}
template <int kTransposed, int kTransposedA>
void wgmma_m64n128k16(float (&d)[16][4], uint64_t a, uint64_t b, int adds) {
  multiply_matrices<kTransposed, kTransposedA>(d, a, b, adds);
}
template <int kTransposed, int kTransposedA>
void wgmma_m64n256k16(float (&d)[32][4], uint64_t a, uint64_t b, int adds) {
  multiply_matrices<kTransposed, kTransposedA>(d, a, b, adds);
}
template <int kTransposed, int kN>
void wgmma_k16(float (&d)[kN][4], const uint32_t (&a)[4], uint64_t b, int adds) {
  struct Words {
    uint32_t of[4];
  } own;
  std::memcpy(own.of, a, sizeof own);
  const auto given = emulator::exchange(~0u, own);
  const auto left = [&](unsigned row, unsigned k) {
    const uint32_t word = given[row % 8 * 4 + k % 8 / 2].of[row / 8 + k / 8 * 2];
    return static_cast<float>(with_bits_of<_Float16>(static_cast<uint16_t>(word >> 16 * (k % 2))));
  };
  emulator::multiply_with_matrix(d, left, b, adds, kTransposed);
}

template <int kN>
void wgmma_k32(int32_t (&d)[kN][4], uint64_t a, uint64_t b, int adds) {
  __syncwarp();
  const unsigned lane = emulator::self->lane(), first = emulator::self->number / 32 % 4 * 16;
  // A row's 32 codes are as the bytes of 16 float16; both lie in two packs, which the swizzle puts at different places.
  const auto pack_at = [](uint64_t matrix, unsigned row, unsigned pack) {
    const unsigned place = emulator::place_in_matrix(matrix, row, 8 * pack, false);
    return reinterpret_cast<const int8_t*>(emulator::shared_memory(emulator::swizzled_128(place)));
  };
  for (unsigned n = 0; n < kN; ++n)
    for (unsigned i = 0; i < 4; ++i) {
      int32_t sum = 0;
      for (unsigned pack = 0; pack < 2; ++pack) {
        const int8_t* const left = pack_at(a, first + lane / 4 + i / 2 * 8, pack);
        const int8_t* const right = pack_at(b, 8 * n + 2 * (lane % 4) + i % 2, pack);
        for (unsigned k = 0; k < 16; ++k) sum += left[k] * right[k];
      }
      d[n][i] = (adds ? d[n][i] : 0) + sum;
    }
}

}  // namespace msops
