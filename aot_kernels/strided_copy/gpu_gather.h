// Each thread writes a pack of y, and gathers its elements:
//
//   x along the rows of y          how a pack within a row is read
//   neighbours                     out of the two aligned packs around it, as units are as wide as alignment allows
//   one element for the whole row  once
//   any other stride               element by element
#pragma once

#include "gpu_walk.h"

namespace msops::strided_copy {

enum class Along { kNeighbours, kOneElement, kStride };

template <Along kAlong, int N, typename T>
struct Gather {
  Divisor length;  // of a row of y
  int64_t stride;
  Walk<1> rows;
  const T *x, *memory;
  int64_t room;
  T* y;
  int elements;

  template <typename Index>
  __device__ void operator()(Index pack) const {
    const int begin = static_cast<int>(pack) * N;
    int column, row = length.divide(begin, &column);
    const T* from = at(row) + column * stride;
    Pack<T, N> result = {};
    if (column + N <= length.value()) {
      result = read(from);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (begin + j >= elements) break;
        result.values[j] = *from;
        from += stride;
        if (++column == length.value()) column = 0, from = at(++row);
      }
    }
    if (begin + N <= elements) return store_at_once(y + begin, result);
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (begin + j < elements) y[begin + j] = result.values[j];
  }

 private:
  __device__ const T* at(int row) const {
    int64_t offset = 0;
    rows.add(row, offset);
    return x + offset;
  }

  __device__ Pack<T, N> read(const T* from) const {
    if constexpr (kAlong == Along::kNeighbours)
      if (packs_around<N>(from, memory, room)) return load_shifted<N>(from);
    Pack<T, N> pack;
    if constexpr (kAlong == Along::kOneElement) {
      const T value = *from;
      for (T& each : pack.values) each = value;
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) pack.values[j] = from[j * stride];
    }
    return pack;
  }
};

template <Along kAlong, int N, typename T>
void gather_along(Call& call, const Copy<T>& copy) {
  const int elements = static_cast<int>(copy.axes.total());
  const Gather<kAlong, N, T> body{
      Divisor(copy.length()), copy.stride(), Walk<1>(copy.outer()), copy.x, copy.memory, copy.room, copy.y, elements};
  on_gpu_with<uint32_t>(call, (int64_t{elements} + N - 1) / N, body);
}

template <typename T>
void gather(Call& call, const Copy<T>& copy) {
  constexpr int N = kPackWidth<T>;
  if (N == 1 || !is_aligned<N>(copy.y)) return gather_along<Along::kStride, 1>(call, copy);
  if constexpr (N > 1) {
    if (copy.stride() == 1) return gather_along<Along::kNeighbours, N>(call, copy);
    if (copy.stride() == 0) return gather_along<Along::kOneElement, N>(call, copy);
    gather_along<Along::kStride, N>(call, copy);
  }
}

// Each thread copies an element. Threads follow x, where few elements are neighbours in x but many in y, as in
// (N, 3) -> (3, N): along y, all of x would be read three times.
template <typename T>
struct FollowX {
  Walk<2> axes;  // strides of x, then of y
  const T* x;
  T* y;

  template <typename Index>
  __device__ void operator()(Index i) const {
    int64_t from = 0, to = 0;
    axes.add(static_cast<int>(i), from, to);
    y[to] = x[from];
  }
};

// Copies with `inner`, an axis along which x has neighbours, innermost, and y's innermost axis around it.
template <typename T>
void follow_x(Call& call, const Copy<T>& copy, int inner) {
  Axes<2> axes;
  int64_t next = 1, strides[kMostAxes];
  const int last = copy.axes.count - 1;
  for (int a = last; a >= 0; next *= copy.axes.size[a--]) strides[a] = next;
  for (int a = 0; a <= last; ++a)
    if (a != inner) axes.push(copy.axes.size[a], {copy.axes.stride[0][a], strides[a]});
  axes.push(copy.axes.size[inner], {1, strides[inner]});
  on_gpu_with<uint32_t>(call, axes.total(), FollowX<T>{Walk<2>(axes), copy.x, copy.y});
}

}  // namespace msops::strided_copy
