// Products by tensor cores, of 16 x 8 sums at once: of float16; of float32 rounded to TF32 (8 bits of exponent, 10 of
// fraction) if that is allowed; else of float32 as two TF32 numbers, upper and lower, of whose four products the
// smallest is left out, about 2^-22 of the whole.
#pragma once

#include "../common/parallel.h"

namespace msops {

enum class Product { kHalf, kTf32, kFloat };

__device__ __forceinline__ unsigned to_tf32(float value) {
  unsigned bits = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#endif
  return bits;
}

// Two float16 or one float32 as an operand: of TF32, the upper part, and for kFloat also the lower.
template <Product kProduct>
struct Word {
  unsigned upper, lower;

  __device__ Word() {}
  __device__ explicit Word(unsigned bits) : upper(bits), lower(0) {
    constexpr unsigned kTf32Bits = 0xffffe000;
    if constexpr (kProduct == Product::kTf32) upper = to_tf32(__uint_as_float(bits));
    if constexpr (kProduct == Product::kFloat) {
      // Some NaN become 0 in the upper part; the lower is NaN then.
      upper = (bits + 0x1000) & kTf32Bits;
      lower = __float_as_uint(__uint_as_float(bits) - __uint_as_float(upper)) & kTf32Bits;
    }
  }
};

template <Product kProduct>
__device__ __forceinline__ void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kProduct == Product::kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

// Tensor cores cut off what they add to. So for kFloat they add only the three products, and the cores for float32 the
// rest: else errors were 5 times those of float32 arithmetic.
template <Product kProduct>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Word<kProduct> (&a)[4],
                                             const Word<kProduct> (&b)[2]) {
  using W = Word<kProduct>;
  const auto add = [&](float (&to)[4], unsigned W::* of_a, unsigned W::* of_b) {
    multiply_add<kProduct>(to, a[0].*of_a, a[1].*of_a, a[2].*of_a, a[3].*of_a, b[0].*of_b, b[1].*of_b);
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
