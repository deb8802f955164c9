// Logits and the online softmax of a tile's sums (see mma_tiles.h), shared by the kernels for tensor cores.
#pragma once

#include "mma_tiles.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

// Logits computes logits from products q k: logit = factor * x, where x is the product itself as long as that keeps the
// order of keys, which saves an instruction for each.
template <typename T>
struct Logits {
  float scale, softcap, factor;
  bool direct;

  template <typename A>
  __device__ explicit Logits(const A& a)
      : scale(a.scale), softcap(a.softcap), factor(1), direct(a.softcap == 0 && a.scale > 0 && !a.adds_to_logits()) {
    if (direct) factor = scale;
  }
  // From now on sums are logits themselves.
  __device__ __forceinline__ void take_as_they_are() { softcap = 0, factor = 1, direct = true; }

  // In float16, tanh y = 1 - 2 / (1 + e^2y); its error is some 1e-7, which softcap multiplies.
  template <int kM, int kN>
  __device__ __forceinline__ void apply(float (&sums)[kM][kN][4]) const {
    if (direct) return;
    [[maybe_unused]] const float power = 2 * kLog2E<float> / softcap;
    unrolled<kM, kN, 4>([&](int m, int n, int i) {
      const float y = scale * sums[m][n][i];
      if constexpr (std::is_same<T, Half>::value) {
        sums[m][n][i] = softcap == 0 ? y : softcap - softcap * __fdividef(2, 1 + ex2_approx_ftz(y * power));
      } else {
        sums[m][n][i] = softcap == 0 ? y : softcap * tanhf(y / softcap);
      }
    });
  }
  // Sets slopes to the derivatives of logits by products, except for the factor scale.
  template <int kM, int kN>
  __device__ __forceinline__ void differentiate(float (&slopes)[kM][kN][4], const float (&logits)[kM][kN][4]) const {
    unrolled<kM, kN, 4>([&](int m, int n, int i) {
      const float tanh = softcap == 0 ? 0 : logits[m][n][i] / softcap;
      slopes[m][n][i] = 1 - tanh * tanh;
    });
  }
};
template <typename A>
Logits(const A&) -> Logits<typename A::Element>;

// Adds (or takes the maximum of) what the four threads have that share a row of sums.
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
__device__ __forceinline__ float max_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

// OnlineSoftmax holds the statistics of a warp's rows. The maximum may lag behind by 2^8: it only keeps powers in
// float16's range, and to change it costs a multiplication of all that was summed.
template <int kM>
struct OnlineSoftmax {
  float max[kM][2], sum[kM][2];  // of x; of the thread's own columns

  __device__ OnlineSoftmax() {
    unrolled<kM, 2>([&](int m, int half) { max[m][half] = -INFINITY, sum[m][half] = 0; });
  }

  // Returns the maximum, or 0 if the row has seen no key, so that differences from it are numbers.
  __device__ __forceinline__ float base(int m, int half) const { return max[m][half] == -INFINITY ? 0 : max[m][half]; }

  // Replaces x of a tile by 2^(factor (x - max)), where factor > 0. Returns whether a maximum of the warp's rows has
  // changed; then what was summed before must be multiplied by `shrink`. Where x may be far from 0, as beside a bias of
  // -1e9, the difference comes first: the rounding of factor max would be a factor of up to 2^64.
  template <bool kMayBeFar, int kN>
  __device__ __forceinline__ bool advance(float (&x)[kM][kN][4], float (&shrink)[kM][2], float factor) {
    constexpr float kLag = 8;
    float high[kM][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = fmaxf(x[m][0][2 * half], x[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kN; ++n) value = fmaxf(value, fmaxf(x[m][n][2 * half], x[m][n][2 * half + 1]));
        high[m][half] = max_of_row(value), shrink[m][half] = 1;
        grows |= high[m][half] > -INFINITY && !((high[m][half] - max[m][half]) * factor <= kLag);
      }
    grows = __any_sync(~0u, grows);
    if (grows) {
      unrolled<kM, 2>([&](int m, int half) {
        const float old = max[m][half];
        max[m][half] = fmaxf(old, high[m][half]);
        shrink[m][half] = ex2_approx_ftz((old - base(m, half)) * factor);
        sum[m][half] *= shrink[m][half];
      });
    }
    unrolled<kM, 2>([&](int m, int half) {
      [[maybe_unused]] const float less = base(m, half) * factor;
      float total = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int k = 2 * half; k < 2 * half + 2; ++k) {
          if constexpr (kMayBeFar)
            x[m][n][k] = ex2_approx_ftz((x[m][n][k] - base(m, half)) * factor);
          else
            x[m][n][k] = ex2_approx_ftz(x[m][n][k] * factor - less);
          total += x[m][n][k];
        }
      sum[m][half] += total;
    });
    return grows;
  }

  template <int kN>
  static __device__ __forceinline__ void scale(float (&out)[kM][kN][4], const float (&shrink)[kM][2]) {
    unrolled<kM, kN, 4>([&](int m, int n, int i) { out[m][n][i] *= shrink[m][i / 2]; });
  }

  // Returns a row's lse, once its sum is finished. fmaf is written out, since a compiler may contract a product and a
  // sum at one place to which this is inlined, and not at another, so that lse would depend on the path that led there.
  __device__ __forceinline__ float lse(int m, int half, float factor) const {
    return fmaf(max[m][half], factor, logf(sum[m][half]));
  }

  // Returns 0, which the compiler does not know, so that what takes it comes after the powers have been added up.
  __device__ __forceinline__ int zero() const {
    bool below = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) below |= sum[m][0] + sum[m][1] < 0;
    return below;
  }

  // Adds the sums of the four threads that share a row.
  __device__ __forceinline__ void finish() {
    unrolled<kM, 2>([&](int m, int half) { sum[m][half] = sum_of_row(sum[m][half]); });
  }
};

}  // namespace msops::flash_attention

#endif
