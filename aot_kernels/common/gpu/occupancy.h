// Serves the kernels that are not launched by launch() yet.
#pragma once

#include "../launch.h"

namespace msops {

// Allows a kernel at least this many bytes of dynamic shared memory.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, int64_t bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace msops
