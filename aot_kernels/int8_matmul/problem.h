// The product that int8_matmul computes, for both devices.
#pragma once

#include <cmath>
#include <cstring>

#include "../common/call.h"

namespace msops::int8_matmul {

// out (tokens, outputs): the sums of x (tokens, deep) times the weight (outputs, deep) or, if it is not by terms,
// (deep, outputs), with scales and a bias.
struct Products {
  int64_t tokens, deep, outputs;
  const int8_t *x, *weight;
  bool by_terms;
  const float *scale, *x_scale;  // (outputs,) and, or null, (tokens,)
  const int32_t* whole_bias;     // (outputs,), or null: added before the scales
  const float* bias;             // (outputs,), or null: added after them
  void* out;
  bool is_half;  // or float

  // OfOutput is what all results of an output take: its scale, and the bits of its bias, or of 0.
  struct OfOutput {
    float scale;
    int32_t bias;
  };
  MSOPS_BOTH OfOutput of_output(int64_t output) const {
    OfOutput of{scale[output], whole_bias ? whole_bias[output] : 0};
    if (bias) memcpy(&of.bias, bias + output, sizeof of.bias);
    return of;
  }
  MSOPS_BOTH float scale_of_row(int64_t token) const { return x_scale ? x_scale[token] : 1.f; }

  // Return a result before it is rounded. It has the same bits on both devices: no operation is left to be fused.
  template <bool kHasWholeBias>
  static MSOPS_BOTH float result(int32_t sum, const OfOutput& of, float of_row) {
    if constexpr (kHasWholeBias) return std::fma(static_cast<float>(int64_t{sum} + of.bias) * of.scale, of_row, 0.f);
    float bias;
    memcpy(&bias, &of.bias, sizeof bias);
    return std::fma(static_cast<float>(sum) * of.scale, of_row, bias);
  }
  MSOPS_BOTH float result(int64_t token, int64_t output, int32_t sum) const {
    const float of_row = scale_of_row(token);
    return whole_bias ? result<true>(sum, {scale[output], whole_bias[output]}, of_row)
                      : result<false>(sum, of_output(output), of_row);
  }
  MSOPS_BOTH void store(int64_t token, int64_t output, int32_t sum) const {
    const int64_t at = token * outputs + output;
    if (is_half) {
      static_cast<Half*>(out)[at] = Half(result(token, output, sum));
    } else {
      static_cast<float*>(out)[at] = result(token, output, sum);
    }
  }
  MSOPS_BOTH int8_t weight_at(int64_t output, int64_t term) const {
    return weight[by_terms ? output * deep + term : term * outputs + output];
  }
  // Returns whether rows of x and of the weight begin at multiples of so many bytes.
  bool x_has_packs(uintptr_t bytes) const { return begin_at(x, deep, bytes); }
  bool weight_has_packs(uintptr_t bytes) const { return begin_at(weight, by_terms ? deep : outputs, bytes); }

 private:
  static bool begin_at(const int8_t* first, int64_t length, uintptr_t bytes) {
    return (reinterpret_cast<uintptr_t>(first) | static_cast<uintptr_t>(length)) % bytes == 0;
  }
};

}  // namespace msops::int8_matmul
