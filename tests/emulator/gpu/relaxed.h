// Loads and stores of 8 bytes at once, and a timer, in the emulator.
#pragma once

#include <chrono>

#include "instructions.h"

namespace msops {

inline void st_relaxed_b64(void* to, uint2 value) {
  if (reinterpret_cast<uintptr_t>(to) % 8) emulator::fail("st.relaxed.b64 with an address that is not aligned");
  __atomic_store_n(static_cast<uint64_t*>(to), with_bits_of<uint64_t>(value), __ATOMIC_RELAXED);
}
inline uint2 ld_relaxed_b64(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8) emulator::fail("ld.relaxed.b64 with an address that is not aligned");
  emulator::give_way();  // whoever asks may be waiting
  return with_bits_of<uint2>(__atomic_load_n(static_cast<const uint64_t*>(from), __ATOMIC_RELAXED));
}
inline uint4 ld_relaxed_v2_b64(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("ld.relaxed.v2.b64 with an address that is not aligned");
  const uint2 a = ld_relaxed_b64(from), b = ld_relaxed_b64(static_cast<const char*>(from) + 8);
  return {a.x, a.y, b.x, b.y};
}

// The emulator's time is a hundred times slower than the clock, since its kernels are slower, too.
inline unsigned long long globaltimer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() / 100;
}

}  // namespace msops
