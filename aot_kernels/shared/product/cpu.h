// Products with the stack's matrices on the CPU. Tokens are lanes: a panel of P tokens has a row of P numbers for each
// feature, so that the product of a panel with a matrix is a panel again, and all that is done to features by
// themselves runs along vectors. P is a multiple of a vector's width, up to kMostLanes; a single token has P = 1, and
// then vectors run along the columns of the matrix.
#pragma once

#include <algorithm>

#include "../common/dtype.h"
#include "../common/exponential.h"
#include "../common/parallel.h"

namespace msops::decoder_stack::cpu {

template <typename C>
constexpr int kWidth = 32 / sizeof(C);  // of a vector
constexpr int kVectors = 3;             // twelve vectors of sums hide the latency of multiply-add
template <typename C>
constexpr int kMostLanes = kVectors * kWidth<C>;
constexpr int kRows = 4;  // that share what is read of a panel

// Returns how many lanes the panels of so many tokens have.
template <typename C>
int64_t lanes_for(int64_t tokens) {
  if (tokens <= 1) return 1;
  return std::min<int64_t>(kMostLanes<C>, (tokens + kWidth<C> - 1) / kWidth<C> * kWidth<C>);
}

// Calls f in a function of its own, which is compiled for the instructions of CPUs since about 2013 if this one has
// them. In a function with too much else, GCC would not keep sums in registers.
template <typename F>
__attribute__((noinline)) void run_apart_plain(const F& f) {
  f();
}
#ifdef __x86_64__
template <typename F>
__attribute__((noinline, target("avx2,fma"))) void run_apart_avx2(const F& f) {
  f();
}
#endif
template <typename F>
MSOPS_CPU void run_apart(const F& f) {
#ifdef __x86_64__
  if (has_avx2()) return run_apart_avx2(f);
#endif
  run_apart_plain(f);
}

// sums[r][l] = sum over k of rows[r * stride + k] panel[k * kLanes + l]
template <int kCount, int kV, typename C>
MSOPS_CPU void multiply_panel(const C* rows, int64_t stride, int64_t depth, const C* panel, C* sums) {
  constexpr int kW = kWidth<C>, kLanes = kV * kW;
  C total[kCount][kV][kW] = {};
  for (int64_t k = 0; k < depth; ++k)
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kV; ++v)
#pragma omp simd
        for (int w = 0; w < kW; ++w) total[r][v][w] += rows[r * stride + k] * panel[k * kLanes + v * kW + w];
  for (int r = 0; r < kCount; ++r)
    for (int v = 0; v < kV; ++v)
#pragma omp simd
      for (int w = 0; w < kW; ++w) sums[r * kLanes + v * kW + w] = total[r][v][w];
}

// sums[r] = sum over k of rows[r * stride + k] vector[k], for a matrix of any type
template <int kCount, typename T, typename C = Compute<T>>
MSOPS_CPU void multiply_vector(const T* rows, int64_t stride, int64_t depth, const C* vector, C* sums) {
  constexpr int kW = kWidth<C>, kV = 2;  // sums for even and odd vectors
  C total[kCount][kV][kW] = {}, rest[kCount] = {};
  int64_t k = 0;
  for (; k + kV * kW <= depth; k += kV * kW)
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kV; ++v)
#pragma omp simd
        for (int w = 0; w < kW; ++w) total[r][v][w] += C(rows[r * stride + k + v * kW + w]) * vector[k + v * kW + w];
  for (; k < depth; ++k)
    for (int r = 0; r < kCount; ++r) rest[r] += C(rows[r * stride + k]) * vector[k];
  for (int r = 0; r < kCount; ++r) {
    C sum = rest[r];
    for (int w = 0; w < kW; ++w) sum += total[r][0][w] + total[r][1][w];
    sums[r] = sum;
  }
}

template <int kCount, int kV, typename C>
struct PanelProduct {
  const C* rows;
  int64_t stride, depth;
  const C* panel;
  C* sums;

  MSOPS_CPU void operator()() const {
    const PanelProduct p = *this;
    multiply_panel<kCount, kV>(p.rows, p.stride, p.depth, p.panel, p.sums);
  }
};

// Processors do not foresee which rows are read if there is something else between them. These are fetched so many rows
// ahead; addresses after the last row do no harm.
constexpr int kAhead = 16;
template <typename T>
MSOPS_CPU void fetch(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}

// sums[r] = sum over k of rows[r * stride + k] vector[k]
template <typename T>
struct VectorProduct {
  const T* rows;
  int64_t stride, count, depth;
  const Compute<T>* vector;
  Compute<T>* sums;

  MSOPS_CPU void operator()() const {
    const VectorProduct p = *this;
    int64_t r = 0;
    for (; r + kRows <= p.count; r += kRows) {
      if (p.stride > p.depth)
        for (int i = 0; i < kRows; ++i) fetch(p.rows + (r + kAhead + i) * p.stride, p.depth);
      multiply_vector<kRows>(p.rows + r * p.stride, p.stride, p.depth, p.vector, p.sums + r);
    }
    for (; r < p.count; ++r) multiply_vector<1>(p.rows + r * p.stride, p.stride, p.depth, p.vector, p.sums + r);
  }
};

// totals[d] += sum over r of factors[r] rows[r * stride + d]
template <typename T>
struct WeightedSum {
  using C = Compute<T>;
  const T* rows;
  int64_t stride, count, depth;
  const C* factors;
  C* totals;

  MSOPS_CPU void operator()() const {
    const WeightedSum s = *this;
    constexpr int kW = kWidth<C>, kMost = 8 * kW;  // sums of so many columns stay in registers
    int64_t d = 0;
    for (; d + kMost <= s.depth; d += kMost) s.add<kMost>(d);
    for (; d + kW <= s.depth; d += kW) s.add<kW>(d);
    for (; d < s.depth; ++d) s.add<1>(d);
  }

 private:
  template <int kColumns>
  MSOPS_CPU void add(int64_t d) const {
    C sums[kColumns] = {};
    for (int64_t r = 0; r < count; ++r) {
      if (stride > depth) fetch(rows + (r + kAhead) * stride + d, kColumns);
#pragma omp simd
      for (int c = 0; c < kColumns; ++c) sums[c] += factors[r] * C(rows[r * stride + d + c]);
    }
    for (int c = 0; c < kColumns; ++c) totals[d + c] += sums[c];
  }
};

// Turns n scores into e^(score - the largest one), and `sum` into the sum of these.
template <typename C>
struct Softmax {
  C* scores;
  int64_t n;
  C* sum;

  MSOPS_CPU void operator()() const {
    C* const x = scores;
    const int64_t count = n;
    C max = C(-HUGE_VAL), total = 0;
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < count; ++i) max = x[i] > max ? x[i] : max;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) {
      const C weight = Exponential<C>::exp(x[i] - max);
      x[i] = weight;
      total += weight;
    }
    *sum = total;
  }
};

template <int kCount, typename C>
MSOPS_CPU void multiply_lanes(int64_t lanes, const C* rows, int64_t stride, int64_t depth, const C* panel, C* sums) {
  switch (lanes / kWidth<C>) {
    case 1:
      return run_apart(PanelProduct<kCount, 1, C>{rows, stride, depth, panel, sums});
    case 2:
      return run_apart(PanelProduct<kCount, 2, C>{rows, stride, depth, panel, sums});
    default:
      return run_apart(PanelProduct<kCount, 3, C>{rows, stride, depth, panel, sums});
  }
}

}  // namespace msops::decoder_stack::cpu
