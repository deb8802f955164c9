// Normal computes xhat_j = (x_j - mean(x)) r of a row.
//
// The mean of a row that is far from 0 is rounded to `mean`, which may be off by some 1e-7 of it. What remains,
// d = mean(x - mean), has all digits, and costs no further reading of the row: the reduction of the squares adds it up
// beside them. With it
//
//   mean((x - mean(x))^2) = mean((x - mean)^2) - d^2,  xhat_j = (x_j - mean) r - d r
//
// float16 has fewer digits than a plain mean in float32, and d would take 7 to 17 % of the time there (on an H200).
#pragma once

#include "../../common/statistics.h"

namespace msops::norm {

// Tells whether rows of T take d into account.
template <typename T>
constexpr bool kTakesRests = sizeof(T) > 2;

template <typename C, bool kRests>
struct Normal {
  C mean, r, shift;

  // Takes the mean of a row of n elements, and the sums of (x - mean)^2 and, with kRests, of x - mean over it.
  MSOPS_BOTH Normal(C of_row, C squares, C rest, C n, C eps) : mean(of_row) {
    if constexpr (kRests) {
      const C d = rest / n, variance = squares / n - d * d;
      r = 1 / sqrt((variance < 0 ? C(0) : variance) + eps);  // rounding may make it negative
      shift = -d * r;
    } else {
      r = 1 / sqrt(squares / n + eps), shift = 0;
    }
  }
  MSOPS_BOTH C operator()(C v) const {
    if constexpr (kRests) {
      return (v - mean) * r + shift;
    } else {
      return (v - mean) * r;
    }
  }
};

}  // namespace msops::norm
