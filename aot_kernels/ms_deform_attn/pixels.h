// The gradient of the value: each pixel adds up what the samples around it take of it, in their order. Samples are
// sorted by a pixel that they lie next to (common/scatter.h), so that those around a pixel are the samples of four.
#pragma once

#include "../common/scatter.h"
#include "samples.h"

namespace msops::ms_deform_attn {

// Finds for each sample the first pixel of the level that it lies next to, or -1. A list holds the samples of a head.
template <typename T>
struct FindKeys {
  Task<T> task;
  int32_t* keys;  // (samples, heads, queries, levels, points)

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    using C = Compute<T>;
    const Sizes& s = task.s;
    const Index of_row = static_cast<Index>(s.of_row()), heads = static_cast<Index>(s.heads);
    const Index queries = static_cast<Index>(s.queries), row = i / of_row, k = i - row * of_row;
    const Index query = row / heads, n = query / queries, list = n * heads + (row - query * heads);
    const Level level = task.level(k / s.points);
    const AxisPlace<C> x(task.locations[2 * int64_t{i}], level.width),
        y(task.locations[2 * int64_t{i} + 1], level.height);
    const int64_t right = x.low > 0 ? x.low : 0, down = y.low > 0 ? y.low : 0;
    const bool is_near = x.is_near() && y.is_near() && level.width > 0 && level.height > 0;
    keys[list * int64_t{s.sources()} + (query - n * queries) * of_row + k] =
        is_near ? static_cast<int32_t>(level.begin + down * level.width + right) : -1;
  }
};

// A pixel of a level, and the samples around it.
template <typename T>
struct Pixel {
  using C = Compute<T>;
  const Task<T>& task;
  const Inverse& inverse;
  const Level level;
  int64_t l, n, head, i, j;

  // Calls add(row, factor) for every kShares-th sample around the pixel, from a share on.
  template <int kShares, typename Add>
  MSOPS_BOTH void for_samples(int share, const Add& add) const {
    const Sizes& s = task.s;
    const uint32_t of_row = static_cast<uint32_t>(s.of_row());
    for (int corner = 3; corner >= 0; --corner) {
      const int64_t up = i - corner / 2, left = j - corner % 2;
      if (up < 0 || left < 0) continue;
      const int64_t list = n * s.heads + head, key = level.begin + up * level.width + left;
      const int32_t* const end = inverse.end(list, key);
      for (const int32_t* source = inverse.begin(list, key) + share; source < end; source += kShares) {
        const uint32_t query = static_cast<uint32_t>(*source) / of_row;
        const int64_t k = static_cast<uint32_t>(*source) - query * of_row;
        if (k / s.points != l) continue;  // levels may share pixels
        const int64_t row = (n * s.queries + query) * s.heads + head, at = row * s.of_row() + k;
        add(row, task.weights[at] * AxisPlace<C>::share_of(j, task.locations[2 * at], level.width) *
                     AxisPlace<C>::share_of(i, task.locations[2 * at + 1], level.height));
      }
    }
  }
};

// Calls f(pixel) with the pixel's place in each level that it belongs to.
template <typename T, typename F>
MSOPS_BOTH void for_levels(const Task<T>& task, const Inverse& inverse, int64_t n, int64_t pixel, int64_t head,
                           const F& f) {
  for (int64_t l = 0; l < task.s.levels; ++l) {
    const Level level = task.level(l);
    const int64_t at = pixel - level.begin;
    if (at < 0 || at >= level.height * level.width) continue;
    f(Pixel<T>{task, inverse, level, l, n, head, at / level.width, at % level.width});
  }
}

// Computes the gradient of N features of a pixel and head. kShares lanes take turns along the samples around it.
template <int N, int kShares, typename T>
struct BackwardOfPixel {
  using C = Compute<T>;
  Task<T> task;
  Inverse inverse;
  const T* dout;
  T* dvalue;

  template <typename Index>
  MSOPS_BOTH void operator()(Index index) const {
    const Sizes& s = task.s;
    const Index item = index / kShares, packs = static_cast<Index>(s.features / N), place = item / packs;
    const Index f = (item - place * packs) * N, heads = static_cast<Index>(s.heads), pixels = place / heads;
    const Index n = pixels / static_cast<Index>(s.pixels);
    ShortSum<T> sums[N];
    for_levels(task, inverse, n, pixels - n * static_cast<Index>(s.pixels), place - pixels * heads,
               [&](const Pixel<T>& pixel) {
                 pixel.template for_samples<kShares>(static_cast<int>(index % kShares), [&](int64_t row, C factor) {
                   const Pack<T, N> gradient = load<N>(dout + row * s.features + f);
                   for (int j = 0; j < N; ++j) sums[j] += factor * C(gradient.values[j]);
                 });
               });
    C totals[N];
    for (int j = 0; j < N; ++j) totals[j] = team_sum<kShares>(sums[j].total());
    if (index % kShares == 0) store(dvalue + int64_t{place} * s.features + f, rounded_pack<T>(totals));
  }
};

template <typename T>
struct BackwardOfPixelOnCpu {
  using C = Compute<T>;
  static constexpr int64_t kRun = 64, kTerms = 64;  // features of an item; terms of a plain sum
  BackwardOfPixel<1, 1, T> of;

  MSOPS_CPU void operator()(int64_t place) const {
    const Sizes& s = of.task.s;
    const int64_t pixels = place / s.heads;
    for (int64_t f = 0; f < s.features; f += kRun) {
      const int64_t count = std::min(kRun, s.features - f);
      C sums[kRun] = {}, plain[kRun] = {};
      int64_t terms = 0;
      const auto end_plain = [&] {
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) sums[j] += plain[j], plain[j] = 0;
      };
      for_levels(of.task, of.inverse, pixels / s.pixels, pixels % s.pixels, place % s.heads,
                 [&](const Pixel<T>& pixel) {
                   pixel.template for_samples<1>(0, [&](int64_t row, C factor) {
                     const T* const gradient = of.dout + row * s.features + f;
#pragma omp simd
                     for (int64_t j = 0; j < count; ++j) plain[j] += factor * C(gradient[j]);
                     if (++terms % kTerms == 0) end_plain();
                   });
                 });
      end_plain();
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) assign(of.dvalue[place * s.features + f + j], sums[j]);
    }
  }
};

}  // namespace msops::ms_deform_attn
