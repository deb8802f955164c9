// Normal computes xhat_j = (x_j - mean(x)) r of a row.
//
// The mean of a row that is far from 0 is rounded to `mean`, which may be off by some 1e-7 of it. What remains,
// d = mean(x - mean), has all digits, and costs no further reading of the row: the reduction of the squares adds it up
// beside them. With it
//
//   mean((x - mean(x))^2) = mean((x - mean)^2) - d^2,  xhat_j = (x_j - mean) r - d r
//
// float16 has fewer digits than a plain mean in float32, and needs no d. On the GPU, where a reduction takes as long as
// the arithmetic of many elements, teams that keep a row need no mean beforehand: they take both sums about a pivot in
// one reduction (SumsAbout in statistics.h), and `mean` is that pivot.
#pragma once

#include "../../common/statistics.h"

namespace msops::norm {

// Tells whether rows of T take d into account.
template <typename T>
constexpr bool kTakesRests = sizeof(T) > 2;

template <typename T, bool kRests>
struct Normal {
  using C = Compute<T>;
  C mean, r, shift;

  // Takes the mean of a row of n elements or, with kRests, any number near it. Of the row's elements less that number
  // it takes the sums of squares and, with kRests, of themselves.
  MSOPS_BOTH Normal(C of_row, C squares, C rest, C n, C eps) : mean(of_row) {
    if constexpr (kRests) {
      const C d = rest / n, variance = squares / n - d * d;
      r = reciprocal_root((variance < 0 ? C(0) : variance) + eps);  // rounding may make it negative
      shift = -d * r;
    } else {
      r = reciprocal_root(squares / n + eps), shift = 0;
    }
  }
  MSOPS_BOTH C operator()(C v) const {
    if constexpr (kRests) {
      return (v - mean) * r + shift;
    } else {
      return (v - mean) * r;
    }
  }

 private:
  static MSOPS_BOTH C reciprocal_root(C v) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 2) return rsqrtf(v);  // within 2 roundings of float32
#endif
    return 1 / sqrt(v);
  }
};

}  // namespace msops::norm
