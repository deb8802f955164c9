// The lengths of clouds: how many points of each one count.
#pragma once

#include "../../common/call.h"

namespace msops::points {

// Returns the length of a cloud, where null stands for `most` in all clouds. A length out of range, which only a GPU
// meets, is replaced by the nearest one in [0, most]. The arguments are references, so that nvcc compiles a kernel as
// if this stood in it.
MSOPS_BOTH int64_t length_of(const int32_t* const& lengths, int64_t cloud, const int64_t& most) {
  if (lengths == nullptr) return most;
  const int64_t length = lengths[cloud];
  return length < 0 ? 0 : length < most ? length : most;
}

// Requires a length for each cloud, unless none are given. On the CPU, where they can be read, they must be right.
inline void require_lengths(Call& call, const char* name, const Tensor& lengths, int64_t clouds, int64_t most) {
  if (!call.has(name)) return;
  call.require_shape(lengths, {clouds});
  if (!call.is_on_cpu()) return;
  for (int64_t cloud = 0; call.ok() && cloud < clouds; ++cloud) {
    const int32_t length = lengths.as<int32_t>()[cloud];
    call.require(0 <= length && length <= most, kBadValue, "%s[%lld] is %d, expected 0 to %lld", name,
                 static_cast<long long>(cloud), length, static_cast<long long>(most));
  }
}

}  // namespace msops::points
