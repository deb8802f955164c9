// What the entries of rms_norm, add_rms_norm and layer_norm read and check alike.
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

// Requires the gradient of a parameter where, and only where, the parameter is given.
inline void require_gradient_of(Call& call, const Tensor& gradient, const Tensor& parameter, const char* name) {
  call.require((gradient.dtype == nullptr) == (parameter.dtype == nullptr), kBadParameterCount,
               "%s and d%s must both be given or both be absent", name, name);
  if (!parameter.dtype) return;
  call.require_same_shape(gradient, parameter);
  call.require(!call.ok() || std::strcmp(gradient.dtype, parameter.dtype) == 0, kBadDtype, "d%s is %s, %s is %s", name,
               gradient.dtype, name, parameter.dtype);
}

}  // namespace msops::norm
