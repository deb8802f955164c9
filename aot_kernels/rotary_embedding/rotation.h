// Rotation says what a call of rotary_embedding turns, for all its kernels.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace msops::rotary {

// Rows are the `width` features of a head at one place in the sequence. They lie without gaps, in the order (batch,
// head, place) or (batch, place, head). The first 2 `turned` features of a row are turned.
struct Rotation {
  int64_t batch, heads, length, width, turned;
  bool heads_first;     // (batch, head, place)
  bool interleaved;     // pairs are (2i, 2i + 1), else (i, i + turned)
  bool table_of_batch;  // each sample has angles of its own
  bool inverse;         // turns by the negative angles

  int64_t rows() const { return batch * heads * length; }

  // Strides of x, in elements.
  MSOPS_BOTH int64_t of_batch() const { return heads * length * width; }
  MSOPS_BOTH int64_t of_head() const { return heads_first ? length * width : width; }
  MSOPS_BOTH int64_t of_place() const { return heads_first ? width : heads * width; }

  // Returns where the angles of a place begin in cos and sin.
  MSOPS_BOTH int64_t angles(int64_t sample, int64_t place) const {
    return ((table_of_batch ? sample * length : 0) + place) * turned;
  }
};

// Turns the pair (a, b) by an angle.
template <typename C>
MSOPS_BOTH void turn(C& a, C& b, C cos, C sin) {
  const C before = a;
  a = before * cos - b * sin;
  b = b * cos + before * sin;
}

}  // namespace msops::rotary
