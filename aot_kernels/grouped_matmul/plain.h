// The products on any GPU, in any dtype.
#pragma once

#include "tiles.h"

#ifdef __CUDACC__

namespace msops::grouped_matmul {

// A block takes a tile of 64 x 64 sums; a thread takes 4 x 4 of them.
struct PlainTile {
  static constexpr int kSide = 64, kDeep = 16, kThreads = 256, kApart = 16, kEach = 4;
};

// Multiplies `rows` vectors on the left by `columns` vectors on the right, both at most kSide. left(i, k) and
// right(j, k) are their terms. Neighbouring threads read neighbouring terms of the left vectors, if they are close
// together; else terms of neighbouring vectors. store(i, j, sum) gets each sum.
template <typename C, typename Left, typename Right, typename Store>
__device__ __forceinline__ void multiply_plainly(int rows, int columns, int64_t deep, bool left_by_terms,
                                                 bool right_by_terms, const Left& left, const Right& right,
                                                 const Store& store) {
  using S = PlainTile;
  __shared__ C a[S::kDeep][S::kSide + 1], b[S::kDeep][S::kSide + 1];
  const int row = threadIdx.x / S::kApart, column = threadIdx.x % S::kApart;
  C sums[S::kEach][S::kEach] = {};
  const auto load = [&](C(&to)[S::kDeep][S::kSide + 1], int64_t k, int count, bool by_terms, const auto& at) {
    for (int i = threadIdx.x; i < S::kSide * S::kDeep; i += S::kThreads) {
      const int vector = by_terms ? i / S::kDeep : i % S::kSide, term = by_terms ? i % S::kDeep : i / S::kSide;
      to[term][vector] = vector < count && k + term < deep ? C(at(vector, k + term)) : C(0);
    }
  };
  for (int64_t k = 0; k < deep; k += S::kDeep) {
    load(a, k, rows, left_by_terms, left);
    load(b, k, columns, right_by_terms, right);
    __syncthreads();
    for (int d = 0; d < S::kDeep; ++d)
      for (int i = 0; i < S::kEach; ++i)
        for (int j = 0; j < S::kEach; ++j) sums[i][j] += a[d][row + S::kApart * i] * b[d][column + S::kApart * j];
    __syncthreads();
  }
  for (int i = 0; i < S::kEach; ++i)
    for (int j = 0; j < S::kEach; ++j)
      if (row + S::kApart * i < rows && column + S::kApart * j < columns)
        store(row + S::kApart * i, column + S::kApart * j, sums[i][j]);
}

template <typename T>
__global__ void __launch_bounds__(PlainTile::kThreads) plain_rows_kernel(const __grid_constant__ RowProducts<T> p) {
  using C = Compute<T>;
  constexpr int kSide = PlainTile::kSide;
  const int64_t across = (p.columns + kSide - 1) / kSide, column = blockIdx.x % across * kSide;
  const RowTile tile = find_tile<kSide>(blockIdx.x / across, p.groups, p.rows, p.offsets);
  if (tile.first >= tile.end) return;
  const bool is_in_group = tile.group < p.groups;
  const T* const weight = p.weight_of(tile.group);
  const auto of_x = [&](int i, int64_t k) { return p.x[(tile.first + i) * p.deep + k]; };
  const auto of_weight = [&](int j, int64_t k) {
    return weight[p.is_transposed ? (column + j) * p.deep + k : k * p.columns + column + j];
  };
  const auto store = [&](int i, int j, C sum) {
    const C bias = is_in_group ? p.bias[tile.group * p.columns + column + j] : C(0);
    assign(p.out[(tile.first + i) * p.columns + column + j], sum + bias);
  };
  const int64_t columns = p.columns - column;
  multiply_plainly<C>(static_cast<int>(tile.end - tile.first), columns < kSide ? static_cast<int>(columns) : kSide,
                      is_in_group ? p.deep : 0, true, p.is_transposed, of_x, of_weight, store);
}

template <typename T>
__global__ void __launch_bounds__(PlainTile::kThreads) plain_weights_kernel(WeightProducts<T> p) {
  using C = Compute<T>;
  constexpr int kSide = PlainTile::kSide;
  const int64_t across = (p.columns + kSide - 1) / kSide, down = (p.height + kSide - 1) / kSide;
  const int64_t group = blockIdx.x / across / down, first = p.offsets[group];
  const int64_t row = blockIdx.x / across % down * kSide, column = blockIdx.x % across * kSide;
  const auto of_a = [&](int i, int64_t k) { return p.a[(first + k) * p.height + row + i]; };
  const auto of_b = [&](int j, int64_t k) { return p.b[(first + k) * p.columns + column + j]; };
  const auto store = [&](int i, int j, C sum) {
    assign(p.out[(group * p.height + row + i) * p.columns + column + j], sum);
  };
  const int64_t rows = p.height - row, columns = p.columns - column;
  multiply_plainly<C>(rows < kSide ? static_cast<int>(rows) : kSide,
                      columns < kSide ? static_cast<int>(columns) : kSide, p.offsets[group + 1] - first, false, false,
                      of_a, of_b, store);
}

template <typename T>
void multiply_plainly(Call& call, const RowProducts<T>& p) {
  constexpr int kSide = PlainTile::kSide;
  const int64_t across = (p.columns + kSide - 1) / kSide;
  launch(call, plain_rows_kernel<T>, row_tiles<kSide>(p.groups, p.rows) * across, PlainTile::kThreads, 0, p);
}

template <typename T>
void multiply_plainly(Call& call, const WeightProducts<T>& p) {
  constexpr int kSide = PlainTile::kSide;
  const int64_t across = (p.columns + kSide - 1) / kSide, down = (p.height + kSide - 1) / kSide;
  launch(call, plain_weights_kernel<T>, p.groups * across * down, PlainTile::kThreads, 0, p);
}

}  // namespace msops::grouped_matmul

#endif
