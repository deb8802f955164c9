// Passes over the directions. Each has 3 numbers for a direction and a row of degrees^2 for its harmonics.
// A thread computes one direction. On a GPU rows go through shared memory, so that loads and stores are coalesced.
#pragma once

#include "../common/launch.h"
#include "../common/parallel.h"
#include "polynomials.h"

namespace msops::harmonics {

template <typename T>
struct Arrays {
  int64_t points;
  int degrees;
  const T *directions, *dout, *along;  // `along` has the gradient of the gradient
  T *out, *slopes;

  MSOPS_BOTH int columns() const { return degrees * degrees; }
};

// out = Y
struct Forward {
  static constexpr bool kReadsRow = false, kWritesRow = true, kHasAlong = false;

  template <typename C, typename N, typename Row>
  static MSOPS_BOTH void run(int degrees, const N (&d)[3], const N (&)[3], N (&)[3], const Row& row) {
    harmonics<C>(degrees, d[0], d[1], d[2], [&](int k, const N& y) { row.set(k, y); });
  }
};

// slopes = gradient of the sum of dout Y
struct Backward {
  static constexpr bool kReadsRow = true, kWritesRow = false, kHasAlong = false;

  template <typename C, typename N, typename Row>
  static MSOPS_BOTH void run(int degrees, const N (&d)[3], const N (&)[3], N (&slopes)[3], const Row& row) {
    const Slope<N> slope = slope_of<C>(degrees, d[0], d[1], d[2], [&](int k) { return row.get(k); });
    slopes[0] = slope.x;
    slopes[1] = slope.y;
    slopes[2] = slope.z;
  }
};

// The derivatives of both along `along`: slopes = that of Backward's, out = that of Y
struct SecondBackward {
  static constexpr bool kReadsRow = true, kWritesRow = true, kHasAlong = true;

  template <typename C, typename N, typename Row>
  static MSOPS_BOTH void run(int degrees, const N (&d)[3], const N (&along)[3], N (&slopes)[3], const Row& row) {
    const Dual<N> x(d[0], along[0]), y(d[1], along[1]), z(d[2], along[2]);
    const Slope<Dual<N>> slope = slope_of<N>(degrees, x, y, z, [&](int k) { return row.get(k); });
    slopes[0] = slope.x.slope;
    slopes[1] = slope.y.slope;
    slopes[2] = slope.z.slope;
    harmonics<N>(degrees, x, y, z, [&](int k, const Dual<N>& value) { row.set(k, value.slope); });
  }
};

template <typename Pass, typename T>
struct OnCpu {
  using C = Compute<T>;
  Arrays<T> all;

  struct Row {
    const T* in;
    T* out;

    MSOPS_BOTH C get(int k) const { return C(in[k]); }
    MSOPS_BOTH void set(int k, C value) const { assign(out[k], value); }
  };

  // It is inlined, since a call would take as long as the direction of few degrees.
  MSOPS_CPU __attribute__((always_inline)) void operator()(int64_t i) const {
    C d[3], along[3] = {}, slopes[3];
    for (int axis = 0; axis < 3; ++axis) {
      d[axis] = C(all.directions[3 * i + axis]);
      if (Pass::kHasAlong) along[axis] = C(all.along[3 * i + axis]);
    }
    const Row row{Pass::kReadsRow ? all.dout + i * all.columns() : nullptr,
                  Pass::kWritesRow ? all.out + i * all.columns() : nullptr};
    Pass::template run<C>(all.degrees, d, along, slopes, row);
    for (int axis = 0; axis < 3; ++axis)
      if (Pass::kReadsRow) assign(all.slopes[3 * i + axis], slopes[axis]);
  }
};

#ifdef __CUDACC__
constexpr int kPointsOfBlock = 128;

// Rows in shared memory are an odd number of elements apart, so that threads do not meet in its banks.
template <typename T>
__host__ __device__ int pitch_of(int columns) {
  return columns | 1;
}

template <typename T>
struct SharedRow {
  T* values;

  MSOPS_BOTH Compute<T> get(int k) const { return Compute<T>(values[k]); }
  MSOPS_BOTH void set(int k, Compute<T> value) const { assign(values[k], value); }
};

// Calls f(element of the rows, element of shared memory) for all of `count` rows.
template <typename T, typename F>
__device__ void for_elements(int count, int columns, const F& f) {
  const int pitch = pitch_of<T>(columns), rows = kPointsOfBlock / columns, rest = kPointsOfBlock % columns;
  int row = static_cast<int>(threadIdx.x) / columns, column = static_cast<int>(threadIdx.x) % columns;
  for (int i = static_cast<int>(threadIdx.x); i < count * columns; i += kPointsOfBlock) {
    f(i, row * pitch + column);
    row += rows;
    column += rest;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
}

template <typename Pass, typename T>
__global__ void __launch_bounds__(kPointsOfBlock) points_kernel(const Arrays<T> all) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char bytes[];
  T* const tile = reinterpret_cast<T*>(bytes);  // (point, column)
  const int columns = all.columns();
  const int64_t first = blockIdx.x * int64_t{kPointsOfBlock}, left = all.points - first, i = first + threadIdx.x;
  const int count = static_cast<int>(left < kPointsOfBlock ? left : kPointsOfBlock);
  if (Pass::kReadsRow) {
    for_elements<T>(count, columns, [&](int from, int to) { tile[to] = all.dout[first * columns + from]; });
    __syncthreads();
  }
  if (i < all.points) {
    C d[3], along[3], slopes[3];
    for (int axis = 0; axis < 3; ++axis) {
      d[axis] = C(all.directions[3 * i + axis]);
      along[axis] = Pass::kHasAlong ? C(all.along[3 * i + axis]) : C(0);
    }
    Pass::template run<C>(all.degrees, d, along, slopes, SharedRow<T>{tile + threadIdx.x * pitch_of<T>(columns)});
    for (int axis = 0; axis < 3; ++axis)
      if (Pass::kReadsRow) assign(all.slopes[3 * i + axis], slopes[axis]);
  }
  if (Pass::kWritesRow) {
    __syncthreads();
    for_elements<T>(count, columns, [&](int to, int from) { all.out[first * columns + to] = tile[from]; });
  }
}
#endif

template <typename Pass, typename T>
void run(Call& call, const Arrays<T>& all) {
  if (all.points == 0) return;
  if (call.is_on_cpu()) {
    return on_cpu(call, all.points, OnCpu<Pass, T>{all}, 8.0 + 2 * all.columns());
  }
#ifdef __CUDACC__
  const int64_t blocks = (all.points + kPointsOfBlock - 1) / kPointsOfBlock;
  const int64_t bytes = int64_t{kPointsOfBlock} * pitch_of<T>(all.columns()) * static_cast<int64_t>(sizeof(T));
  launch(call, points_kernel<Pass, T>, blocks, kPointsOfBlock, bytes, all);
#endif
}

}  // namespace msops::harmonics
