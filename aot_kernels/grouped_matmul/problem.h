// The products that grouped_matmul and its gradients compute, for both devices. Rows are cut into groups; group e has
// the rows from offsets[e] to offsets[e + 1] - 1, and rows from offsets[groups] on belong to none.
#pragma once

#include "../common/numbers.h"

namespace msops::grouped_matmul {

// out_n = x_n W_e + bias_e for each row n of group e.
template <typename T>
struct RowProducts {
  int64_t groups, rows, deep, columns;
  const int64_t* offsets;
  const T* x;       // (rows, deep)
  const T* weight;  // (groups, deep, columns) or, if it is transposed, (groups, columns, deep)
  bool is_transposed;
  OptionalNumbers<T> bias;  // (groups, columns)
  T* out;                   // (rows, columns)

  MSOPS_BOTH const T* weight_of(int64_t group) const { return weight + group * deep * columns; }
};

// out_e = a_e^T b_e: sums over the rows of group e.
template <typename T>
struct WeightProducts {
  int64_t groups, rows, height, columns;
  const int64_t* offsets;
  const T* a;  // (rows, height)
  const T* b;  // (rows, columns)
  T* out;      // (groups, height, columns)
};

// out_e is the sum of the rows of group e. Index i is a run of kRun columns of a group.
template <int kRun, typename T>
struct SumRows {
  using C = Compute<T>;
  int64_t columns;
  const int64_t* offsets;
  const T* from;   // (rows, columns)
  Numbers<T> out;  // (groups, columns)

  MSOPS_BOTH static int64_t runs(int64_t columns) { return (columns + kRun - 1) / kRun; }

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t across = runs(columns), group = i / across, first = i % across * kRun;
    const int64_t count = columns - first < kRun ? columns - first : kRun;
    C sums[kRun] = {};
    for (int64_t row = offsets[group]; row < offsets[group + 1]; ++row)
      for (int64_t j = 0; j < count; ++j) sums[j] += C(from[row * columns + first + j]);
    for (int64_t j = 0; j < count; ++j) out.set(group * columns + first + j, sums[j]);
  }
};

}  // namespace msops::grouped_matmul
