// Bias, ALiBi and dropout in a warp's sums (see mma_tiles.h): what an ExtendedAttention adds to logits, and which
// weights it keeps.
//
// A call of philox() gives the words of four keys of a query, and a thread has sums of one or two of them. So threads
// that share queries and keys draw for one another, and exchange what they drew as bits.
#pragma once

#include "extended.h"
#include "mma_seen.h"
#include "mma_softmax.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

// Returns by what dropout multiplies the weights that it keeps.
template <typename A>
__device__ __forceinline__ float kept_of(const A& a) {
  if constexpr (A::kIsExtended) return a.kept;
  return 1;
}

// Returns how many blocks of a shape share a multiprocessor. The terms take registers.
template <typename S, typename A>
constexpr int kBlocksOf = A::kIsExtended && S::kBlocks > 2 ? 2 : S::kBlocks;

// Terms belong to one sample. For an Attention, which has none, they do nothing. Tiles of keys begin at multiples of 4.
template <typename A>
struct Terms {
  const A& a;
  const Seen<typename A::Element>& seen;
  int b, shift;
  uint64_t seed = 0;
  bool paired = false;  // whether two neighbouring keys from an even one on have a pack of the bias

  __device__ __forceinline__ Terms(const A& attention, const Seen<typename A::Element>& of_item)
      : a(attention), seen(of_item), b(of_item.b), shift(of_item.keys - of_item.queries) {
    if constexpr (A::kIsExtended) {
      const uintptr_t address = reinterpret_cast<uintptr_t>(a.bias.narrow) | reinterpret_cast<uintptr_t>(a.bias.wide);
      paired = a.bias_key == 1 && a.keys % 2 == 0 && address % (a.bias.wide ? 8 : 2 * sizeof *a.bias.narrow) == 0;
      if (a.seed) seed = static_cast<uint64_t>(*a.seed);
    }
  }

  // Adds bias and ALiBi to logits of keys from j0 on. query(m, half) gives the QueryOfRow of a row of the sums.
  template <int kM, int kN, typename Query>
  __device__ __forceinline__ void add(float (&x)[kM][kN][4], int j0, const Query& query) const {
    if constexpr (A::kIsExtended) {
      const int j = j0 + threadIdx.x % 4 * 2, room = seen.keys - j;  // j is the thread's first key
      unrolled<kM, 2>([&](int m, int half) {
        const QueryOfRow row = query(m, half);
        add_slope<kN>(x[m], half, row.h, row.i + shift - j, -1);
        if (!a.bias || row.i >= seen.queries) return;
        const int64_t from = b * a.bias_batch + row.h * a.bias_head + row.i * a.bias_query + j * a.bias_key;
        if (paired && a.bias.narrow) {
          add_pairs(x[m], half, a.bias.narrow + from, room);
        } else if (paired) {
          add_pairs(x[m], half, a.bias.wide + from, room);
        } else {
          add_each(x[m], half, from, a.bias_key, room);
        }
      });
    }
  }

  // Adds the same where the rows of the sums are keys from j0 on, and the columns queries of head h from i0 on.
  template <int kM, int kN>
  __device__ __forceinline__ void add_transposed(float (&x)[kM][kN][4], int h, int i0, int j0) const {
    if constexpr (A::kIsExtended) {
      const int lane = threadIdx.x % 32, i = i0 + lane % 4 * 2;
      unrolled<kM, 2>([&](int m, int half) {
        const int j = j0 + 16 * m + 8 * half + lane / 4;
        add_slope<kN>(x[m], half, h, i + shift - j, 1);
        if (!a.bias || j >= seen.keys) return;
        const int64_t from = b * a.bias_batch + h * a.bias_head + i * a.bias_query + j * a.bias_key;
        add_each(x[m], half, from, a.bias_query, seen.queries - i);
      });
    }
  }

  // Multiplies weights by what dropout does, except for the factor kept_of(a). The places are as in add.
  template <int kM, int kN, typename Query>
  __device__ __forceinline__ void drop(float (&p)[kM][kN][4], int j0, const Query& query) const {
    if constexpr (A::kIsExtended) {
      if (a.seed)
        for_weights<kM, kN>(j0, query, [&](int m, int n, int i, bool keeps) { p[m][n][i] = keeps ? p[m][n][i] : 0; });
    }
  }

  // Calls f(m, n, i, keeps) for each of the thread's weights, where dropout keeps it or not. The places are as in add.
  template <int kM, int kN, typename Query, typename F>
  __device__ __forceinline__ void for_weights(int j0, const Query& query, const F& f) const {
    const int lane = threadIdx.x % 32, odd = lane % 2;  // a thread draws for two threads: for half `odd` of the rows
    for_cells<kM, kN>(
        [&](int m, int n) {
          const QueryOfRow row = query(m, odd);
          return kept_keys(row.h, row.i, j0 / 4 + 2 * n + lane % 4 / 2);
        },
        [&](uint32_t drawn, uint32_t (&of_sums)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            of_sums[i] = i % 2 ? of_sums[i - 1] >> 1 : __shfl_sync(~0u, drawn, lane / 2 * 2 + i / 2) >> 2 * odd;
        },
        f);
  }

  // Does the same where the rows are keys.
  template <int kM, int kN, typename F>
  __device__ __forceinline__ void for_transposed_weights(int h, int i0, int j0, const F& f) const {
    const int lane = threadIdx.x % 32, own = lane / 4 % 4;  // a thread draws for four threads: for sum `own` of each
    for_cells<kM, kN>(
        [&](int m, int n) {
          return kept_keys(h, i0 + 8 * n + lane % 4 * 2 + own % 2, j0 / 4 + 4 * m + own / 2 * 2 + lane / 16);
        },
        [&](uint32_t drawn, uint32_t (&of_sums)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) of_sums[i] = __shfl_sync(~0u, drawn, lane / 16 * 16 + 4 * i + lane % 4) >> own;
        },
        f);
  }

 private:
  // x += sign * slope * |distance + column|, or - column where sign is negative
  template <int kN>
  __device__ __forceinline__ void add_slope(float (&x)[kN][4], int half, int h, int distance, int sign) const {
    if (!a.slopes) return;
    const float slope = a.slope(b, h), first = static_cast<float>(distance);
    unrolled<kN, 2>(
        [&](int n, int k) { x[n][2 * half + k] -= slope * fabsf(first + static_cast<float>(sign * (8 * n + k))); });
  }

  template <int kN, typename Element>
  static __device__ __forceinline__ void add_pairs(float (&x)[kN][4], int half, const Element* from, int room) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (8 * n >= room) continue;
      const Pack<Element, 2> pair = load<2>(from + 8 * n);
#pragma unroll
      for (int k = 0; k < 2; ++k) x[n][2 * half + k] += static_cast<float>(pair.values[k]);
    }
  }

  template <int kN>
  __device__ __forceinline__ void add_each(float (&x)[kN][4], int half, int64_t from, int64_t stride, int room) const {
    unrolled<kN, 2>([&](int n, int k) {
      if (8 * n + k < room) x[n][2 * half + k] += a.bias[from + (8 * n + k) * stride];
    });
  }

  // Returns, as bits, which of four keys query i of head h keeps.
  __device__ __forceinline__ uint32_t kept_keys(int h, int i, int block) const {
    const Words words = A::words(seed, b, h, i, block);
    uint32_t kept = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) kept |= static_cast<uint32_t>(words.at[k] >= a.threshold) << k;
    return kept;
  }

  // Draws four bits for each matrix (m, n) of 16 x 8 sums, and calls f(m, n, i, bit) for the thread's sums.
  // exchange(drawn, of_sums) shifts words so that bit 4 c of word i is for sum i of matrix c.
  template <int kM, int kN, typename Draw, typename Exchange, typename F>
  __device__ __forceinline__ void for_cells(const Draw& draw, const Exchange& exchange, const F& f) const {
    if (!a.seed) return unrolled<kM, kN, 4>([&](int m, int n, int i) { f(m, n, i, true); });
    constexpr int kAtOnce = kM * kN < 8 ? kM * kN : 8;
    static_assert(kM * kN % kAtOnce == 0, "words of 32 bits are full");
#pragma unroll
    for (int first = 0; first < kM * kN; first += kAtOnce) {
      uint32_t drawn = 0, of_sums[4];
#pragma unroll 4
      for (int c = 0; c < kAtOnce; ++c) drawn |= draw((first + c) / kN, (first + c) % kN) << 4 * c;
      exchange(drawn, of_sums);
      unrolled<kAtOnce, 4>(
          [&](int c, int i) { f((first + c) / kN, (first + c) % kN, i, (of_sums[i] >> 4 * c & 1) != 0); });
    }
  }
};

}  // namespace msops::flash_attention

#endif
