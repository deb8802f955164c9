// On the CPU, a tile of some steps and the steps before them are converted to a buffer in the first cache, out of which
// vectors of results are summed up.
#pragma once

#include <algorithm>

#include "../common/parallel.h"
#include "../common/sum.h"
#include "wide.h"

namespace msops::causal_conv1d::cpu {

constexpr int64_t kTile = 1024, kTapsAtOnce = 256, kRoom = kTile + kTapsAtOnce;

template <typename S, typename C>
MSOPS_CPU void read(const Signal<S>& from, int64_t first, int64_t count, C* to) {
  const int64_t begin = std::clamp<int64_t>(-first, 0, count);
  const int64_t end = std::clamp<int64_t>(from.length - first, begin, count);
  for (int64_t i = 0; i < begin; ++i) to[i] = from[first + i];
  if (begin < end) widen(from.body + first + begin, to + begin, end - begin);
  for (int64_t i = end; i < count; ++i) to[i] = 0;
}

// result[i] += sum over k < kTaps of taps[k] in[i + k]
template <int kTaps, typename C>
MSOPS_CPU void add_taps(const C* in, int64_t length, const C* taps, C* result) {
  C tap[kTaps];
  for (int k = 0; k < kTaps; ++k) tap[k] = taps[k];
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) {
    C sum = result[i];
    for (int k = 0; k < kTaps; ++k) sum += tap[k] * in[i + k];
    result[i] = sum;
  }
}

// result[i] = sum over k < count of taps[k] in[i + k], added to result[i] if `adds`
template <typename C>
MSOPS_CPU void correlate(const C* in, int64_t length, const C* taps, int64_t count, bool adds, C* result) {
  if (!adds) std::fill(result, result + length, C(0));
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) add_taps<4>(in + k, length, taps + k, result);
  for (; k < count; ++k) add_taps<1>(in + k, length, taps + k, result);
}

// Adds up neighbouring sums in pairs.
template <typename C, int kCount>
MSOPS_CPU C total_of(C (&sums)[kCount]) {
  for (int half = kCount / 2; half > 0; half /= 2)
    for (int w = 0; w < half; ++w) sums[w] += sums[w + half];
  return sums[0];
}

// sums[k] += sum of g[i] in[i + k] for k < kTaps
template <int kTaps, typename C, typename S>
MSOPS_CPU void add_products(const C* g, const C* in, int64_t length, S* sums) {
  constexpr int kLanes = 64 / sizeof(C);  // neighbours that are summed up by themselves
  C lanes[kTaps][kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes)
    for (int k = 0; k < kTaps; ++k)
#pragma omp simd
      for (int w = 0; w < kLanes; ++w) lanes[k][w] += g[i + w] * in[i + k + w];
  for (int w = 0; i + w < length; ++w)
    for (int k = 0; k < kTaps; ++k) lanes[k][w] += g[i + w] * in[i + k + w];
  for (int k = 0; k < kTaps; ++k) sums[k] += total_of(lanes[k]);
}

// sums[k] += sum of g[i] in[i + k] for k < count
template <typename C, typename S>
MSOPS_CPU void add_products(const C* g, const C* in, int64_t length, int64_t count, S* sums) {
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) add_products<4>(g, in + k, length, sums + k);
  for (; k < count; ++k) add_products<1>(g, in + k, length, sums + k);
}

// These store what a tile's sums become, from the row's result `first` on.
template <typename T>
MSOPS_CPU void put(const Convolved<T>& row, int64_t first, int64_t count, const Compute<T>* sums) {
  T* const out = row.p.out + row.row * row.p.s.length + first;
  const Compute<T> bias = row.bias();
  if (row.p.is_silu) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) assign(out[i], Activations<T>::silu(sums[i] + bias));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) assign(out[i], sums[i] + bias);
  }
}

template <typename T>
MSOPS_CPU void put(const OutputGradient<T>& row, int64_t first, int64_t count, const Compute<T>* sums, Compute<T>* g) {
  const T* const dout = row.p.dout + row.row * row.p.s.length + first;
  const Compute<T> bias = row.bias();
  if (row.p.is_silu) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) g[i] = Activations<T>::silu_gradient(sums[i] + bias, Compute<T>(dout[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) g[i] = Compute<T>(dout[i]);
  }
}

template <typename T>
MSOPS_CPU void put(const OutputGradient<T>& row, int64_t first, int64_t count, const Compute<T>* sums) {
  put(row, first, count, sums, row.p.gradients + row.row * row.p.s.length + first);
}

// The states' gradients take the first steps and the last ones. It is inlined for rows of few steps.
template <typename T>
MSOPS_CPU __attribute__((always_inline)) void put(const InputGradient<T>& row, int64_t first, int64_t count,
                                                  const Compute<T>* sums) {
  const int64_t history = row.p.s.history(), t = first - history;
  const int64_t begin = std::clamp<int64_t>(-t, 0, count);
  const int64_t end = std::clamp<int64_t>(row.p.s.length - history - t, begin, count);
  for (int64_t i = 0; i < begin; ++i) row.put(first + i, sums[i]);
  T* const dx = row.p.dx + row.row * row.p.s.length;
  if (begin < end) narrow(sums + begin, dx + t + begin, end - begin);
  for (int64_t i = end; i < count; ++i) row.put(first + i, sums[i]);
}

// An item is a tile of a row.
template <typename Correlation, typename T>
struct Tiles {
  const Problem<T>& p;
  int64_t tiles;

  MSOPS_CPU void operator()(int64_t item) const {
    const Correlation row(p, item / tiles);
    const int64_t first = item % tiles * kTile, count = std::min(kTile, row.outputs - first);
    Compute<T> sums[kTile], in[kRoom], taps[kTapsAtOnce];
    for (int64_t tap = 0; tap < row.taps; tap += kTapsAtOnce) {
      const int64_t some = std::min(kTapsAtOnce, row.taps - tap);
      for (int64_t k = 0; k < some; ++k) taps[k] = row.tap(tap + k);
      read(row.signal(), first + tap - p.s.history(), count + some - 1, in);
      correlate(in, count, taps, some, tap > 0, sums);
    }
    put(row, first, count, sums);
  }
};

template <typename Correlation, typename T>
void correlate_on_cpu(Call& call, const Problem<T>& p, int64_t outputs) {
  const int64_t tiles = (outputs + kTile - 1) / kTile;
  on_cpu(call, p.s.rows() * tiles, Tiles<Correlation, T>{p, tiles},
         static_cast<double>(std::min(kTile, outputs)) * (4 + static_cast<double>(p.s.width) / 4));
}

// Rows of few steps are computed side by side. An item is a run of them.
template <typename T>
struct ShortRows {
  static constexpr int kRun = 64, kMostSteps = 8;
  using C = Compute<T>;
  const Problem<T>& p;

  static bool fit(const Sizes& s) { return 0 < s.length && s.length <= kMostSteps && s.width <= kFew; }

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t first = item * kRun, history = p.s.history();
    const int count = static_cast<int>(std::min<int64_t>(kRun, p.s.rows() - first));
    C in[kFew - 1 + kMostSteps][kRun], taps[kFew][kRun], bias[kRun], sums[kRun];
    for (int r = 0; r < count; ++r) {
      const Convolved<T> row(p, first + r);
      const Signal<T> signal = row.signal();
      for (int64_t t = -history; t < p.s.length; ++t) in[history + t][r] = signal[t];
      for (int64_t k = 0; k <= history; ++k) taps[k][r] = row.tap(k);
      bias[r] = row.bias();
    }
    for (int64_t t = 0; t < p.s.length; ++t) {
      std::fill(sums, sums + count, C(0));
      for (int64_t k = 0; k <= history; ++k)
#pragma omp simd
        for (int r = 0; r < count; ++r) sums[r] += taps[k][r] * in[t + k][r];
#pragma omp simd
      for (int r = 0; r < count; ++r) sums[r] = p.activated(sums[r] + bias[r]);
      for (int r = 0; r < count; ++r) assign(p.out[(first + r) * p.s.length + t], sums[r]);
    }
  }
};

// A Part computes the gradients of a part of a row, for up to kFew taps.
template <typename T>
struct Part {
  using C = Compute<T>;
  const Problem<T>& p;
  OutputGradient<T> forward;
  InputGradient<T> backward;
  int64_t history;
  C taps[kFew], back[kFew];
  C in[kRoom], g[kRoom], results[kTile];  // g[history + i] is g of the tile's i-th step
  Sum<C> sums[kFew], bias;

  MSOPS_CPU Part(const Problem<T>& problem, int64_t row)
      : p(problem), forward(problem, row), backward(problem, row), history(problem.s.history()) {
    for (int64_t k = 0; k <= history; ++k) taps[k] = forward.tap(k), back[k] = backward.tap(k);
  }
  MSOPS_CPU void compute_g(int64_t t, int64_t count) {
    read(forward.signal(), t - history, count + history, in);
    if (p.is_silu) correlate(in, count, taps, p.s.width, false, results);
    put(forward, t, count, results, g + history);
  }
  // Computes dx of the steps `history` before those of the tile, for which all of g is there.
  MSOPS_CPU void compute_dx(int64_t t, int64_t count) {
    correlate(g, count, back, p.s.width, false, results);
    put(backward, t, count, results);
  }
  MSOPS_CPU void run(int64_t begin, int64_t end) {
    const int64_t earlier = std::min(history, begin);
    compute_g(begin - earlier, earlier);
    std::copy(g + history, g + history + earlier, g + history - earlier);
    std::fill(g, g + history - earlier, C(0));
    for (int64_t t = begin; t < end; t += kTile) {
      const int64_t count = std::min(kTile, end - t);
      compute_g(t, count);
      add_products(g + history, in, count, p.s.width, sums);
      bias += sum_of_run(g + history, count);
      compute_dx(t, count);
      std::copy(g + count, g + count + history, g);
    }
  }
  MSOPS_CPU void finish() {
    std::fill(g + history, g + 2 * history, C(0));
    compute_dx(p.s.length, history);
  }
};

template <typename T>
struct Parts {
  const Problem<T>& p;

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t row = item / p.parts, index = item % p.parts, channel = row % p.s.channels;
    Part<T> part(p, row);
    part.run(part_begin(p.s.length, index, p.parts), part_begin(p.s.length, index + 1, p.parts));
    if (index + 1 == p.parts) part.finish();
    Compute<T>* const to = p.sums(index, row / p.s.channels);
    for (int64_t k = 0; k < p.s.width; ++k) to[channel * p.s.width + k] = part.sums[k].total();
    to[p.s.channels * p.s.width + channel] = part.bias.total();
  }
};

// Sums up the gradients of the taps of a part of a row, for any number of taps.
template <typename T>
struct Sums {
  using C = Compute<T>;
  const Problem<T>& p;

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t row = item / p.parts, part = item % p.parts, channel = row % p.s.channels;
    const int64_t end = part_begin(p.s.length, part + 1, p.parts);
    const C* const g = p.gradients + row * p.s.length;
    C* const to = p.sums(part, row / p.s.channels);
    C* const of_taps = to + channel * p.s.width;
    C in[kRoom];
    Sum<C> bias;
    std::fill(of_taps, of_taps + p.s.width, C(0));
    for (int64_t t = part_begin(p.s.length, part, p.parts); t < end; t += kTile) {
      const int64_t count = std::min(kTile, end - t);
      for (int64_t tap = 0; tap < p.s.width; tap += kTapsAtOnce) {
        const int64_t some = std::min(kTapsAtOnce, p.s.width - tap);
        read(p.signal(row), t + tap - p.s.history(), count + some - 1, in);
        add_products(g + t, in, count, some, of_taps + tap);
      }
      bias += sum_of_run(g + t, count);
    }
    to[p.s.channels * p.s.width + channel] = bias.total();
  }
};

template <typename T>
struct States {
  const Problem<T>& p;

  MSOPS_CPU void operator()(int64_t row) const {
    for (int64_t i = 0; i < p.s.history(); ++i) p.put_state(row, i);
  }
};

template <typename T>
void convolve(Call& call, const Problem<T>& p, bool backward) {
  const double length = static_cast<double>(p.s.length), width = static_cast<double>(p.s.width);
  if (!backward) {
    using Short = ShortRows<T>;
    if (Short::fit(p.s)) {
      on_cpu(call, (p.s.rows() + Short::kRun - 1) / Short::kRun, Short{p}, Short::kRun * (32 + length * width));
    } else {
      correlate_on_cpu<Convolved<T>>(call, p, p.s.length);
    }
    return on_cpu(call, p.s.history() > 0 ? p.s.rows() : 0, States<T>{p}, width);
  }
  const int64_t items = p.s.rows() * p.parts;
  const double of_part = length / static_cast<double>(p.parts);
  if (p.s.width <= kFew) return on_cpu(call, items, Parts<T>{p}, (of_part + 64) * (8 + width / 2));
  correlate_on_cpu<OutputGradient<T>>(call, p, p.s.length);
  correlate_on_cpu<InputGradient<T>>(call, p, p.s.length + p.s.history());
  on_cpu(call, items, Sums<T>{p}, of_part * (2 + width / 4));
}

}  // namespace msops::causal_conv1d::cpu
