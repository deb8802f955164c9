// Tiles for any GPU, by multiply-adds of single numbers: products of rows, and products of a tile with rows.
//
// A block works on tiles of kTile x kTile numbers, of which each thread has 4 x 4.
#pragma once

#include "delta.h"
#include "extended.h"

#ifdef __CUDACC__

namespace msops::flash_attention::plain {

template <int kTile_>
struct TileShape {
  static constexpr int kTile = kTile_, kThreads = kTile * kTile / 16, kPitch = kTile + 4;
  static constexpr int kDepth = 32;                // elements of rows that are multiplied at once
  static constexpr int kLoaders = kThreads / 8;    // rows that a block loads at once, by 8 threads each
  static constexpr int kLoads = kTile / kLoaders;  // of these a thread has a part
  static constexpr int kParts = kThreads / kTile;  // threads that share a row's softmax
  static_assert(2 * kDepth >= kTile, "a tile takes the place of two transposed parts of rows");
};

// float64 needs twice the shared memory.
template <typename T>
using ShapeOf = TileShape<sizeof(Compute<T>) == 8 ? 32 : 64>;

template <typename C, typename S>
struct alignas(16) Shared {
  C rows[2 * S::kDepth * S::kPitch];  // (2, kDepth, kPitch): x and y, transposed; or a tile (kTile, kPitch)
  C tile[S::kTile * S::kPitch];       // (kTile, kPitch)
  C maxima[S::kParts * S::kTile], factors[S::kTile];
};

// ThreadPlace is where a thread's 4 x 4 numbers begin: row y and column x. A warp has 16 rows and 32 columns, so that
// it loads 16 numbers of one factor and 32 of the other at once.
template <typename S>
struct ThreadPlace {
  int x, y;

  __device__ ThreadPlace() {
    constexpr int kAcross = S::kTile / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x = 4 * (lane % 8 + 8 * (warp % kAcross)), y = 4 * (lane / 8 + 4 * (warp / kAcross));
  }
};

template <typename C>
__device__ __forceinline__ void load_four(C (&to)[4], const C* from) {
  constexpr int kWide = 16 / sizeof(C);
#pragma unroll
  for (int n = 0; n < 4; n += kWide) {
    const auto pack = load<kWide>(from + n);
#pragma unroll
    for (int w = 0; w < kWide; ++w) to[n + w] = pack.values[w];
  }
}

// RowLoads are the addresses of the rows of a tile that a thread loads a part of; null stands for zeros.
template <typename T, typename S>
struct RowLoads {
  const T* at[S::kLoads];

  // row(r) returns the address of row r, or null.
  template <typename F>
  __device__ __forceinline__ explicit RowLoads(const F& row) {
#pragma unroll
    for (int n = 0; n < S::kLoads; ++n) at[n] = row(static_cast<int>(threadIdx.x) / 8 + n * S::kLoaders);
  }

  // Stores elements from `begin` on of all rows, of `width` elements each, as columns.
  template <typename C>
  __device__ __forceinline__ void store_transposed(C* to, int begin, int width) const {
#pragma unroll
    for (int n = 0; n < S::kLoads; ++n)
#pragma unroll
      for (int e = 0; e < S::kDepth; e += 8) {
        const int d = e + static_cast<int>(threadIdx.x) % 8;
        const bool inside = begin + d < width && at[n] != nullptr;
        to[d * S::kPitch + threadIdx.x / 8 + n * S::kLoaders] = inside ? C(at[n][begin + d]) : C(0);
      }
  }

  // Stores kTile elements from `begin` on of each row.
  template <typename C>
  __device__ __forceinline__ void store(C* to, int begin, int width) const {
#pragma unroll
    for (int n = 0; n < S::kLoads; ++n)
#pragma unroll
      for (int e = 0; e < S::kTile; e += 8) {
        const int d = e + static_cast<int>(threadIdx.x) % 8;
        const bool inside = begin + d < width && at[n] != nullptr;
        to[(threadIdx.x / 8 + n * S::kLoaders) * S::kPitch + d] = inside ? C(at[n][begin + d]) : C(0);
      }
  }
};

// sums[a][b] += sum over k < depth of x[k][place.y + a] y[k][place.x + b], for tiles in shared memory
template <typename S, typename C>
__device__ __forceinline__ void multiply(C (&sums)[4][4], const C* x, const C* y, const ThreadPlace<S>& place,
                                         int depth) {
#pragma unroll 8
  for (int k = 0; k < depth; ++k) {
    C of_x[4], of_y[4];
    load_four(of_x, x + k * S::kPitch + place.y);
    load_four(of_y, y + k * S::kPitch + place.x);
#pragma unroll
    for (int a = 0; a < 4; ++a)
#pragma unroll
      for (int b = 0; b < 4; ++b) sums[a][b] += of_x[a] * of_y[b];
  }
}

// sums[a][b] = the product of rows place.y + a of x and place.x + b of y
template <typename S, typename T, typename C>
__device__ __forceinline__ void multiply_rows(C (&sums)[4][4], const RowLoads<T, S>& x, const RowLoads<T, S>& y,
                                              int width, Shared<C, S>& shared, const ThreadPlace<S>& place) {
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int b = 0; b < 4; ++b) sums[a][b] = 0;
  C* const of_y = shared.rows + S::kDepth * S::kPitch;
  for (int begin = 0; begin < width; begin += S::kDepth) {
    __syncthreads();  // others may still read what is overwritten
    x.store_transposed(shared.rows, begin, width);
    y.store_transposed(of_y, begin, width);
    __syncthreads();
    multiply<S>(sums, shared.rows, of_y, place, S::kDepth);
  }
}

// These are calls, since a thread has 16 logits, and code of each would take long to compile.
template <typename C>
__device__ __noinline__ C capped(C x, C softcap) {
  return softcap * tanh(x / softcap);
}
static __device__ __forceinline__ float exponential(float x) { return expf(x); }
static __device__ __noinline__ double exponential(double x) { return exp(x); }

// Turns q_i k_j into y_ij, which are the logits x_ij except for what an ExtendedAttention adds, and these into x_ij,
// which is -infinity where query i does not see key j.
template <typename A>
struct Logit {
  using C = typename A::C;
  const A& a;
  const Sequence& s;
  int64_t b;

  __device__ __forceinline__ C of_product(C product) const {
    const C y = product * a.scale;
    return a.softcap > 0 ? capped(y, a.softcap) : y;
  }
  __device__ __forceinline__ C operator()(C y, int64_t h, int64_t i, int64_t j, bool sees_all) const {
    if constexpr (A::kIsExtended) y += a.addend(s, b, h, i, j);
    return sees_all || a.sees(s, b, h, i, j) ? y : C(-INFINITY);
  }

  // Returns dy/dz.
  __device__ __forceinline__ C slope(C y) const {
    if (a.softcap <= 0) return a.scale;
    const C ratio = y / a.softcap;
    return (1 - ratio * ratio) * a.scale;
  }
};

template <typename T>
static __device__ __noinline__ Words words_of(const ExtendedAttention<T>& a, int64_t b, int64_t h, int64_t i,
                                              int64_t block) {
  return a.words(b, h, i, block);
}

// Dropout tells by what the weights of one query are multiplied, for keys in a row: it keeps the words of four keys.
template <typename A>
struct Dropout {
  using C = typename A::C;
  const A& a;
  int64_t b, h, i, block = -1;
  Words words{};

  __device__ __forceinline__ Dropout(const A& attention, int64_t b_, int64_t h_, int64_t i_)
      : a(attention), b(b_), h(h_), i(i_) {}
  __device__ __forceinline__ C operator()(int64_t j) {
    if constexpr (A::kIsExtended) {
      if (!a.seed) return C(1);
      if (j / 4 != block) block = j / 4, words = words_of(a, b, h, i, block);
      const uint32_t even = j & 2 ? words.at[2] : words.at[0], odd = j & 2 ? words.at[3] : words.at[1];
      return (j & 1 ? odd : even) >= a.threshold ? a.kept : C(0);
    }
    return C(1);
  }
};

// Returns the rest of a query whose lse is element `at`.
template <typename A, typename T = typename A::Element>
__device__ __forceinline__ Compute<T> rest_at(const AttentionGradient<T>& g, int64_t at) {
  if constexpr (A::kIsExtended) return g.rest ? g.rest[at] : 0;
  return 0;
}

template <typename T>
__device__ __forceinline__ const T* row_or_null(bool inside, const T* data, int64_t offset) {
  return inside ? data + offset : nullptr;
}

}  // namespace msops::flash_attention::plain

#endif
