// Products on any GPU, in any dtype.
#pragma once

#include "places.h"

#ifdef __CUDACC__

namespace msops::grouped_matmul {

constexpr int kPlainColumns = 32;

// A block takes a tile of 128 x 32 sums; a thread takes 4 x 4 of them.
template <typename T, typename Products>
__global__ void __launch_bounds__(256) plain_kernel(const __grid_constant__ Products p) {
  using C = Compute<T>;
  constexpr int kDeep = 16, kEach = 4, kDown = kTileRows / kEach, kAcross = kPlainColumns / kEach;
  __shared__ C a[kDeep][kTileRows + 1], b[kDeep][kPlainColumns + 1];
  const Place place = find_place<kTileRows, kPlainColumns>(p, blockIdx.x);
  const int row = threadIdx.x / kAcross, column = threadIdx.x % kAcross;
  if (place.rows == 0) return;
  C sums[kEach][kEach];
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) sums[i][j] = p.first_of(place, column + kAcross * j);
  // Neighbouring threads read what is close together: terms or vectors.
  const auto load = [&](auto& to, const Vectors<T>& from, int count, int64_t k) {
    constexpr int kCount = sizeof to / sizeof(C) / kDeep - 1;
    for (int i = threadIdx.x; i < kCount * kDeep; i += 256) {
      const int vector = from.step == 1 ? i / kDeep : i % kCount, term = from.step == 1 ? i % kDeep : i / kCount;
      to[term][vector] = vector < count && k + term < place.deep ? C(*from.at(vector, k + term)) : C(0);
    }
  };
  for (int64_t k = 0; k < place.deep; k += kDeep) {
    load(a, p.left(place), place.rows, k);
    load(b, p.right(place), place.columns, k);
    __syncthreads();
    for (int d = 0; d < kDeep; ++d)
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) sums[i][j] += a[d][row + kDown * i] * b[d][column + kAcross * j];
    __syncthreads();
  }
  T* const to = p.to(place);
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) {
      const int r = row + kDown * i, c = column + kAcross * j;
      if (r < place.rows && c < place.columns) assign(to[r * p.columns + c], sums[i][j]);
    }
}

template <typename T, template <typename> class Products>
void multiply_plainly(Call& call, const Products<T>& p) {
  launch(call, plain_kernel<T, Products<T>>, most_tiles<kTileRows, kPlainColumns>(p), 256, 0, p);
}

}  // namespace msops::grouped_matmul

#endif
