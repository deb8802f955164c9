// Which keys the queries see that a warp's sums belong to (see mma_tiles.h), for the kernels for tensor cores.
#pragma once

#include "mma_tiles.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

// QueryOfRow says of which query a row of sums is.
struct QueryOfRow {
  int h, i;
};

// Seen tells which keys the queries of one head see: query i those from i + low to i + high - 1, except for the mask,
// and none from `end` on. The numbers have 32 bits, and are limited so that no sum overflows (see fits_tensor_cores).
// Without kHasMask there is no mask, and no register for its code.
template <typename T, bool kHasMask>
struct SeenWith {
  const Attention<T>& a;
  int b, h, queries, keys, low, high, end;

  __device__ __forceinline__ SeenWith(const Attention<T>& attention, const Sequence& s, int b_, int h_, int end_)
      : a(attention), b(b_), h(h_), queries(static_cast<int>(s.queries)), keys(static_cast<int>(s.keys)), end(end_) {
    low = a.left < 0 ? -kFar : limited(s.shift() - a.left);
    high = a.right < 0 ? kFar : limited(s.shift() + a.right + 1);
  }

  // Returns whether the queries from i0 to i1 - 1 see the keys from j0 to j1 - 1, so that no test of a key is needed.
  __device__ __forceinline__ bool all(int i0, int i1, int j0, int j1) const {
    return !has_mask() && i1 - 1 + low <= j0 && j1 <= std::min(i0 + high, end);
  }
  // Sets the logits of keys that are not seen to -infinity. The rows of the sums are queries from i0 on, the columns
  // keys from j0 on; or query(m, half) gives the QueryOfRow of a row.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&x)[kM][kN][4], int i0, int j0) const {
    hide_rows(x, j0, [&](int m, int half) {
      return QueryOfRow{h, i0 + 16 * m + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4};
    });
  }
  template <int kM, int kN, typename Query>
  __device__ __forceinline__ void hide_rows(float (&x)[kM][kN][4], int j0, const Query& query) const {
    const int j = j0 + threadIdx.x % 4 * 2;  // the thread's first key
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = query(m, half).i, first = i + low - j, last = std::min(i + high, end) - j;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            if (8 * n + k < first || 8 * n + k >= last) x[m][n][2 * half + k] = -INFINITY;
      }
    if (has_mask()) hide_masked(x, j0, query);
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
      }
    if (has_mask()) hide_masked_transposed(p, i0, i1, j0);
  }

  static constexpr int kFar = 1 << 29;

 private:
  __device__ __forceinline__ bool has_mask() const { return kHasMask && a.mask; }

  // Returns whether the mask has packs of 16 bytes, 0 or 1 each, for each 16 keys from key j0 on.
  __device__ __forceinline__ bool mask_has_packs(int j0) const {
    const int64_t places = a.mask_batch | a.mask_head | a.mask_query | a.keys | j0;
    return a.mask_key == 1 && (reinterpret_cast<uintptr_t>(a.mask) | static_cast<uintptr_t>(places)) % 16 == 0;
  }
  // Returns, as bits, which of 16 keys from key j on the mask hides from a query, if it is inside.
  template <bool kIsPack>
  __device__ __forceinline__ uint32_t masked_keys(int head, int i, int j, bool inside) const {
    const int room = inside ? static_cast<int>(a.keys) - j : 0;
    const bool* const from = a.mask + b * a.mask_batch + head * a.mask_head + i * a.mask_query + j * a.mask_key;
    uint32_t bits = 0;
    if constexpr (kIsPack) {
      Pack<uint32_t, 4> pack{};
      if (room > 0) pack = load<4>(reinterpret_cast<const uint32_t*>(from));
#pragma unroll
      for (int word = 0; word < 4; ++word) bits |= pack.values[word] * 0x10204080u >> 28 << 4 * word;
    } else {
#pragma unroll 4
      for (int key = 0; key < 16; ++key)
        if (key < room) bits |= static_cast<uint32_t>(from[key * a.mask_key]) << key;
    }
    return bits;
  }

  // Hides what the mask does. The four threads that share a row read 16 of each 64 keys, and exchange their bits.
  template <int kM, int kN, typename Query>
  __device__ __forceinline__ void hide_masked(float (&x)[kM][kN][4], int j0, const Query& query) const {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    uint32_t own[kM][2];
    if (mask_has_packs(j0)) {
      read_mask<true, kM, kN>(own, j0, query);
    } else {
      read_mask<false, kM, kN>(own, j0, query);
    }
    unrolled<kM, 2, (kN < 8 ? kN / 2 : 4)>([&](int m, int half, int other) {
      const uint32_t bits = __shfl_sync(~0u, own[m][half], lane - quad + other) >> 2 * quad;
      unrolled<(kN + 7) / 8, 2, 2>([&](int part, int upper, int k) {
        const int n = 8 * part + 2 * other + upper;
        if (n < kN && bits >> (16 * part + 8 * upper + k) & 1) x[m][n][2 * half + k] = -INFINITY;
      });
    });
  }
  template <bool kIsPack, int kM, int kN, typename Query>
  __device__ __forceinline__ void read_mask(uint32_t (&own)[kM][2], int j0, const Query& query) const {
    constexpr int kParts = (kN + 7) / 8;  // of 64 keys
    static_assert(kParts <= 2 && kN % 2 == 0, "a word has the bits of 32 keys");
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const QueryOfRow row = query(m, half);
        own[m][half] = 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int group = 4 * part + threadIdx.x % 4;
          const bool inside = row.i < queries && group < kN / 2;
          own[m][half] |= masked_keys<kIsPack>(row.h, row.i, j0 + 16 * group, inside) << 16 * part;
        }
      }
  }

  // Does the same for keys as rows, where each thread reads 16 keys of one query of each 32.
  template <int kM, int kN>
  __device__ __forceinline__ void hide_masked_transposed(float (&p)[kM][kN][4], int i0, int i1, int j0) const {
    constexpr int kOfPart = kN < 4 ? kN : 4, kParts = kN / kOfPart;  // of up to 32 queries
    const int lane = threadIdx.x % 32;
    const uint32_t own = mask_has_packs(j0) ? read_mask_transposed<true, kM, kParts>(i0 + lane, i1, j0)
                                            : read_mask_transposed<false, kM, kParts>(i0 + lane, i1, j0);
    unrolled<kOfPart, 2>([&](int n, int k) {
      const uint32_t bits = __shfl_sync(~0u, own, 8 * n + lane % 4 * 2 + k) >> lane / 4;
      unrolled<kM, kParts, 2>([&](int m, int part, int half) {
        if (bits >> (16 * (m * kParts + part) + 8 * half) & 1) p[m][4 * part + n][2 * half + k] = 0;
      });
    });
  }
  template <bool kIsPack, int kM, int kParts>
  __device__ __forceinline__ uint32_t read_mask_transposed(int i, int i1, int j0) const {
    static_assert(kM * kParts == 1 || kM * kParts == 2, "a word has the bits of 32 keys");
    uint32_t own = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        own |= masked_keys<kIsPack>(h, i + 32 * part, j0 + 16 * m, i + 32 * part < i1) << 16 * (m * kParts + part);
    return own;
  }

  static __device__ __forceinline__ int limited(int64_t place) {
    return static_cast<int>(most(-kFar, least(place, kFar)));
  }
};
template <typename T>
using Seen = SeenWith<T, true>;

}  // namespace msops::flash_attention

#endif
