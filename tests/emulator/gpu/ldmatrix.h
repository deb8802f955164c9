// ldmatrix and stmatrix in the emulator.
#pragma once

#include "instructions.h"

namespace emulator {

template <bool kTransposed>
void load_matrices(uint32_t (&words)[4], unsigned row) {
  if (row % 16) fail("ldmatrix with an address that is not aligned");
  const auto rows = exchange(~0u, row);
  const unsigned lane = self->lane();
  for (unsigned i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (unsigned k = 0; k < 2; ++k) {
      const unsigned from = kTransposed ? 2 * (lane % 4) + k : lane / 4;
      const unsigned column = kTransposed ? lane / 4 : 2 * (lane % 4) + k;
      std::memcpy(&pair[k], shared_memory(rows[8 * i + from]) + 2 * column, 2);
    }
    words[i] = uint32_t{pair[1]} << 16 | pair[0];
  }
}

inline void store_matrices(const uint32_t (&words)[4], unsigned row) {
  if (row % 16) fail("stmatrix with an address that is not aligned");
  const auto rows = exchange(~0u, row);
  for (unsigned i = 0; i < 4; ++i)
    std::memcpy(shared_memory(rows[8 * i + self->lane() / 4]) + 4 * (self->lane() % 4), &words[i], 4);
}

}  // namespace emulator

namespace msops {

inline void ldmatrix_x4(uint32_t (&words)[4], unsigned row) { emulator::load_matrices<false>(words, row); }
inline void ldmatrix_x4_trans(uint32_t (&words)[4], unsigned row) { emulator::load_matrices<true>(words, row); }

inline void stmatrix_x4(const uint32_t (&words)[4], unsigned row) { emulator::store_matrices(words, row); }

}  // namespace msops
