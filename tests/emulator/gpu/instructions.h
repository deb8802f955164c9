// The emulator has the instructions of sm_90a. It says that it lacks those of later architectures than the variable
// MSOPS_EMULATOR_ARCHITECTURE, such as 80, so that entries choose what they have for older GPUs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace msops {

constexpr bool kHasSm90 = true, kHasSm90a = true;

template <typename Kernel>
bool is_compiled_for(int architecture, Kernel) {
  return architecture <= emulator::architecture();
}
inline bool has_instructions_of(int) { return true; }
inline unsigned shared_address(const void* pointer) { return emulator::shared_address(pointer); }

}  // namespace msops
