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
  return kSwizzle128 << 62 | kBytesOf8Rows / 16 << 32 | 1 << 16 | address / 16;
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

}  // namespace msops
