// The gradients of rms_norm and add_rms_norm.
#pragma once

#include "sums.h"

namespace msops::norm {

// RmsNormSums are the gradients of the parameters, which RmsNorm takes.
struct RmsNormSums {
  Tensor weight, bias;
  NormSums sums;
  Heads heads;

  // Takes the last parameters of a call.
  RmsNormSums(Call& call, const Tensor& x, const Tensor& of_weight, const Tensor& of_bias)
      : weight(of_weight), bias(of_bias), heads(call, x, of_weight, of_bias) {
    sums.weight = call.optional_of("common|float32", "dweight");
    sums.bias = call.optional_of("common|float32", "dbias");
    sums.partial = call.scratch("partial", 2);
    call.require_gradient(sums.weight, weight);
    call.require_gradient(sums.bias, bias);
    sums.check(call, heads.size(), sums_of(heads, bias));
  }

  // Computes dx and the sums. If kAdds, `added` is added to dx.
  template <typename T, bool kAdds>
  void run(Call& call, const Tensor& x, const Tensor& dy, const Tensor& added, const Tensor& dx, double eps,
           double offset) const {
    using C = Compute<T>;
    if (x.size + weight.size + bias.size == 0) return;  // parameters of no heads must not be read
    const Parameters<T, 0> factors(weight, heads.columns, C(1));
    const C eps_number = C(eps), offset_number = weight.dtype ? C(offset) : C(0);
    const std::initializer_list<RowLayout<T>> places{x, dy, added, dx, factors};
    const int64_t rows = rows_of(x, heads.columns);
    if (sums_of(heads, bias) == 1) {
      const NormGradient<T, false, kAdds> body{x, dy, added, dx, factors, eps_number, offset_number};
      sums.run_gradient<T>(call, rows, places, body);
    } else {
      using Body = NormGradient<T, false, kAdds, true>;
      const OfHeads<Body> body{{x, dy, added, dx, factors, eps_number, offset_number}, heads.count};
      sums.run<T, true, Kernels::kFew>(call, rows, places, body, heads.count);
    }
  }

  static Shapes scratch(Call& call, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const Heads heads(call, x, weight, bias);
    return NormSums::scratch(x, heads.size(), sums_of(heads, bias));
  }

 private:
  // Returns how many sums there are for each column: also without a bias, kernels for heads add up two.
  static int sums_of(const Heads& heads, const Tensor& bias) { return heads.count > 1 || bias.dtype ? 2 : 1; }
};

}  // namespace msops::norm
