// Products of tokens with rows of a matrix of numbers or codes on the CPU. Codes of some rows are widened once for all
// tokens; of a single token, in registers, where their groups allow it.
#pragma once

#include "../weight_quant_matmul/cpu.h"
#include "stack.h"

namespace msops::decoder_stack::cpu {

using namespace product;
using weight_quant_matmul::cpu::DotRows;

// sums[r] = the product of row first + r with the token
template <typename T>
struct CodesProduct {
  const Codes<T>& codes;
  int64_t first, count;
  const float* token;
  float* sums;

  MSOPS_CPU void operator()() const {
    weight_quant_matmul::cpu::with_kind(codes, [&](auto bits, auto is_signed) {
      for (int64_t r = 0; r < count; ++r) {
        float sum[1];
        DotRows::multiply<decltype(bits)::value, decltype(is_signed)::value>(codes, first + r, token, sum);
        sums[r] = sum[0];
      }
    });
  }
};

// WeightProduct multiplies up to kBlock rows by all tokens, as TokenProduct does.
template <typename T>
struct WeightProduct {
  using C = Compute<T>;
  const Weights<T>& weights;
  TokenProduct<T> product;
  C* widened;  // a thread's own: (kBlock, columns), if there are codes

  template <typename F>
  MSOPS_CPU void operator()(int64_t first, int64_t n, const F& f) const {
    if (!weights.codes) return product(weights.numbers, first, n, f);
    const Codes<T>& codes = *weights.codes;
    const int64_t row = weights.first + first, deep = weights.columns;
    const bool is_one = product.lanes.tokens == 1;
    if constexpr (std::is_same<C, float>::value) {
      if (is_one && DotRows::takes(codes)) {
        run_apart(CodesProduct<T>{codes, row, n, product.panels, product.sums});
        return f(Tile<C>{first, n, 0, 1, 1, product.sums});
      }
    }
    weight_quant_matmul::cpu::Lines<T> lines(0);
    for (int64_t r = 0; r < n; ++r) lines.widen(codes, row + r, 0, deep, widened + r * deep);
    if (is_one) {
      run_apart(VectorProduct<C>{widened, deep, n, deep, product.panels, product.sums});
      return f(Tile<C>{first, n, 0, 1, 1, product.sums});
    }
    std::fill_n(widened + n * deep, (kRows - n % kRows) % kRows * deep, C(0));
    product.multiply(widened, first, n, f);
  }
};

}  // namespace msops::decoder_stack::cpu
