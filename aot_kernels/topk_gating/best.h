// The greatest of several numbers, in falling order, without their indices: what finds the best experts of a row needs
// a minimum and a maximum a step, where indices would take three times as long.
#pragma once

#include <cmath>

#include "../common/dtype.h"

namespace msops::gating {

constexpr int kSorted = 8;  // numbers that are sorted at once

__device__ __forceinline__ void exchange(float& first, float& second) {
  const float larger = std::fmax(first, second);
  second = std::fmin(first, second);
  first = larger;
}

// Sorts numbers in falling order by the fewest steps, which are 19.
__device__ __forceinline__ void sort(float (&x)[kSorted]) {
  constexpr int kSteps[][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1}, {2, 3},
                               {4, 5}, {6, 7}, {2, 4}, {3, 5}, {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (int i = 0; i < 19; ++i) exchange(x[kSteps[i][0]], x[kSteps[i][1]]);
}

// Sorts kSize numbers from kFirst on that fall and then rise, or are a rotation of such ones.
template <int kFirst, int kSize, int kAll>
__device__ __forceinline__ void sort_bitonic(float (&x)[kAll]) {
  if constexpr (kSize > 1) {
    constexpr int kHalf = kSize > 4 ? 4 : kSize > 2 ? 2 : 1, kRest = kSize - kHalf;  // the next lower power of 2
#pragma unroll
    for (int i = 0; i < kRest; ++i) exchange(x[kFirst + i], x[kFirst + kHalf + i]);
    sort_bitonic<kFirst, kRest>(x);
    sort_bitonic<kFirst + kRest, kHalf>(x);
  }
}

// Replaces the kMost best of some numbers by those of these and of others, both sorted.
template <int kMost, int kOthers>
__device__ __forceinline__ void merge(float (&best)[kMost], const float (&others)[kOthers]) {
  static_assert(kMost <= kSorted && kMost <= kOthers);
#pragma unroll
  for (int i = 0; i < kMost; ++i) best[i] = std::fmax(best[i], others[kMost - 1 - i]);
  sort_bitonic<0, kMost>(best);
}

}  // namespace msops::gating
