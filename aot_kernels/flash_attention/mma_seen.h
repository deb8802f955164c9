// Which keys the queries see that a warp's sums belong to (see mma_tiles.h), for the kernels for tensor cores.
#pragma once

#include "mma_tiles.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

// Seen tells which keys the queries of one head see: query i those from i + low to i + high - 1, except for the mask,
// and none from `end` on. The numbers have 32 bits, and are limited so that no sum overflows (see fits_tensor_cores).
struct Seen {
  const Attention<Half>& a;
  int b, h, queries, keys, low, high, end;

  __device__ __forceinline__ Seen(const Attention<Half>& attention, const Sequence& s, int b_, int h_, int end_)
      : a(attention), b(b_), h(h_), queries(static_cast<int>(s.queries)), keys(static_cast<int>(s.keys)), end(end_) {
    low = a.left < 0 ? -kFar : limited(s.shift() - a.left);
    high = a.right < 0 ? kFar : limited(s.shift() + a.right + 1);
  }

  // Returns whether the queries from i0 to i1 - 1 see the keys from j0 to j1 - 1, so that no test of a key is needed.
  __device__ __forceinline__ bool all(int i0, int i1, int j0, int j1) const {
    return !a.mask && i1 - 1 + low <= j0 && j1 <= std::min(i0 + high, end);
  }
  // Sets the logits of keys that are not seen to -infinity. The rows of the sums are queries, the columns keys.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&x)[kM][kN][4], int i0, int j0) const {
    unrolled<kM, 2>(
        [&](int m, int half) { hide_row(x[m], half, h, i0 + 16 * m + 8 * half + threadIdx.x % 32 / 4, j0); });
  }

  // Hides keys in the thread's sums of one row, which is query i of a head.
  template <int kN>
  __device__ __forceinline__ void hide_row(float (&x)[kN][4], int half, int head, int i, int j0) const {
    const int j = j0 + threadIdx.x % 4 * 2;  // the thread's first key
    const int first = i + low - j, last = std::min(i + high, end) - j;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (8 * n + k < first || 8 * n + k >= last) x[n][2 * half + k] = -INFINITY;
    if (!a.mask) return;
    if (i >= queries) return;
    const bool* const mask = a.mask + b * a.mask_batch + head * a.mask_head + i * a.mask_query + j * a.mask_key;
    unrolled<kN, 2>([&](int n, int k) {
      if (8 * n + k < keys - j && mask[(8 * n + k) * a.mask_key]) x[n][2 * half + k] = -INFINITY;
    });
  }

  // Sets p to 0 for keys that are not seen. The rows of the sums are keys from j0 on, the columns queries from i0 to
  // i1 - 1.
  template <int kM, int kN>
  __device__ __forceinline__ void hide_transposed(float (&p)[kM][kN][4], int i0, int i1, int j0) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = j0 + 16 * m + 8 * half + lane / 4, i = i0 + lane % 4 * 2;  // i is the thread's first query
        const int first = j - high + 1 - i, last = j < end ? std::min(j - low + 1, i1) - i : 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            if (8 * n + k < first || 8 * n + k >= last) p[m][n][2 * half + k] = 0;
        if (!a.mask || j >= keys) continue;
        unrolled<kN, 2>([&](int n, int k) {
          if (i + 8 * n + k < i1 && a.hides(b, h, i + 8 * n + k, j)) p[m][n][2 * half + k] = 0;
        });
      }
  }

  static constexpr int kFar = 1 << 29;

 private:
  static __device__ __forceinline__ int limited(int64_t place) {
    return static_cast<int>(most(-kFar, least(place, kFar)));
  }
};

}  // namespace msops::flash_attention

#endif
