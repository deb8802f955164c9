// The emulator has the instructions of sm_90a.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace msops {

constexpr bool kHasSm90 = true, kHasSm90a = true;

template <typename Kernel>
bool is_compiled_for(int, Kernel) {
  return true;
}
inline bool has_instructions_of(int) { return true; }
inline unsigned shared_address(const void* pointer) { return emulator::shared_address(pointer); }

}  // namespace msops
