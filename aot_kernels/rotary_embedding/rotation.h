// Rotation says what a call of rotary_embedding turns, for all its kernels.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace msops::rotary {

// Rows are the `width` features of a head at one place in the sequence. They lie without gaps, in the order (batch,
// head, place) or (batch, place, head). The first 2 `turned` features of a row are turned.
struct Rotation {
  static constexpr bool kIsPlain = true;  // each place has its own row of angles, each angle once
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

// A Rotation by tables of any form. A row may have each angle twice, as both features of a pair have it: 2i and 2i + 1,
// or i and i + turned. Positions, if they are given, say which row of the tables a place has.
struct RotationByTables : Rotation {
  static constexpr bool kIsPlain = false;
  int64_t table_rows;  // of a sample, if samples have tables of their own
  bool is_twice;
  const void* positions;  // (place) or (sample, place), or null
  bool positions_of_batch, positions_are_wide;

  MSOPS_BOTH int64_t columns() const { return is_twice ? 2 * turned : turned; }
  MSOPS_BOTH int64_t step() const { return is_twice && interleaved ? 2 : 1; }          // between angles
  MSOPS_BOTH int64_t gap() const { return !is_twice ? 0 : interleaved ? 1 : turned; }  // between copies of an angle

  MSOPS_BOTH int64_t position(int64_t sample, int64_t place) const {
    if (positions == nullptr) return place;
    const int64_t i = positions_of_batch ? sample * length + place : place;
    return positions_are_wide ? static_cast<const int64_t*>(positions)[i] : static_cast<const int32_t*>(positions)[i];
  }
  MSOPS_BOTH bool has_row(int64_t position) const {
    return static_cast<uint64_t>(position) < static_cast<uint64_t>(table_rows);
  }
  MSOPS_BOTH int64_t angles_at(int64_t sample, int64_t position) const {
    return ((table_of_batch ? sample * table_rows : 0) + position) * columns();
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
