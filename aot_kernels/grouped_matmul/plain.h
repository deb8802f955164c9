// Products on any GPU, in any dtype.
#pragma once

#include "places.h"

#ifdef __CUDACC__

namespace msops::grouped_matmul {

// A block takes a tile of 64 x 64 sums; a thread takes 4 x 4 of them.
template <typename T, typename Products>
__global__ void __launch_bounds__(256) plain_kernel(const __grid_constant__ Products p) {
  using C = Compute<T>;
  constexpr int kSide = 64, kDeep = 16, kEach = 4, kApart = kSide / kEach;
  __shared__ C a[kDeep][kSide + 1], b[kDeep][kSide + 1];
  const Place place = find_place<kSide, kSide>(p, blockIdx.x);
  const int row = threadIdx.x / kApart, column = threadIdx.x % kApart;
  C sums[kEach][kEach];
  // Neighbouring threads read what is close together: terms or vectors.
  const auto load = [&](C(&to)[kDeep][kSide + 1], const Vectors<T>& from, int count, int64_t k) {
    for (int i = threadIdx.x; i < kSide * kDeep; i += 256) {
      const int vector = from.step == 1 ? i / kDeep : i % kSide, term = from.step == 1 ? i % kDeep : i / kSide;
      to[term][vector] = vector < count && k + term < place.deep ? C(*from.at(vector, k + term)) : C(0);
    }
  };
  if (place.rows <= 0) return;
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) sums[i][j] = p.first_of(place, column + kApart * j);
  for (int64_t k = 0; k < place.deep; k += kDeep) {
    load(a, p.left(place), place.rows, k);
    load(b, p.right(place), place.columns, k);
    __syncthreads();
    for (int d = 0; d < kDeep; ++d)
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) sums[i][j] += a[d][row + kApart * i] * b[d][column + kApart * j];
    __syncthreads();
  }
  T* const to = p.to(place);
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) {
      const int r = row + kApart * i, c = column + kApart * j;
      if (r < place.rows && c < place.columns) assign(to[r * p.columns + c], sums[i][j]);
    }
}

template <typename T, template <typename> class Products>
void multiply_plainly(Call& call, const Products<T>& p) {
  launch(call, plain_kernel<T, Products<T>>, order_of<64, 64>(p).count(), 256, 0, p);
}

}  // namespace msops::grouped_matmul

#endif
