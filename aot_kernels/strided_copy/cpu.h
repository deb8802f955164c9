// Copies row by row on the CPU.
#pragma once

#include "../common/parallel.h"
#include "copy.h"

namespace msops::strided_copy {

template <typename T>
struct CopyRow {
  Copy<T> copy;
  Axes<1> outer;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t length = copy.length(), stride = copy.stride();
    const T* const from = copy.x + outer.offset(0, row);
    T* const to = copy.y + row * length;
    for (int64_t i = 0; i < length; ++i) to[i] = from[i * stride];
  }
};

template <typename T>
void copy_on_cpu(Call& call, const Copy<T>& copy) {
  const Axes<1> outer = copy.outer();
  on_cpu(call, outer.total(), CopyRow<T>{copy, outer}, static_cast<double>(copy.length()));
}

template <typename T>
struct SetZero {
  T* to;

  MSOPS_CPU void operator()(int64_t i) const { to[i] = T(0); }
};

template <typename T>
struct WriteElement {
  Scatter<T> scatter;

  MSOPS_CPU void operator()(int64_t i) const {
    scatter.dx[scatter.offset + scatter.axes.offset(0, i)] = scatter.dy[scatter.axes.offset(1, i)];
  }
};

template <typename T>
void scatter_on_cpu(Call& call, const Scatter<T>& scatter) {
  on_cpu(call, scatter.size, SetZero<T>{scatter.dx}, 1);
  on_cpu(call, scatter.axes.total(), WriteElement<T>{scatter}, 8);
}

}  // namespace msops::strided_copy
