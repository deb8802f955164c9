// Counters in global memory, by which blocks wait for each other, in the emulator.
#pragma once

#include "instructions.h"

namespace msops {

inline void red_release_add(unsigned* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE); }
inline unsigned ld_acquire(const unsigned* counter) {
  emulator::give_way();  // whoever asks may be waiting
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

}  // namespace msops
