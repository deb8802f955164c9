// A Box has sides along the axes, from `low` to `high`. A Ray consists of the points o + t d.
#pragma once

#include <cmath>

#include "../../common/call.h"

namespace msops::rays {

template <typename C>
struct Box {
  C low[3], high[3];

  template <typename Other>
  Box<Other> as() const {
    Box<Other> box;
    for (int axis = 0; axis < 3; ++axis) {
      box.low[axis] = Other(low[axis]);
      box.high[axis] = Other(high[axis]);
    }
    return box;
  }
};

// Reads the attributes low_x to high_z.
inline Box<double> box_of(Call& call) {
  const Box<double> box{{call.number("low_x"), call.number("low_y"), call.number("low_z")},
                        {call.number("high_x"), call.number("high_y"), call.number("high_z")}};
  for (int axis = 0; axis < 3; ++axis)
    call.require(std::isfinite(box.low[axis]) && std::isfinite(box.high[axis]) && box.low[axis] < box.high[axis],
                 kBadAttribute, "the box begins at %g and ends at %g on axis %d", box.low[axis], box.high[axis], axis);
  return box;
}

template <typename C>
struct Ray {
  C origin[3], direction[3];

  template <typename T>
  static MSOPS_BOTH Ray at(const T* origins, const T* directions, int64_t i) {
    Ray ray;
    for (int axis = 0; axis < 3; ++axis) {
      ray.origin[axis] = C(origins[3 * i + axis]);
      ray.direction[axis] = C(directions[3 * i + axis]);
    }
    return ray;
  }
};

}  // namespace msops::rays
