// The entries of norms read their attributes by these functions.
#pragma once

#include "../../common/rows.h"

namespace msops::norm {

// Reads the attribute eps.
inline double eps_of(Call& call) {
  const double eps = call.number("eps");
  call.require(eps >= 0 && eps < HUGE_VAL, kBadAttribute, "attribute eps is %g, expected a number of at least 0", eps);
  return eps;
}

// Reads the attribute offset.
inline double offset_of(Call& call) {
  const double offset = call.number("offset");
  call.require(offset - offset == 0, kBadAttribute, "attribute offset is %g, expected a finite number", offset);
  return offset;
}

// Returns how many rows of `columns` elements a tensor has.
inline int64_t rows_of(const Tensor& x, int64_t columns) { return x.size / std::max<int64_t>(1, columns); }

}  // namespace msops::norm
