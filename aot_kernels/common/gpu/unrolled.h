// unrolled stands for nested loops over constant sizes, in which arrays in registers need constant indices.
#pragma once

namespace msops {

// Calls f(i, j, ...) for 0 <= i < kFirst, 0 <= j < the next size, ...; the last index advances first.
template <int kFirst, int... kOthers, typename F>
__device__ __forceinline__ void unrolled(const F& f) {
#pragma unroll
  for (int i = 0; i < kFirst; ++i)
    if constexpr (sizeof...(kOthers) == 0) {
      f(i);
    } else {
      unrolled<kOthers...>([&](auto... others) { f(i, others...); });
    }
}

}  // namespace msops
