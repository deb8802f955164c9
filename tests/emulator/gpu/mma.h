// mma.sync in the emulator: the warp's threads exchange their fragments, and each computes its own four sums.
#pragma once

#include "instructions.h"

namespace emulator {

struct Fragments {
  uint32_t a[4], b[2];
};

// d += a b, where element(word, place) gives a number of a register, and kNumbers are in each.
template <int kNumbers, typename D, typename Element>
void multiply(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Element& element) {
  Fragments own;
  std::memcpy(own.a, a, sizeof a), std::memcpy(own.b, b, sizeof b);
  const auto given = exchange(~0u, own);
  const unsigned lane = self->lane();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 8 * kNumbers; ++k) {
      const unsigned upper = k / (4 * kNumbers), quad = k / kNumbers % 4;
      const Fragments of_row = given[4 * row + quad], of_column = given[4 * column + quad];
      sum += double{element(of_row.a[i / 2 + 2 * upper], k % kNumbers)} * element(of_column.b[upper], k % kNumbers);
    }
    d[i] += static_cast<D>(sum);
  }
}

}  // namespace emulator

namespace msops {

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<2>(d, a, b, [](uint32_t word, unsigned place) {
    const uint16_t bits = static_cast<uint16_t>(word >> 16 * place);
    return static_cast<float>(with_bits_of<_Float16>(bits));
  });
}
inline void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<1>(d, a, b, [](uint32_t word, unsigned) { return __uint_as_float(word & 0xffffe000); });
}
inline void mma_m16n8k32(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<4>(d, a, b, [](uint32_t word, unsigned place) { return static_cast<int8_t>(word >> 8 * place); });
}
inline uint32_t cvt_rna_tf32(float value) { return (__float_as_uint(value) + 0x1000) & 0xffffe000; }

}  // namespace msops
