// Products on the CPU. Codes are widened to int16, of which the processor multiplies and adds pairs, exactly: products
// of int8 that it adds without widening could overflow.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "../shared/product/cpu.h"
#include "problem.h"

namespace msops::int8_matmul::cpu {

#if defined(__AVX2__) && !defined(__CUDA_ARCH__) && !defined(__clang__)
#define MSOPS_HAS_PMADDWD
using SixteenShorts __attribute__((vector_size(32))) = short;
using EightInts __attribute__((vector_size(32))) = int;
#endif

// sums[r] = sum over k of rows[r * deep + k] vector[k], for kRows rows
template <int kRows>
__attribute__((noinline)) void multiply_rows(const int16_t* rows, int64_t deep, const int16_t* vector, int32_t* sums) {
  int64_t done = 0;
  std::fill_n(sums, kRows, 0);
#ifdef MSOPS_HAS_PMADDWD
  EightInts total[kRows] = {};
  for (; done + 16 <= deep; done += 16) {
    SixteenShorts numbers;
    memcpy(&numbers, vector + done, sizeof numbers);
    MSOPS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SixteenShorts row;
      memcpy(&row, rows + r * deep + done, sizeof row);
      total[r] += __builtin_ia32_pmaddwd256(row, numbers);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    int32_t lanes[8];
    memcpy(lanes, &total[r], sizeof lanes);
    for (int lane = 0; lane < 8; ++lane) sums[r] += lanes[lane];
  }
#endif
  for (int r = 0; r < kRows; ++r)
    for (int64_t k = done; k < deep; ++k) sums[r] += rows[r * deep + k] * vector[k];
}

// Threads take blocks of outputs, one after another, and multiply each by all tokens.
struct Blocks {
  static constexpr int64_t kBlock = 16, kRows = 4;  // kRows: share what is read of x
  const Products& p;
  const int16_t* x;
  product::Shares& shares;

  int64_t count() const { return (p.outputs + kBlock - 1) / kBlock; }

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const std::unique_ptr<int16_t[]> rows(new int16_t[kBlock * p.deep]());
    for (int64_t block; shares.take(0, part, parts, count(), block);) {
      const int64_t first = block * kBlock, n = std::min(kBlock, p.outputs - first);
      widen(first, n, rows.get());
      for (int64_t r = 0; r < n; r += kRows)
        for (int64_t t = 0; t < p.tokens; ++t) {
          int32_t sums[kRows];
          multiply_rows<kRows>(rows.get() + r * p.deep, p.deep, x + t * p.deep, sums);
          for (int64_t i = 0; i < std::min(kRows, n - r); ++i) p.store(t, first + r + i, sums[i]);
        }
    }
  }

 private:
  MSOPS_CPU void widen(int64_t first, int64_t n, int16_t* to) const {
    if (p.by_terms) {
      const int8_t* const from = p.weight + first * p.deep;
#pragma omp simd
      for (int64_t i = 0; i < n * p.deep; ++i) to[i] = from[i];
      return;
    }
    for (int64_t k = 0; k < p.deep; ++k)
      for (int64_t r = 0; r < n; ++r) to[r * p.deep + k] = p.weight[k * p.outputs + first + r];
  }
};

inline void multiply(Call& call, const Products& p) {
  const std::unique_ptr<int16_t[]> x(new int16_t[p.tokens * p.deep]);
  std::copy_n(p.x, p.tokens * p.deep, x.get());
  product::Shares shares(1);
  const Blocks blocks{p, x.get(), shares};
  const double work = static_cast<double>(p.outputs) * static_cast<double>(p.deep) * static_cast<double>(p.tokens + 1);
  on_threads(call, blocks.count(), work / 16, blocks);
}

}  // namespace msops::int8_matmul::cpu
