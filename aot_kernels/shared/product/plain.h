// Tiles of products on any GPU, in any dtype.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"

#ifdef __CUDACC__

namespace msops::product {

constexpr int kPlainSide = 64, kPlainThreads = 256;

// Computes the 64 x 64 sums from this row and this column on, by a block. left(row, k) and right(column, k) return the
// terms, of which `deep` are added in order, and store(row, column, sum) takes the sums. Neighbouring threads read
// neighbouring terms of the right side if they lie close together, which `by_terms` tells, else neighbouring columns.
template <typename C, typename Left, typename Right, typename Store>
__device__ __forceinline__ void multiply_plainly(int64_t row, int64_t rows, int64_t column, int64_t columns,
                                                 int64_t deep, bool by_terms, const Left& left, const Right& right,
                                                 const Store& store) {
  constexpr int kDeep = 16, kEach = 4;  // each thread has 4 x 4 sums
  __shared__ C x[kDeep][kPlainSide + 1], w[kDeep][kPlainSide + 1];
  const int r = threadIdx.x / 16, c = threadIdx.x % 16;
  C sums[kEach][kEach] = {};
  for (int64_t k = 0; k < deep; k += kDeep) {
    for (int i = threadIdx.x; i < kPlainSide * kDeep; i += kPlainThreads) {
      const int at = i / kDeep, d = i % kDeep;
      x[d][at] = row + at < rows && k + d < deep ? left(row + at, k + d) : C(0);
      const int j = by_terms ? at : i % kPlainSide, e = by_terms ? d : i / kPlainSide;
      w[e][j] = column + j < columns && k + e < deep ? right(column + j, k + e) : C(0);
    }
    __syncthreads();
    for (int d = 0; d < kDeep; ++d)
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) sums[i][j] += x[d][r + 16 * i] * w[d][c + 16 * j];
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j) {
      const int64_t to = row + r + 16 * i, of = column + c + 16 * j;
      if (to < rows && of < columns) store(to, of, sums[i][j]);
    }
}

// Returns how many tiles there are. Blocks have one dimension, since a second one would have 65535 at most.
inline int64_t plain_tiles(int64_t rows, int64_t columns) {
  return (rows + kPlainSide - 1) / kPlainSide * ((columns + kPlainSide - 1) / kPlainSide);
}

}  // namespace msops::product

#endif
