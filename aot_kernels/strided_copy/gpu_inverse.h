// Each thread writes a pack of dx, and finds for each of its elements the one of dy that goes there, if there is one:
// dx is written once, and not filled with zeros before.
#pragma once

#include "gpu_walk.h"

namespace msops::strided_copy {

template <int N, typename T, typename Whole>
struct Inverse {
  struct Axis {
    Divisor apart = Divisor(1);  // dx's stride, where it has 32 bits
    int64_t stride_dx = 1, size = 1, stride_dy = 0;
  };
  Axis axes[kMostAxes];  // the widest one first
  int count;
  Whole offset, size;
  const T* dy;
  T* dx;

  Inverse(const Scatter<T>& s)
      : count(s.axes.count),
        offset(static_cast<Whole>(s.offset)),
        size(static_cast<Whole>(s.size)),
        dy(s.dy),
        dx(s.dx) {
    for (int a = 0; a < count; ++a) {
      axes[a].stride_dx = s.axes.stride[0][a], axes[a].size = s.axes.size[a], axes[a].stride_dy = s.axes.stride[1][a];
      if (sizeof(Whole) == 4) axes[a].apart = Divisor(axes[a].stride_dx);
    }
  }

  template <typename Index>
  __device__ void operator()(Index pack) const {
    const Whole begin = static_cast<Whole>(pack) * N;
    Pack<T, N> result = {};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int64_t at;
      if (finds(begin + j, &at)) result.values[j] = dy[at];
    }
    if (begin + N <= size) return store_at_once(dx + begin, result);
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (begin + j < size) dx[begin + j] = result.values[j];
  }

 private:
  __device__ bool finds(Whole i, int64_t* at) const {
    Whole rest = i - offset;
    *at = 0;
    if (rest < 0 || i >= size) return false;
#pragma unroll
    for (int a = 0; a < kMostAxes; ++a) {
      if (a == count) break;
      Whole n;
      if constexpr (sizeof(Whole) == 4) {
        n = axes[a].apart.divide(rest, &rest);
      } else {
        n = rest / axes[a].stride_dx, rest -= n * axes[a].stride_dx;
      }
      if (n >= axes[a].size) return false;
      *at += n * axes[a].stride_dy;
    }
    return rest == 0;
  }
};

template <int N, typename T>
void invert(Call& call, const Scatter<T>& s) {
  const int64_t packs = (s.size + N - 1) / N;
  if (s.size <= kLargest32) {
    on_gpu_with<uint32_t>(call, packs, Inverse<N, T, int>(s));
  } else {
    on_gpu_with<int64_t>(call, packs, Inverse<N, T, int64_t>(s));
  }
}

}  // namespace msops::strided_copy
