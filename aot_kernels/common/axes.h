// Axes computes offsets over nested axes, along which K arrays are walked together, each with its own strides.
#pragma once

#include "dtype.h"

namespace msops {

constexpr int kMaxRank = 16;

template <int K>
struct Axes {
  int count = 0;
  int64_t size[kMaxRank];
  int64_t stride[K][kMaxRank];  // in elements; 0 where an array stays in place

  // Adds the next axis inward. It is merged with the last one if every array walks through both with one stride.
  void push(int64_t length, const int64_t (&strides)[K]) {
    if (length == 1) return;
    bool merges = count > 0;
    for (int k = 0; k < K && merges; ++k) merges = stride[k][count - 1] == strides[k] * length;
    if (merges) {
      size[count - 1] *= length;
    } else {
      size[count++] = length;
    }
    for (int k = 0; k < K; ++k) stride[k][count - 1] = strides[k];
  }

  int64_t total() const {
    int64_t product = 1;
    for (int a = 0; a < count; ++a) product *= size[a];
    return product;
  }

  // Returns the largest offset of array k.
  int64_t extent(int k) const {
    int64_t sum = 0;
    for (int a = 0; a < count; ++a) sum += (size[a] - 1) * stride[k][a];
    return sum;
  }

  // Returns whether neighbours along the innermost axis are neighbours in array 0.
  bool contiguous() const { return count > 0 && stride[0][count - 1] == 1; }

  // Returns whether the walk reads array 0, from an aligned start, only in whole aligned packs of N. The axis along
  // which array 0 is contiguous, if it is one of these, is then walked in packs.
  template <int N>
  bool packs() const {
    for (int a = 0; a < count; ++a)
      if ((stride[0][a] == 1 ? size[a] : stride[0][a]) % N != 0) return false;
    return true;
  }

  // Returns the offset of array k at step i of the walk.
  template <typename Index>
  MSOPS_BOTH Index offset(int k, Index i) const {
    if (count == 0) return 0;
    Index sum = 0;
    for (int a = count - 1; a > 0; --a) {
      const Index length = static_cast<Index>(size[a]), outer = i / length;
      sum += (i - outer * length) * static_cast<Index>(stride[k][a]);
      i = outer;
    }
    return sum + i * static_cast<Index>(stride[k][0]);
  }
};

}  // namespace msops
