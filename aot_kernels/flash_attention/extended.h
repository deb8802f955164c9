// ExtendedAttention is an Attention with what only some calls have: a bias, ALiBi and dropout.
//
//   x_ij += bias_ij - slope |i + shift - j|,   out_i = sum_j w_ij v_j,   w_ij = p_ij kept_ij / (1 - dropout_p)
//
// where kept_ij is 0 with the probability dropout_p, and 1 otherwise. lse and p are those without dropout. In the
// gradient, delta has the same formula, and
//
//   dx_ij = p_ij (kept_ij / (1 - dropout_p) dout_i v_j - delta_i),   dv_j = sum_i w_ij dout_i
//   dbias = the sum of dx_ij over all samples, heads, queries and keys that have the element in common
//
// Where a bias has moved all logits of a query far from 0, lse_i keeps few digits of the sum, or none: all keys of a
// padded row may have -1e9, beside which a float loses log 1000. Then the gradient needs what lse_i lacks,
//
//   rest_i = log sum_j e^(x_ij - lse_i),   p_ij = e^(x_ij - lse_i - rest_i)
//
// and rest_i = 0 elsewhere.
//
// Kernels take the type of their problem as a parameter, so that calls without any of these have neither the arguments
// nor the instructions for them.
#pragma once

#include <cmath>

#include "../common/philox.h"
#include "problem.h"

namespace msops::flash_attention {

// Floats are the numbers of a tensor of T or, beside another T, of float32; or there is no tensor.
template <typename T>
struct Floats {
  const T* narrow;
  const float* wide;

  MSOPS_BOTH explicit operator bool() const { return narrow || wide; }
  MSOPS_BOTH Compute<T> operator[](int64_t at) const { return wide ? Compute<T>(wide[at]) : Compute<T>(narrow[at]); }
};

template <typename T>
struct ExtendedAttention : Attention<T> {
  using C = Compute<T>;
  static constexpr bool kIsExtended = true;

  Floats<T> bias;
  int64_t bias_batch, bias_head, bias_query, bias_key;  // the strides of bias; 0 along axes that it does not have
  Floats<T> slopes;                                     // rows of heads
  int64_t slopes_batch;                                 // the stride of slopes; 0 if all samples have the same

  const int64_t* seed;  // of rank 0, or null: nothing is dropped
  uint64_t threshold;   // a weight is kept if its random word is at least so large
  C kept;               // 1 / (1 - dropout_p)

  // Returns whether the rest of a query must be computed: lse is off by up to 2^-24 of itself.
  static MSOPS_BOTH bool is_far(C lse) { return std::abs(lse) > 64 && std::abs(lse) < C(HUGE_VAL); }

  bool is_extended() const { return bias || slopes || seed; }
  MSOPS_BOTH bool adds_to_logits() const { return bias || slopes; }

  MSOPS_BOTH C bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return bias[b * bias_batch + h * bias_head + i * bias_query + j * bias_key];
  }
  MSOPS_BOTH C slope(int64_t b, int64_t h) const { return slopes[b * slopes_batch + h]; }

  // Returns what is added to the logit of query i and key j.
  MSOPS_BOTH C addend(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    C sum = bias ? bias_at(b, h, i, j) : C(0);
    if (slopes) {
      const int64_t distance = i + s.shift() - j;
      sum -= slope(b, h) * C(distance < 0 ? -distance : distance);
    }
    return sum;
  }

  // Returns the random words of four keys, of which the first is key 4 `block`. They depend on these numbers and on the
  // seed alone, so that each kernel, whatever its tiles are, draws the same.
  MSOPS_BOTH Words words(int64_t b, int64_t h, int64_t i, int64_t block) const {
    return words(static_cast<uint64_t>(*seed), b, h, i, block);
  }
  static MSOPS_BOTH Words words(uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t block) {
    const auto pair = [](int64_t high, int64_t low) { return static_cast<uint64_t>(high) << 32 | low; };
    return philox(seed, pair(i, block), pair(b, h));
  }
};

// KeyBias is a bias that is the same for all queries of a head. Kernels for tensor cores of sm_90a take it beside an
// Attention.
struct KeyBias {
  Floats<Half> values;
  int64_t batch, head, key;  // strides

  // Returns whether an ExtendedAttention is an Attention with such a bias, and has no softcap and no mask.
  static bool is_all_of(const ExtendedAttention<Half>& a) {
    return a.bias && a.bias_query == 0 && !a.slopes && !a.seed && !a.mask && a.softcap == 0;
  }
  static KeyBias of(const ExtendedAttention<Half>& a) { return {a.bias, a.bias_batch, a.bias_head, a.bias_key}; }

  MSOPS_BOTH int64_t first(int64_t b, int64_t h) const { return b * batch + h * head; }
  MSOPS_BOTH float operator[](int64_t at) const { return values[at]; }
};

// BiasGradient is the gradient of the bias, which has the bias's shape. An axis has the length 1 where all of the
// problem's have an element in common.
template <typename T>
struct BiasGradient {
  using C = Compute<T>;
  T* data;      // or null
  float* wide;  // of a bias of float32 beside another T, or null
  int64_t batch, heads, queries, keys;

  // Returns which of `all` numbers of an axis have element `at` of the bias's axis, of length `length`.
  static MSOPS_BOTH Span sharing(int64_t length, int64_t all, int64_t at) {
    return length == all ? Span{at, at + 1} : Span{0, all};
  }
  // Returns which of `all` numbers of an axis share the elements from `begin` on, of which there are up to `tile`.
  static MSOPS_BOTH Span sharing(int64_t length, int64_t all, int64_t begin, int64_t tile) {
    return length == all ? Span{begin, least(begin + tile, all)} : Span{0, all};
  }

  MSOPS_BOTH void store(int64_t b, int64_t h, int64_t i, int64_t j, C value) const {
    const int64_t at = ((b * heads + h) * queries + i) * keys + j;
    if (wide)
      wide[at] = static_cast<float>(value);
    else
      assign(data[at], value);
  }
};

}  // namespace msops::flash_attention
