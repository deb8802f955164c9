// Loads and stores in the emulator.
#pragma once

#include "instructions.h"

namespace msops {

template <int N>
void st_global(void* to, const uint32_t (&words)[N]) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof words) emulator::fail("st.global with an address that is not aligned");
  std::memcpy(to, words, sizeof words);
}
inline void st_global_v4(void* to, const uint32_t (&words)[4]) { st_global(to, words); }
inline void st_global_v2(void* to, const uint32_t (&words)[2]) { st_global(to, words); }
inline void st_global_b32(void* to, uint32_t word) { st_global(to, {word}); }
inline void ld_global_v4(uint32_t (&words)[4], const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof words) emulator::fail("ld.global with an address that is not aligned");
  std::memcpy(words, from, sizeof words);
}
inline uint32_t ld_shared_b32(unsigned from) {
  uint32_t word;
  return std::memcpy(&word, emulator::shared_memory(from), 4), word;
}
inline void ld_shared_v4(float* to, unsigned from) { std::memcpy(to, emulator::shared_memory(from), 16); }

}  // namespace msops
