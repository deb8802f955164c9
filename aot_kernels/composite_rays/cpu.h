// A thread composites a ray in runs of samples, whose exponentials vectorize.
#pragma once

#include <algorithm>

#include "samples.h"

namespace msops::composite_rays {

// Adds up the numbers before each one and itself. Groups of four shorten the chain of sums.
template <typename C>
MSOPS_CPU C add_up(const C* x, int64_t n, C total, C* sums) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const C two = x[i] + x[i + 1], three = two + x[i + 2], four = two + (x[i + 2] + x[i + 3]);
    sums[i] = total + x[i], sums[i + 1] = total + two, sums[i + 2] = total + three, sums[i + 3] = total + four;
    total += four;
  }
  for (; i < n; ++i) sums[i] = total += x[i];
  return total;
}

// A Run holds what neighbouring samples of a ray absorb. The first one that is too dark ends the ray.
template <typename T>
struct Run {
  using C = Compute<T>;
  static constexpr int64_t kMost = 128;
  C depth[kMost], sum[kMost], after[kMost], weight[kMost];  // `after`: what comes through up to and with the sample
  int64_t count = 0;                                        // samples that count

  // Takes `size` samples from `first` on, of which those before have absorbed the depth `before`. Returns their depth.
  MSOPS_CPU C take(const Inputs<T>& in, int64_t first, int64_t size, C before) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) depth[i] = in.depth(first + i);
    const C total = add_up(depth, size, before, sum), begin = Light<T>::through(before), threshold = in.threshold;
    int dark = begin < threshold, negative = 0;
#pragma omp simd reduction(+ : dark, negative)
    for (int64_t i = 0; i < size; ++i) {
      after[i] = Light<T>::through(sum[i]);
      dark += after[i] < threshold;
      negative += depth[i] < 0;
    }
    count = size;
    if (dark > 0) {
      C now = begin;
      for (count = 0; count < size && !(now < threshold); ++count) now = after[count];
    }
    if (negative > 0) {
      for (int64_t i = 0; i < count; ++i) weight[i] = Light<T>::absorbed(depth[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) weight[i] = -Exponential<C>::expm1(-depth[i]);
    }
    if (count > 0) weight[0] *= begin;
#pragma omp simd
    for (int64_t i = 1; i < count; ++i) weight[i] *= after[i - 1];
    return total;
  }
};

template <typename T>
struct ForwardOnCpu : Forward<T> {
  using C = Compute<T>;
  using Task = Forward<T>;
  using Task::clear, Task::in, Task::rgb, Task::depth, Task::opacity, Task::weights;

  MSOPS_CPU void operator()(int64_t i) const {
    in.rays.for_others(i, std::max<int64_t>(1, in.rays.rays), 0, 1, [&](int64_t k) { clear(k); });
    if (i >= in.rays.rays) return;
    const Range range = in.rays.of_ray(i);
    Run<T> run;
    C before = 0, red = 0, green = 0, blue = 0, far = 0, all = 0;
    int64_t first = range.begin;
    for (bool goes_on = true; goes_on && first < range.end;) {
      const int64_t size = std::min(Run<T>::kMost, range.end - first);
      before = run.take(in, first, size, before);
#pragma omp simd reduction(+ : red, green, blue, far, all)
      for (int64_t k = 0; k < run.count; ++k) {
        const int64_t sample = first + k;
        const C weight = run.weight[k];
        red += weight * C(in.rgbs[3 * sample]);
        green += weight * C(in.rgbs[3 * sample + 1]);
        blue += weight * C(in.rgbs[3 * sample + 2]);
        far += weight * C(in.ts[sample]);
        all += weight;
        assign(weights[sample], weight);
      }
      goes_on = run.count == size;
      first += run.count;
    }
    for (; first < range.end; ++first) clear(first);
    assign(rgb[3 * i], red), assign(rgb[3 * i + 1], green), assign(rgb[3 * i + 2], blue);
    assign(depth[i], far);
    assign(opacity[i], all);
  }
};

template <typename T>
struct BackwardOnCpu : Backward<T> {
  using C = Compute<T>;
  using Task = Backward<T>;
  using Task::clear, Task::in, Task::drgb, Task::ddepth, Task::dopacity, Task::dweights, Task::dsigmas, Task::drgbs;

  MSOPS_CPU void operator()(int64_t i) const {
    in.rays.for_others(i, std::max<int64_t>(1, in.rays.rays), 0, 1, [&](int64_t k) { clear(k); });
    if (i >= in.rays.rays) return;
    const Range range = in.rays.of_ray(i);
    const C of_rgb[3] = {C(drgb[3 * i]), C(drgb[3 * i + 1]), C(drgb[3 * i + 2])};
    const C of_depth = C(ddepth[i]), of_opacity = C(dopacity[i]);
    const auto of_weight = [&](int64_t sample) {
      C sum = of_opacity + C(dweights[sample]) + of_depth * C(in.ts[sample]);
      for (int c = 0; c < 3; ++c) sum += of_rgb[c] * C(in.rgbs[3 * sample + c]);
      return sum;
    };
    // A sample's density takes light from all behind it: `behind` is the sum of their weights' gradients.
    Run<T> run;
    C before = 0, behind = 0;
    int64_t end = range.begin;  // of the samples that count
    for (bool goes_on = range.size() > Run<T>::kMost; goes_on && end < range.end;) {
      const int64_t size = std::min(Run<T>::kMost, range.end - end);
      before = run.take(in, end, size, before);
#pragma omp simd reduction(+ : behind)
      for (int64_t k = 0; k < run.count; ++k) behind += run.weight[k] * of_weight(end + k);
      goes_on = run.count == size;
      end += run.count;
    }
    before = 0;
    int64_t first = range.begin;
    for (bool goes_on = true; goes_on && first < range.end;) {
      const int64_t size = std::min(Run<T>::kMost, range.end - first);
      before = run.take(in, first, size, before);
      goes_on = run.count == size;
      C of_weights[Run<T>::kMost], shares[Run<T>::kMost], later[Run<T>::kMost + 1], inside = 0;
      const int64_t last = run.count - 1;
#pragma omp simd reduction(+ : inside)
      for (int64_t k = 0; k < run.count; ++k) {
        of_weights[k] = of_weight(first + k);
        shares[last - k] = run.weight[k] * of_weights[k];
        inside += run.weight[k] * of_weights[k];
      }
      behind = goes_on && first + size < range.end ? behind - inside : C(0);
      later[0] = behind;
      add_up(shares, run.count, behind, later + 1);
#pragma omp simd
      for (int64_t k = 0; k < run.count; ++k) {
        const int64_t sample = first + k;
        assign(dsigmas[sample], C(in.dts[sample]) * (run.after[k] * of_weights[k] - later[last - k]));
        for (int c = 0; c < 3; ++c) assign(drgbs[3 * sample + c], run.weight[k] * of_rgb[c]);
      }
      first += run.count;
    }
    for (; first < range.end; ++first) clear(first);
  }
};

}  // namespace msops::composite_rays
