// Attention of a single query on the CPU, whose keys and values lie in rows of a cache.
#pragma once

#include "../common/exponential.h"
#include "../shared/product/cpu.h"

namespace msops::decoder_stack::cpu {

using namespace product;

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

}  // namespace msops::decoder_stack::cpu
