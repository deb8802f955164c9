// Chooses the kernel of a copy, in the widest units that the rows of y, the strides and the addresses allow:
//
//   x along the rows of y            x has neighbours along another axis    kernel
//   neighbours, or one element       any                                    gather
//   any other stride                 none, or y's rows are short            gather
//   ...                              short rows                             follow_x
//   ...                              rows of 32 bytes or more               transpose, tile by tile
#pragma once

#include "gpu_gather.h"
#include "gpu_inverse.h"
#include "gpu_tiles.h"

namespace msops::strided_copy {

constexpr int64_t kSector = 32;  // bytes that memory reads and writes at once

template <typename T>
void copy_units(Call& call, const Copy<T>& copy) {
  if (copy.axes.total() > kLargest32) {  // both halves of the outermost axis
    const int64_t size = copy.axes.size[0], stride = copy.axes.stride[0][0];
    const int64_t half = size < 32 ? size / 2 : size / 32 * 16;  // packs stay aligned
    Copy<T> first = copy, second = copy;
    first.axes.size[0] = half, second.axes.size[0] = size - half;
    second.x += half * stride, second.y += copy.axes.total() / size * half;
    second.room = copy.room;
    copy_units(call, first), copy_units(call, second);
    return;
  }
  const int last = copy.axes.count - 1;
  const auto bytes = [&](int a) { return copy.axes.size[a] * static_cast<int64_t>(sizeof(T)); };
  int inner = -1;
  for (int a = 0; a < last; ++a)
    if (copy.axes.stride[0][a] == 1 && (inner < 0 || bytes(a) > bytes(inner))) inner = a;
  if (copy.stride() == 1 || copy.stride() == 0 || inner < 0 || bytes(last) < kSector) return gather(call, copy);
  bytes(inner) < kSector ? follow_x(call, copy, inner) : transpose(call, copy, inner);
}

template <int kBytes>
void copy_on_gpu(Call& call, const Copy<Unit<kBytes>>& copy) {
  in_widest_units<kBytes>(copy, [&](auto, const auto& wide) { copy_units(call, wide); });
}

template <int kBytes>
void scatter_on_gpu(Call& call, const Scatter<Unit<kBytes>>& s) {
  using T = Unit<kBytes>;
  if (s.is_whole()) return copy_on_gpu<kBytes>(call, s.as_copy());
  is_aligned<kPackWidth<T>>(s.dx) ? invert<kPackWidth<T>>(call, s) : invert<1>(call, s);
}

}  // namespace msops::strided_copy
