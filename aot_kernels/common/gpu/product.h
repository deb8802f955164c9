// Tensor cores multiply for 16 x 8 sums at once, at a chosen precision: float16; float32 rounded to TF32, if that is
// allowed; else float32 as two TF32 numbers, upper and lower. Of the four products of these, the smallest is left out,
// about 2^-22 of the whole.
#pragma once

#include "mma.h"

namespace msops {

enum class Product { kHalf, kTf32, kFloat };

// A Word is two float16 or one float32 as an operand. For TF32 it holds the upper part, for kFloat also the lower part.
template <Product kProduct>
struct Word {
  uint32_t upper, lower;

  __device__ Word() {}
  __device__ explicit Word(uint32_t bits) : upper(bits), lower(0) {
    if constexpr (kProduct == Product::kTf32) upper = cvt_rna_tf32(__uint_as_float(bits));
    if constexpr (kProduct == Product::kFloat) {
      // Some NaN become 0 in the upper part; the lower is NaN then. Tensor cores leave out the lower's last 13 bits.
      upper = (bits + 0x1000) & 0xffffe000;
      lower = __float_as_uint(__uint_as_float(bits) - __uint_as_float(upper));
    }
  }
};

// Adds one product of operands that have one part each.
template <Product kProduct>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kProduct == Product::kHalf) {
    mma_m16n8k16(sums, a, b);
  } else {
    mma_m16n8k8(sums, a, b);
  }
}

// Tensor cores truncate the sums that they add to. So for kFloat they add only the three products, and the cores for
// float32 add the rest: otherwise, errors were 5 times those of float32 arithmetic.
template <Product kProduct>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Word<kProduct> (&a)[4],
                                             const Word<kProduct> (&b)[2]) {
  using W = Word<kProduct>;
  const auto add = [&](float (&to)[4], uint32_t W::* of_a, uint32_t W::* of_b) {
    multiply_add<kProduct>(to, {a[0].*of_a, a[1].*of_a, a[2].*of_a, a[3].*of_a}, {b[0].*of_b, b[1].*of_b});
  };
  if constexpr (kProduct == Product::kFloat) {
    float products[4] = {};
    add(products, &W::lower, &W::upper);
    add(products, &W::upper, &W::lower);
    add(products, &W::upper, &W::upper);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += products[i];
  } else {
    add(sums, &W::upper, &W::upper);
  }
}

}  // namespace msops
