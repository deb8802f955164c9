// Parameters of rms_norm and add_rms_norm: one row for all rows of x or, beside x (..., H, C), one of (H, C) for each
// head. Rows of x take these in turn.
#pragma once

#include "../../common/rows_sums.h"
#include "../../common/scratch.h"

namespace msops::norm {

struct Heads {
  int64_t columns, count;  // C, and H or 1

  // Reads the shapes of parameters, which may be absent and are equal otherwise.
  Heads(Call& call, const Tensor& x, const Tensor& one, const Tensor& other) : columns(x.dim(-1)), count(1) {
    const Tensor& parameter = one.dtype ? one : other;
    call.require(x.rank > 0, kBadRank, "%s has no axes", x.name);
    if (one.dtype && other.dtype) call.require_same_shape(other, one);
    if (parameter.dtype && parameter.rank == 2) {
      call.require(x.rank > 1, kBadRank, "%s has no axis of heads", x.name);
      call.require_shape(parameter, {x.dim(-2), columns});
      count = std::max<int64_t>(1, parameter.dim(0));  // without heads there are no rows
    } else if (parameter.dtype) {
      call.require_shape(parameter, {columns});
    }
  }

  // Returns how many elements a parameter has.
  int64_t size() const { return size_of({columns, count}); }
};

// Body is for for_rows or for_rows_with_sums, and has `advance`, which moves its parameters to those of a later head.
template <typename Body>
struct OfHeads : Body {
  int64_t heads;

  template <typename Team, typename... Rest>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, Rest&&... rest) const {
    Body body = *this;
    const bool is_short = (row | heads) <= UINT32_MAX;  // then the remainder takes fewer instructions
    body.advance(is_short ? static_cast<uint32_t>(row) % static_cast<uint32_t>(heads) : row % heads);
    body(row, team, rest...);
  }
};

}  // namespace msops::norm
