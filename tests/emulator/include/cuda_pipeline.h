// The C interface of cp.async, for the emulator.
#pragma once

#include "../gpu/cp_async.h"

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  emulator::self->copies.back().push_back(
      {static_cast<char*>(to), static_cast<const char*>(from), static_cast<int>(bytes)});
}
inline void __pipeline_commit() { msops::cp_async_commit(); }
inline void __pipeline_wait_prior(int groups) { emulator::wait_for_copies(static_cast<size_t>(groups)); }
