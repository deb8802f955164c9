// What the kernels of strided copies share: copies in wide units, and offsets by divisions of 32 bits.
#pragma once

#include "../common/gpu/divisor.h"
#include "../common/parallel.h"
#include "copy.h"

namespace msops::strided_copy {

// A Walk computes the offsets in K arrays of the i-th element of nested axes, for i below 2^31.
template <int K>
class Walk {
 public:
  explicit Walk(const Axes<K>& axes) : count_(axes.count) {
    for (int a = 0; a < count_; ++a) {
      const int from = count_ - 1 - a;
      axes_[a].size = Divisor(axes.size[from]);
      for (int k = 0; k < K; ++k) axes_[a].stride[k] = axes.stride[k][from];
    }
  }

  template <typename... Offset>
  __device__ __forceinline__ void add(int i, Offset&... offsets) const {
#pragma unroll
    for (int a = 0; a < kMostAxes; ++a) {
      if (a == count_) break;
      int at;
      i = axes_[a].size.divide(i, &at);
      int k = 0;
      ((offsets += at * axes_[a].stride[k++]), ...);
    }
  }

 private:
  struct Axis {
    Divisor size = Divisor(1);
    int64_t stride[K] = {};
  };
  int count_;
  Axis axes_[kMostAxes];  // the innermost one first
};

// Calls f(copy) with the copy in units that are as wide as its rows, strides and addresses allow.
template <int kBytes, typename F>
void in_widest_units(const Copy<Unit<kBytes>>& copy, const F& f) {
  if constexpr (kBytes < 16) {
    using Wide = Unit<2 * kBytes>;
    const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
    const int last = copy.axes.count - 1;
    bool fits = copy.axes.contiguous() && (address(copy.x) | address(copy.y)) % (2 * kBytes) == 0;
    for (int a = 0; fits && a <= last; ++a) fits = (a < last ? copy.axes.stride[0][a] : copy.axes.size[a]) % 2 == 0;
    if (fits) {
      const uintptr_t begin = (address(copy.memory) + 2 * kBytes - 1) / (2 * kBytes) * (2 * kBytes);
      const int64_t room = copy.room - static_cast<int64_t>((begin - address(copy.memory)) / kBytes);
      Copy<Wide> wide{{},
                      reinterpret_cast<const Wide*>(copy.x),
                      reinterpret_cast<const Wide*>(begin),
                      room / 2,
                      reinterpret_cast<Wide*>(copy.y)};
      for (int a = 0; a < last; ++a) wide.axes.push(copy.axes.size[a], {copy.axes.stride[0][a] / 2});
      wide.axes.push(copy.axes.size[last] / 2, {1});
      return in_widest_units<2 * kBytes>(wide, f);
    }
  }
  f(Constant<kBytes>{}, copy);
}

}  // namespace msops::strided_copy
