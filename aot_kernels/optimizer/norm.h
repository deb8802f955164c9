// Squares of many tensors' elements, and a multiple of each tensor.
#pragma once

#include "../common/pack.h"
#include "../common/sum.h"
#include "table.h"

namespace msops::optimizer {

// Writes each piece's sum of squares to `sums`. A sum's order depends on the piece's size and its address alone.
template <typename T>
struct Squares {
  using C = Compute<T>;
  C* sums;

#ifdef __CUDACC__
  __device__ void on_gpu(const Table<1>& table, const Piece& piece, int place) const {
    constexpr int kWidth = kPackWidth<T>;
    const T* x = table.template at<T>(0, piece);
    const int size = static_cast<int>(piece.size), packs = is_aligned<kWidth>(x) ? size / kWidth : 0;
    const int thread = static_cast<int>(threadIdx.x);
    C sum = 0;
    for (int i = thread; i < packs; i += kTableThreads) {
      const auto pack = load<kWidth>(x + i * kWidth);
      C squares = 0;
      for (int k = 0; k < kWidth; ++k) squares += C(pack.values[k]) * C(pack.values[k]);
      sum += squares;
    }
    for (int i = packs * kWidth + thread; i < size; i += kTableThreads) sum += C(x[i]) * C(x[i]);
    sum = block_total(sum);
    if (thread == 0) sums[place] = sum;
  }

  // Returns the sum over all threads of a block, in the first one.
  static __device__ C block_total(C sum) {
    __shared__ C of_warps[kTableThreads / 32];
    const int thread = static_cast<int>(threadIdx.x);
    sum = team_sum<32>(sum);
    if (thread % 32 == 0) of_warps[thread / 32] = sum;
    __syncthreads();
    C total = 0;
    for (int i = 0; i < kTableThreads / 32; ++i) total += of_warps[i];
    return total;
  }
#endif
  MSOPS_CPU void on_cpu(const Table<1>& table, const Piece& piece, int place) const {
    constexpr int kLanes = 32;
    const T* x = table.template at<T>(0, piece);
    C lanes[kLanes] = {}, sum = 0;
    int64_t i = 0;
    for (; i + kLanes <= piece.size; i += kLanes)
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) lanes[k] += C(x[i + k]) * C(x[i + k]);
    for (; i < piece.size; ++i) sum += C(x[i]) * C(x[i]);
    for (int k = 0; k < kLanes; ++k) sum += lanes[k];
    sums[place] = sum;
  }
};

// Adds up the sums of `n` pieces.
template <typename C>
MSOPS_BOTH C total_of(const C* sums, int n, int begin, int step) {
  Sum<C> total;
  for (int i = begin; i < n; i += step) total += sums[i];
  return total.total();
}

#ifdef __CUDACC__
template <typename C>
__global__ void __launch_bounds__(kTableThreads) total_kernel(const C* sums, int n, C* total) {
  const int thread = static_cast<int>(threadIdx.x);
  const C sum = Squares<C>::block_total(total_of(sums, n, thread, kTableThreads));
  if (thread == 0) *total = sum;
}
#endif

// y = x up / down, rounded once.
template <typename T>
struct Scale {
  using C = Compute<T>;
  const float *up, *down;

  struct Element {
    const T* x;
    T* y;
    C up, down;

    MSOPS_BOTH void operator()(int64_t i) const { assign(y[i], C(x[i]) * up / down); }
  };

#ifdef __CUDACC__
  __device__ void on_gpu(const Table<2>& table, const Piece& piece, int) const {
    constexpr int kWidth = kPackWidth<T>;
    const Element element = of(table, piece);
    const bool fits = is_aligned<kWidth>(element.x) && is_aligned<kWidth>(element.y);
    const int size = static_cast<int>(piece.size), packs = fits ? size / kWidth : 0;
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < packs; i += kTableThreads) {
      const auto pack = load<kWidth>(element.x + i * kWidth);
      C numbers[kWidth];
      for (int k = 0; k < kWidth; ++k) numbers[k] = C(pack.values[k]) * element.up / element.down;
      store(element.y + i * kWidth, rounded_pack<T>(numbers));
    }
    for (int i = packs * kWidth + thread; i < size; i += kTableThreads) element(i);
  }
#endif
  MSOPS_CPU void on_cpu(const Table<2>& table, const Piece& piece, int) const {
    for_elements<C>(piece.size, of(table, piece));
  }

 private:
  MSOPS_BOTH Element of(const Table<2>& table, const Piece& piece) const {
    return {table.template at<T>(0, piece), table.template at<T>(1, piece), C(*up), C(*down)};
  }
};

}  // namespace msops::optimizer
