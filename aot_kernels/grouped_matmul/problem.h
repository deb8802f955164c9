// The products that grouped_matmul and its gradients compute, for both devices.
#pragma once

#include "../common/numbers.h"
#include "../shared/product/matrix.h"

namespace msops::grouped_matmul {

using product::Vectors;

constexpr int kTileRows = 128;  // of a tile on a GPU, all of which belong to one group; large tiles have twice as many

// Groups says which rows each group has. The rows after the last group are as those of one more group.
struct Groups {
  int64_t count, rows;
  // (3, count + 2): where groups begin and, on a GPU, their tiles and their large tiles, and where the last ones end
  const int64_t* bounds;

  MSOPS_BOTH int64_t begin(int64_t group) const { return bounds[group]; }
  MSOPS_BOTH int64_t size(int64_t group) const { return bounds[group + 1] - bounds[group]; }
  template <int kRows>
  MSOPS_BOTH int64_t first_tile(int64_t group) const {
    static_assert(kRows == kTileRows || kRows == 2 * kTileRows, "tiles are of two sizes");
    return bounds[kRows / kTileRows * (count + 2) + group];
  }
};

// A Place is where a tile of a result is: `rows` rows and `columns` columns of it, from a row and a column on. Each
// number is a sum of `deep` products, of the terms from `first` on.
struct Place {
  int64_t group, row, column;
  int rows, columns;
  int64_t first, deep;
};

// out_n = x_n W_e + bias_e for each row n of group e. Rows of no group give 0.
template <typename T>
struct RowProducts {
  Groups groups;
  int64_t deep, columns;
  const T* x;       // (rows, deep)
  const T* weight;  // (groups, deep, columns) or, if it is transposed, (groups, columns, deep)
  bool is_transposed;
  OptionalNumbers<T> bias;  // (groups, columns)
  T* out;                   // (rows, columns)

  bool is_empty() const { return groups.rows == 0 || columns == 0; }
  MSOPS_BOTH Vectors<T> left(int64_t row) const { return {x + row * deep, deep, 1}; }
  MSOPS_BOTH Vectors<T> right(int64_t group, int64_t column) const {
    const T* const matrix = weight + group * deep * columns;
    if (is_transposed) return {matrix + column * deep, deep, 1};
    return {matrix + column, 1, columns};
  }
  MSOPS_BOTH T* to(int64_t row, int64_t column) const { return out + row * columns + column; }

  MSOPS_BOTH Vectors<T> left(const Place& place) const { return left(place.row); }
  MSOPS_BOTH Vectors<T> right(const Place& place) const { return right(place.group, place.column); }
  MSOPS_BOTH T* to(const Place& place) const { return to(place.row, place.column); }
  // Return whether sums of a place have a further term, and that of a column.
  MSOPS_BOTH bool has_first(const Place& place) const { return bias.data && place.group < groups.count; }
  MSOPS_BOTH Compute<T> first_of(const Place& place, int column) const {
    return has_first(place) && column < place.columns ? bias[place.group * columns + place.column + column]
                                                      : Compute<T>(0);
  }
};

// out_e = a_e^T b_e: sums over the rows of group e.
template <typename T>
struct WeightProducts {
  Groups groups;
  int64_t height, columns;
  const T* a;  // (rows, height)
  const T* b;  // (rows, columns)
  T* out;      // (groups, height, columns)

  bool is_empty() const { return groups.count == 0 || height == 0 || columns == 0; }
  MSOPS_BOTH Vectors<T> left(const Place& place) const { return {a + place.first * height + place.row, 1, height}; }
  MSOPS_BOTH Vectors<T> right(const Place& place) const {
    return {b + place.first * columns + place.column, 1, columns};
  }
  MSOPS_BOTH T* to(const Place& place) const {
    return out + (place.group * height + place.row) * columns + place.column;
  }
  MSOPS_BOTH bool has_first(const Place&) const { return false; }
  MSOPS_BOTH Compute<T> first_of(const Place&, int) const { return 0; }
};

// out_e is the sum of the rows of group e. Index i is a run of kRun columns of a group.
template <int kRun, typename T>
struct SumRows {
  using C = Compute<T>;
  Groups groups;
  int64_t columns;
  const T* from;   // (rows, columns)
  Numbers<T> out;  // (groups, columns)

  MSOPS_BOTH static int64_t runs(int64_t columns) { return (columns + kRun - 1) / kRun; }

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const int64_t across = runs(columns), group = i / across, first = i % across * kRun;
    const int64_t count = columns - first < kRun ? columns - first : kRun;
    C sums[kRun] = {};
    for (int64_t row = groups.begin(group); row < groups.begin(group + 1); ++row)
      for (int64_t j = 0; j < count; ++j) sums[j] += C(from[row * columns + first + j]);
    for (int64_t j = 0; j < count; ++j) out.set(group * columns + first + j, sums[j]);
  }
};

}  // namespace msops::grouped_matmul
