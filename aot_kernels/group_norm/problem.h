// The formulas of both devices. With groups of n elements, and their sums over a group:
//
//   xhat = (x - mean(x)) r,  r = 1 / sqrt(mean((x - mean(x))^2) + eps),  z = xhat weight_c + bias_c,  y = a(z)
//   dz = dy a'(z),  g = dz weight_c,  dx = r (g - mean(g) - xhat mean(g xhat))
//   dweight_c = sum of dz xhat over samples and positions,  dbias_c = sum of dz
//
// where the activation a is silu, or does nothing. A tensor has `samples` x `channels` x `positions` elements, in this
// order or with the channels last. Each pass has up to three phases, which cut the positions, and on the GPU also long
// groups' channels, into parts:
//
//   1. statistics of x, for each part of a group
//   2. sums of dz xhat and dz, for each part and channel; in the backward pass alone
//   3. y or dx
//
// Nothing is kept from the forward pass but x, which is read anyway.
#pragma once

#include "../common/activations.h"
#include "../common/call.h"
#include "../common/functions.h"
#include "../common/numbers.h"

namespace msops::group_norm {

constexpr int64_t kMostChannels = 256;  // of a part on the GPU; longer groups need a row of `partial` for each so many
constexpr int64_t kParts = 16;          // of a group, for which `partial` has rows in any case
constexpr int64_t kFew = 4096;          // elements, for which another block does not pay if one computes all phases
constexpr int64_t kFewOfPhase = 1024;   // the same for a block that computes one phase

// Statistics are the number of elements, their mean, pivot + rest, and the sum of their squared distances from it. The
// pivot is the mean as it was rounded, so that no digit of a mean far from 0 is lost (see shared/norm/normal.h).
template <typename C>
struct Statistics {
  C count, pivot, rest, squares;

  // Takes the sums of x - pivot and of (x - pivot)^2.
  static MSOPS_BOTH Statistics of(C count, C pivot, C sum, C squares) {
    const C rest = count > 0 ? sum / count : C(0), centred = squares - sum * rest;
    return {count, pivot, rest, centred < 0 ? C(0) : centred};  // rounding may make it negative
  }
  static MSOPS_BOTH Statistics combine(const Statistics& a, const Statistics& b) {
    if (a.count == 0) return b;
    const C count = a.count + b.count, share = b.count / count, distance = b.pivot - a.pivot + (b.rest - a.rest);
    return {count, a.pivot, a.rest + distance * share, a.squares + b.squares + distance * distance * (a.count * share)};
  }
};

// Group normalizes the elements of a group: xhat = (x - pivot) r + shift. `mean` and `along` are mean(g) and
// mean(g xhat).
template <typename C>
struct Group {
  C pivot, r, shift, mean, along;

  // An element that is a group by itself is its mean: xhat is 0 whatever r is, and so is dx, which a large r times the
  // rounding of g - mean(g) would not be.
  static MSOPS_BOTH Group of(const Statistics<C>& all, C eps) {
    const C r = all.count == 1 && eps > 0 ? C(0) : 1 / sqrt(all.squares / all.count + eps);
    return {all.pivot, r, -all.rest * r, 0, 0};
  }
};

// Channel computes the elements of one channel in one group, out of their distances d = x - pivot:
//
//   xhat = d r + shift,  z = d factor + term,  dx = dz factor + d slope + rest
template <typename T>
struct Channel {
  using C = Compute<T>;
  C pivot, r, shift, factor, term, slope = 0, rest = 0;

  Channel() = default;
  MSOPS_BOTH Channel(const Group<C>& group, C weight, C bias)
      : pivot(group.pivot), r(group.r), shift(group.shift), factor(r * weight), term(shift * weight + bias) {
    take_means(group);
  }
  MSOPS_BOTH void take_means(const Group<C>& group) {
    const C along = r * group.along;
    slope = -r * along, rest = -r * group.mean - along * shift;
  }

  template <bool kSilu>
  MSOPS_BOTH C y(C x) const {
    const C z = (x - pivot) * factor + term;
    return kSilu ? Activations<T>::silu(z) : z;
  }
  template <bool kSilu>
  MSOPS_BOTH C dz(C d, C dy) const {
    return kSilu ? Activations<T>::silu_gradient(d * factor + term, dy) : dy;
  }
  template <bool kSilu>
  MSOPS_BOTH C dx(C x, C dy) const {
    const C d = x - pivot;
    return dz<kSilu>(d, dy) * factor + (d * slope + rest);
  }
  // Returns the sum of dz xhat, given those of dz d and dz.
  MSOPS_BOTH C sum_along(C of_products, C of_terms) const { return r * of_products + shift * of_terms; }
};

template <typename T>
struct Problem {
  using C = Compute<T>;
  int64_t samples, channels, positions, groups, of_group;  // of_group: channels of a group
  bool channels_last, silu, backward;
  C eps;
  const T *x, *dy;                  // dy is null and not read in the forward pass
  T* out;                           // y or dx
  OptionalNumbers<T> weight, bias;  // of each channel
  // A row of `partial` for each part has a record of each group, and in the backward pass the sums of dz xhat and of dz
  // of each channel of each sample. A record has Statistics and then, on the GPU, weighted sums; or the Group.
  C* partial;
  int64_t parts;
  Numbers<T> dweight, dbias;  // without data in the forward pass, and where they are not wanted
  static constexpr int64_t kRecord = 6;

  MSOPS_BOTH int64_t columns() const { return samples * (groups * kRecord + (backward ? 2 * channels : 0)); }
  // `group` counts through all samples.
  MSOPS_BOTH C* record(int64_t part, int64_t group) const { return partial + part * columns() + group * kRecord; }
  MSOPS_BOTH C* sums(int64_t part, int64_t sample) const {
    return partial + part * columns() + samples * groups * kRecord + sample * 2 * channels;
  }
  MSOPS_BOTH double of_all() const { return static_cast<double>(of_group) * static_cast<double>(positions); }
};

}  // namespace msops::group_norm
