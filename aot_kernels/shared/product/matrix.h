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

// Vectors are factors of a product: it sums over their terms. One of the strides is 1.
template <typename T>
struct Vectors {
  const T* first;
  int64_t apart, step;  // the strides of vectors and of terms

  MSOPS_BOTH const T* at(int64_t vector, int64_t term) const { return first + vector * apart + term * step; }
  MSOPS_BOTH Vectors from(int64_t vector, int64_t term) const { return {at(vector, term), apart, step}; }
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
