// All products of grouped_matmul on the CPU. A thread takes a tile of a group's result: kRows vectors on the left times
// kColumns vectors on the right. It copies kDeep terms of each at a time, so that they lie close together, those on the
// right as panels (see shared/product/cpu.h), and multiplies. Each number of a result is the sum of its products in
// order, kDeep at a time, wherever it is in a tile: it does not depend on how many rows there are.
#pragma once

#include <vector>

#include "../shared/product/cpu.h"
#include "problem.h"

namespace msops::grouped_matmul::cpu {

constexpr int64_t kRows = 96, kColumns = 192, kDeep = 256;

// Sums are what a group's vectors on the left make of those on the right.
template <typename T>
struct Sums {
  Vectors<T> left, right;
  int64_t rows, columns, deep;  // how many vectors on the left, on the right, and terms
  T* out;
  int64_t row_stride, column_stride;  // of out; one of them is 1

  MSOPS_CPU int64_t tiles_across() const { return (columns + kColumns - 1) / kColumns; }
  MSOPS_CPU int64_t tiles() const { return (rows + kRows - 1) / kRows * tiles_across(); }
};

// Worker has a thread's room for tiles of at most so many vectors and terms.
template <typename T>
class Worker {
 public:
  using C = Compute<T>;

  Worker(int64_t rows, int64_t columns, int64_t deep) {
    rows = std::min(rows, kRows), columns = std::min(columns, kColumns), deep = std::min(deep, kDeep);
    rows_.reset(new C[whole(rows, product::kRows) * deep]);
    panels_.reset(new C[whole(columns, kWidth) * deep]);
    sums_.reset(new C[whole(rows, product::kRows) * kLanes]);
    totals_.reset(new C[rows * columns]);
  }

  // Computes a tile of a group. products.begin(group, row, column) is what a sum begins with.
  template <typename Products>
  MSOPS_CPU void compute(const Products& products, int64_t group, int64_t tile) const {
    const Sums<T> s = products.sums(group);
    const int64_t row = tile / s.tiles_across() * kRows, column = tile % s.tiles_across() * kColumns;
    const int64_t rows = std::min(kRows, s.rows - row), columns = std::min(kColumns, s.columns - column);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) totals_[i * columns + j] = products.begin(group, row + i, column + j);
    for (int64_t k = 0; k < s.deep; k += kDeep) {
      const int64_t terms = std::min(kDeep, s.deep - k);
      copy_rows(s.left.from(row, k), rows, terms);
      copy_panels(s.right.from(column, k), columns, terms);
      for (int64_t j = 0; j < columns; j += kLanes) {
        const int64_t n = std::min(kLanes, columns - j), pitch = whole(n, kWidth);
        product::multiply_panel(pitch, rows_.get(), rows, terms, panels_.get() + j * terms, sums_.get());
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t l = 0; l < n; ++l) totals_[i * columns + j + l] += sums_[i * pitch + l];
      }
    }
    store(s, s.out + row * s.row_stride + column * s.column_stride, rows, columns);
  }

 private:
  static constexpr int64_t kWidth = product::kWidth<C>, kLanes = product::kMostLanes<C>;

  static MSOPS_CPU int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

  // Copies vectors as rows (n, terms), with rows of zeros up to as many as are multiplied at once.
  MSOPS_CPU void copy_rows(const Vectors<T>& from, int64_t n, int64_t terms) const {
    C* const to = rows_.get();
    if (from.step == 1) {
      for (int64_t i = 0; i < n; ++i) widen(from.at(i, 0), to + i * terms, terms);
    } else {
      C line[kRows];
      for (int64_t k = 0; k < terms; ++k) {
        widen(from.at(0, k), line, n);
        for (int64_t i = 0; i < n; ++i) to[i * terms + k] = line[i];
      }
    }
    std::fill(to + n * terms, to + whole(n, product::kRows) * terms, C(0));
  }

  // Copies vectors as panels (terms, kLanes), the last of which may be narrower, with zeros up to whole vectors.
  MSOPS_CPU void copy_panels(const Vectors<T>& from, int64_t n, int64_t terms) const {
    const int64_t last = n / kLanes * kLanes, pitch = whole(n - last, kWidth);
    std::fill(place(last, 0, last, terms, pitch), place(last, terms, last, terms, pitch), C(0));
    if (from.apart == 1) {
      for (int64_t k = 0; k < terms; ++k)
        for (int64_t j = 0; j < n; j += kLanes)
          widen(from.at(j, k), place(j, k, last, terms, pitch), std::min(kLanes, n - j));
    } else {
      C line[kDeep];
      for (int64_t j = 0; j < n; ++j) {
        widen(from.at(j, 0), line, terms);
        C* const to = place(j, 0, last, terms, pitch);
        const int64_t apart = j < last ? kLanes : pitch;
        for (int64_t k = 0; k < terms; ++k) to[k * apart] = line[k];
      }
    }
  }

  // Returns where term k of vector j is. The vectors from `last` on are the last panel, whose terms are `pitch` apart.
  MSOPS_CPU C* place(int64_t j, int64_t k, int64_t last, int64_t terms, int64_t pitch) const {
    if (j < last) return panels_.get() + j / kLanes * kLanes * terms + k * kLanes + j % kLanes;
    return panels_.get() + last * terms + k * pitch + j - last;
  }

  MSOPS_CPU void store(const Sums<T>& s, T* out, int64_t rows, int64_t columns) const {
    if (s.column_stride == 1) {
      for (int64_t i = 0; i < rows; ++i) narrow(totals_.get() + i * columns, out + i * s.row_stride, columns);
      return;
    }
    C line[kRows];
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = 0; i < rows; ++i) line[i] = totals_[i * columns + j];
      narrow(line, out + j * s.column_stride, rows);
    }
  }

  std::unique_ptr<C[]> rows_, panels_, sums_, totals_;
};

// Rows of a group are on the left if the weight has its columns close together, else the weight's columns are: then
// what is copied as rows, whose terms are close together, is the larger part where there are few rows.
template <typename T>
struct OfRows {
  RowProducts<T> p;

  MSOPS_CPU int64_t rows() const { return p.is_transposed ? p.columns : p.groups.rows; }
  MSOPS_CPU int64_t columns() const { return p.is_transposed ? p.groups.rows : p.columns; }
  MSOPS_CPU int64_t deep() const { return p.deep; }
  MSOPS_CPU Sums<T> sums(int64_t group) const {
    const int64_t first = p.groups.begin(group), n = p.groups.size(group);
    const Vectors<T> x = p.left(first), weight = p.right(group, 0);
    if (p.is_transposed) return {weight, x, p.columns, n, p.deep, p.to(first, 0), 1, p.columns};
    return {x, weight, n, p.columns, p.deep, p.to(first, 0), p.columns, 1};
  }
  MSOPS_CPU Compute<T> begin(int64_t group, int64_t row, int64_t column) const {
    return p.bias[group * p.columns + (p.is_transposed ? row : column)];
  }
};

template <typename T>
struct OfWeights {
  WeightProducts<T> p;

  MSOPS_CPU int64_t rows() const { return p.height; }
  MSOPS_CPU int64_t columns() const { return p.columns; }
  MSOPS_CPU int64_t deep() const { return p.groups.rows; }
  MSOPS_CPU Sums<T> sums(int64_t group) const {
    const int64_t first = p.groups.begin(group), n = p.groups.size(group);
    const Place place{group, 0, 0, 0, 0, first, n};
    return {p.left(place), p.right(place), p.height, p.columns, n, p.to(place), p.columns, 1};
  }
  MSOPS_CPU Compute<T> begin(int64_t, int64_t, int64_t) const { return 0; }
};

// Threads take tiles of all groups, one after another.
template <typename T, typename Products>
struct ComputeTiles {
  const Products& products;
  const std::vector<int64_t>& ends;  // the tiles of each group and those before
  product::Shares& shares;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const Worker<T> worker(products.rows(), products.columns(), products.deep());
    for (int64_t i; shares.take(0, part, parts, ends.back(), i);) {
      const int64_t group = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      const int64_t first = group ? ends[group - 1] : 0;
      worker.compute(products, group, i - first);
    }
  }
};

template <typename T, typename Products>
void compute(Call& call, const Products& products) {
  const int64_t groups = products.p.groups.count;
  if (groups == 0) return;
  std::vector<int64_t> ends(groups);
  double work = 0;
  for (int64_t group = 0, tiles = 0; group < groups; ++group) {
    const Sums<T> sums = products.sums(group);
    ends[group] = tiles += sums.tiles();
    work += static_cast<double>(sums.rows * sums.columns) * static_cast<double>(sums.deep + 8);
  }
  product::Shares shares(1);
  on_threads(call, ends.back(), work / 8, ComputeTiles<T, Products>{products, ends, shares});
}

// A row of no group gets zeros.
template <typename T>
struct ClearRow {
  int64_t columns;
  T* out;

  MSOPS_CPU void operator()(int64_t row) const { std::fill_n(out + row * columns, columns, T(0)); }
};

template <typename T>
void multiply(Call& call, const RowProducts<T>& p) {
  const int64_t rest = p.groups.count;
  compute<T>(call, OfRows<T>{p});
  on_cpu(call, p.groups.size(rest), ClearRow<T>{p.columns, p.to(p.groups.begin(rest), 0)},
         static_cast<double>(p.columns) / 8);
}
template <typename T>
void multiply(Call& call, const WeightProducts<T>& p) {
  compute<T>(call, OfWeights<T>{p});
}

}  // namespace msops::grouped_matmul::cpu
