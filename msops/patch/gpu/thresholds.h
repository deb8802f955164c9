// Says from how many elements of a result on our kernel runs. For fewer, MindSpore's own does.
#pragma once

#include <cstddef>
#include <cstring>

namespace kernels {

struct Threshold {
  const char* function;
  size_t elements;
};

// What is not in the table always runs.
constexpr Threshold kThresholds[] = {
    {"BinaryOpWithBroadcastCudaFunc", 1},
};

inline size_t threshold_of(const char* function) {
  for (const Threshold& each : kThresholds) {
    if (std::strcmp(each.function, function) == 0) return each.elements;
  }
  return 1;
}

}  // namespace kernels
