// Lanes of a warp that have a row together combine what each has found.
#pragma once

#include "../common/launch.h"
#include "../common/pack.h"
#include "gating.h"

namespace msops::gating {

constexpr int kGatingThreads = 128;

// Combines the values of a team's lanes by f, which every lane of the warp calls. `lanes` is a power of 2.
template <typename V, typename F>
__device__ V over_lanes(V value, int lanes, const F& f) {
  for (int distance = 1; distance < lanes; distance *= 2) value = f(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
template <typename C>
__device__ C largest_over(C value, int lanes) {
  return over_lanes(value, lanes, [](C a, C b) { return std::fmax(a, b); });
}
template <typename C>
__device__ C sum_over(C value, int lanes) {
  return over_lanes(value, lanes, [](C a, C b) { return a + b; });
}

}  // namespace msops::gating
