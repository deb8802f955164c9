// cp.async in the emulator: a copy is made when its thread waits for it, so that reading too early shows.
#pragma once

#include <cstring>
#include <type_traits>

#include "instructions.h"

namespace msops {

template <int kBytes>
void cp_async(void* to, const void* from, bool inside = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if (reinterpret_cast<uintptr_t>(to) % kBytes || (inside && reinterpret_cast<uintptr_t>(from) % kBytes))
    emulator::fail("cp.async with an address that is not aligned");
  emulator::self->copies.back().push_back(
      {static_cast<char*>(to), inside ? static_cast<const char*>(from) : nullptr, kBytes});
}
inline void cp_async_commit() { emulator::self->copies.emplace_back(); }
template <int kGroups>
void cp_async_wait() {
  emulator::wait_for_copies(kGroups);
}
inline void cp_async_wait_all() { cp_async_commit(), emulator::wait_for_copies(0); }

}  // namespace msops
