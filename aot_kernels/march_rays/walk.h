// A walk along a ray o + t d takes steps of one length from `near` on while t < far, and samples the steps whose cell
// of a grid is occupied. Both devices compute t and the cell by the same roundings, so that they find the same samples.
#pragma once

#include <cstdint>
#include <limits>

#include "../shared/rays/box.h"

namespace msops::rays {

template <typename T>
struct Walks {
  using C = Compute<T>;
  // A ray whose far end is too far for its steps has so many of them; float32 counts no further.
  static constexpr int64_t kMostSteps = int64_t{1} << 24;

  int64_t rays, cells;  // `cells` along each axis of the grid
  C low[3], scale[3];   // the cell of a point x is (x - low) scale
  C step;
  const T *origins, *directions, *near, *far, *jitter;  // jitter may be null
  const bool* occupancy;
};

template <typename T>
struct Walk {
  using C = Compute<T>;

  MSOPS_BOTH Walk(const Walks<T>& all, int64_t i)
      : all_(all), ray_(Ray<C>::at(all.origins, all.directions, i)), near_(C(all.near[i])), far_(C(all.far[i])) {
    const C jitter = all.jitter ? C(all.jitter[i]) : C(0.5);
    jitter_ = jitter > 0 ? (jitter < 1 ? jitter : C(1)) : C(0);
    constexpr C kMost = std::numeric_limits<C>::max();
    if (!(-kMost <= near_ && far_ <= kMost) || all.cells == 0) far_ = near_ = 0;
  }

  // Returns t of a step.
  MSOPS_BOTH C at(int64_t k) const { return multiply_add(C(k) + jitter_, all_.step, near_); }

  MSOPS_BOTH bool has_step(int64_t k) const { return k < Walks<T>::kMostSteps && at(k) < far_; }

  // Returns the place of t along an axis, in cells.
  MSOPS_BOTH C place(int axis, C t) const {
    return (multiply_add(t, ray_.direction[axis], ray_.origin[axis]) - all_.low[axis]) * all_.scale[axis];
  }
  MSOPS_BOTH int64_t cell(C t) const {
    int64_t index = 0;
    for (int axis = 0; axis < 3; ++axis) {
      const C place = this->place(axis, t), last = C(all_.cells - 1);
      index = index * all_.cells + static_cast<int64_t>(place > 0 ? (place < last ? place : last) : C(0));
    }
    return index;
  }
  MSOPS_BOTH bool is_occupied(int64_t cell) const { return all_.occupancy[cell]; }
  MSOPS_BOTH bool is_sample(int64_t k) const { return has_step(k) && is_occupied(cell(at(k))); }

  // Calls f(k, n) for runs of samples, the steps k to k + n - 1, in order. Places along an axis never turn back, not
  // even after rounding: if two steps are in one cell, so are those between them.
  template <typename F>
  MSOPS_CPU void for_runs(const F& f) const {
    for (int64_t k = 0, last; has_step(k); k = last + 1) {
      const int64_t here = cell(at(k));
      last = k + steps_inside(at(k));
      while (last > k && !(has_step(last) && cell(at(last)) == here)) last = k + (last - k) / 2;
      if (is_occupied(here)) f(k, last - k + 1);
    }
  }

 private:
  static MSOPS_BOTH float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static MSOPS_BOTH double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

  // Returns how many further steps are in the cell of t, up to rounding. The outermost cells have no end outwards.
  MSOPS_CPU int64_t steps_inside(C t) const {
    C nearest = (far_ - t) / all_.step;
    for (int axis = 0; axis < 3; ++axis) {
      const C place = this->place(axis, t), last = C(all_.cells - 1);
      const C begin = place > 0 ? (place < last ? C(static_cast<int64_t>(place)) : last) : C(0);
      const C slope = ray_.direction[axis] * all_.scale[axis] * all_.step;
      const bool has_end = slope > 0 ? begin < last : slope < 0 && begin > 0;
      const C steps = (slope > 0 ? begin + 1 - place : begin - place) / slope;
      if (has_end && steps < nearest) nearest = steps;
    }
    constexpr C kMost = C(Walks<T>::kMostSteps);
    return nearest > 0 ? static_cast<int64_t>(nearest < kMost ? nearest : kMost) : 0;
  }

  const Walks<T>& all_;
  Ray<C> ray_;
  C near_, far_, jitter_;
};

}  // namespace msops::rays
