// Samples of rays, from front to back. Sample i of a ray absorbs 1 - e^-(sigma dt) of the light that comes through the
// samples before it, T_i = e^-(sum of their sigma dt). Once T_i is below the threshold, no further sample counts.
#pragma once

#include <cmath>

#include "../common/activations.h"
#include "../common/numbers.h"
#include "../common/parallel.h"

namespace msops::composite_rays {

template <typename T>
struct Light {
  using C = Compute<T>;

  // Returns e^-depth, the part of light that comes through.
  static MSOPS_BOTH C through(C depth) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value) return ex2_approx_ftz(-depth * kLog2E<float>);
    return std::exp(-depth);
#else
    return Exponential<C>::exp_of_any(-depth);
#endif
  }
  // Returns 1 - e^-depth, the part that is absorbed.
  static MSOPS_BOTH C absorbed(C depth) {
#ifdef __CUDA_ARCH__
    if constexpr (std::is_same<T, Half>::value)
      return std::abs(depth) < 0.03125f ? depth - depth * depth * (1.f / 2 - depth * (1.f / 6)) : 1 - through(depth);
    return -std::expm1(-depth);
#else
    const C thin = -Exponential<C>::expm1(-depth);
    return depth < 0 ? 1 - through(depth) : thin;
#endif
  }
};

struct Range {
  int64_t begin, end;

  MSOPS_BOTH int64_t size() const { return end - begin; }
};

struct Rays {
  int64_t rays, samples;
  Integers offsets;  // rays + 1

  MSOPS_BOTH int64_t clipped(int64_t i) const {
    const int64_t offset = offsets[i];
    return offset < 0 ? 0 : offset < samples ? offset : samples;
  }
  // Returns the samples of a ray, of which there are none if the offsets decrease.
  MSOPS_BOTH Range of_ray(int64_t i) const {
    const int64_t begin = clipped(i), end = clipped(i + 1);
    return {begin, begin < end ? end : begin};
  }

  // Calls f(sample) for each stride-th sample, from `first` on, of the i-th of n parts of those that belong to no ray.
  template <typename F>
  MSOPS_BOTH void for_others(int64_t i, int64_t n, int64_t first, int64_t stride, const F& f) const {
    const int64_t head = clipped(0), tail = clipped(rays),
                  others = head + (head < tail ? samples - tail : samples - head);
    const int64_t gap = samples - others, end = part_begin(others, i + 1, n);
    for (int64_t k = part_begin(others, i, n) + first; k < end; k += stride) f(k < head ? k : k + gap);
  }
};

template <typename T>
struct Inputs {
  using C = Compute<T>;
  Rays rays;
  C threshold;
  const T *sigmas, *rgbs, *dts, *ts;

  MSOPS_BOTH C depth(int64_t sample) const { return C(sigmas[sample]) * C(dts[sample]); }
};

// Forward and Backward are what a pass reads and writes, on both devices.
template <typename T>
struct Forward {
  Inputs<T> in;
  T *rgb, *depth, *opacity, *weights;

  MSOPS_BOTH void clear(int64_t sample) const { assign(weights[sample], Compute<T>(0)); }
};

template <typename T>
struct Backward {
  Inputs<T> in;
  const T *drgb, *ddepth, *dopacity, *dweights;
  T *dsigmas, *drgbs;

  MSOPS_BOTH void clear(int64_t sample) const {
    assign(dsigmas[sample], Compute<T>(0));
    for (int c = 0; c < 3; ++c) assign(drgbs[3 * sample + c], Compute<T>(0));
  }
};

}  // namespace msops::composite_rays
