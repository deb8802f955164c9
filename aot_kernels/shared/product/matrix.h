// A product of matrices, for both devices.
#pragma once

#include "../../common/dtype.h"

namespace msops::product {

// A Matrix of `count` vectors of `deep` numbers is (count, deep) or, if it is transposed, (deep, count).
template <typename T>
struct Matrix {
  const T* data;
  bool is_transposed;

  MSOPS_BOTH Matrix(const T* data_, bool is_transposed_ = false) : data(data_), is_transposed(is_transposed_) {}
  MSOPS_BOTH Compute<T> at(int64_t i, int64_t k, int64_t count, int64_t deep) const {
    return Compute<T>(data[is_transposed ? k * count + i : i * deep + k]);
  }
};

// out (n, m) = scale * numbers (n, deep) times weights (m, deep), or out plus that.
template <typename T>
struct Product {
  int64_t n, m, deep;
  Matrix<T> numbers, weights;
  T* out;
  bool adds = false;
  Compute<T> scale = 1;

  MSOPS_BOTH void store(int64_t i, int64_t j, Compute<T> sum) const {
    T& to = out[i * m + j];
    assign(to, adds ? Compute<T>(to) + rounded<T>(scale * sum) : scale * sum);
  }
};

}  // namespace msops::product
