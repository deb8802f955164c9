// Products of many tokens of float16 and float32 on the tensor cores of sm_80 and later (mma.sync). The weight's
// numbers are unpacked, and rounded to the dtype of x, into tiles in shared memory. float32 is multiplied as three TF32
// products.
#pragma once

#include "../shared/product/mma_tiles.h"
#include "problem.h"

#ifdef __CUDACC__

#include "../common/launch.h"

namespace msops::gguf_matmul {

// A block of eight warps takes a tile of 128 x 128 sums; a warp takes 64 x 32 of them. Each of kStages stages has kDeep
// terms of both sides. The right one is (kSide, kDeep), or (kDeep, kSide) if the sums are over the weight's rows.
template <typename T_, bool kOverRows_>
struct TileShape {
  using T = T_;
  static constexpr bool kOverRows = kOverRows_, kIsHalf = std::is_same<T, Half>::value;
  static constexpr int kSide = 128, kDeep = 128 / static_cast<int>(sizeof(T)), kStages = 2, kThreads = 256;
  static constexpr int kM = 4, kN = 4;
  using Left = product::MmaTile<T, kDeep>;
  using Right = product::MmaTile<T, kOverRows ? kSide : kDeep>;
  static constexpr int kElements = kSide * kDeep, kBytes = 2 * kStages * kElements * static_cast<int>(sizeof(T));
};

// Sixteens are the codes and scales that a thread has read for a tile: kCount runs of 16 numbers.
template <typename F, typename S>
class Sixteens {
  using T = typename S::T;
  static constexpr int kWidth = S::kOverRows ? S::kSide : S::kDeep, kRuns = kWidth / 16;  // of a row
  static constexpr int kCount = S::kElements / 16 / S::kThreads;

 public:
  // Reads the weight's rows from `row` on and its columns from `column` on.
  __device__ __forceinline__ void read(const Weight& w, int64_t row, int64_t column) {
    unrolled<kCount>([&](int i) {
      const int64_t of = row + row_of(i), k = column + column_of(i);
      unrolled<4>([&](int j) { codes_[i][j] = 0; });
      scales_[i] = {};
      if (of >= w.rows || k >= w.columns) return;
      const uint8_t* const block = w.template block<F>(of, k);
      const int e = static_cast<int>(k % F::kNumbers);
      unrolled<4>([&](int j) { codes_[i][j] = F::template codes<uint32_t>(block, e + 4 * j); });
      scales_[i] = F::scale(block, e);
    });
  }

  // Stores the numbers to a tile.
  __device__ __forceinline__ void store(T* tile) const {
    constexpr int N = kPackWidth<T>;
    unrolled<kCount>([&](int i) {
      unrolled<16 / N>([&](int pack) {
        float numbers[N];
        unrolled<N>([&](int k) {
          const int at = pack * N + k;
          numbers[k] = gguf::number_of(scales_[i], codes_[i][at / 4] >> at % 4 * 8 & 0xffu);
        });
        msops::store(S::Right::at(tile, place_of(row_of(i)), column_of(i) + pack * N), rounded_pack<T>(numbers));
      });
    });
  }

 private:
  static __device__ __forceinline__ int row_of(int i) { return (threadIdx.x + i * S::kThreads) / kRuns; }
  static __device__ __forceinline__ int column_of(int i) { return (threadIdx.x + i * S::kThreads) % kRuns * 16; }
  // Returns where a row lies. As a right operand that it does not transpose, float takes rows in pairs: terms t and
  // t + 4 of 8 (see MmaTile::load_transposed).
  static __device__ __forceinline__ int place_of(int row) {
    if constexpr (!S::kOverRows || S::kIsHalf) return row;
    return row / 8 * 8 + row % 4 * 2 + row / 4 % 2;
  }

  uint32_t codes_[kCount][4];
  gguf::Scale scales_[kCount];
};

template <typename T>
__device__ __forceinline__ float first_of(const Products<T>& p, int64_t column) {
  return column < p.columns() ? p.bias[column] : 0.f;
}
template <typename T>
__device__ __forceinline__ float first_of(const Gradients<T>&, int64_t) {
  return 0;
}

// Rows of x and of the result may each begin at multiples of 16 bytes, and have whole packs.
struct Aligned {
  bool x, out;
};

template <typename F, typename S, typename P>
__device__ __forceinline__ void multiply_tile(const P& p, const Aligned& aligned) {
  using T = typename S::T;
  using Left = typename S::Left;
  using Right = typename S::Right;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const stages = reinterpret_cast<T*>(shared);
  const int64_t down = (p.tokens + S::kSide - 1) / S::kSide;  // neighbouring blocks read the same part of the weight
  const int64_t token = blockIdx.x % down * S::kSide, column = blockIdx.x / down * S::kSide;
  const auto limited = [](int64_t n, int most) { return n < most ? static_cast<int>(n) : most; };
  const int tokens = limited(p.tokens - token, S::kSide), columns = limited(p.columns() - column, S::kSide);
  const int64_t tiles = (p.deep() + S::kDeep - 1) / S::kDeep;
  const int warp = threadIdx.x / 32, row = warp / 4 * 16 * S::kM, part = warp % 4;
  const auto left_of = [&](int64_t i) { return stages + i % S::kStages * 2 * S::kElements; };
  Sixteens<F, S> sixteens;
  const auto begin_copy = [&](int64_t i) {
    const int64_t k = i * S::kDeep;
    const product::TileRows<const T> rows{p.x + token * p.deep() + k, p.deep(), limited(p.deep() - k, S::kDeep),
                                          aligned.x};
    Left::template load<S::kSide, S::kThreads>(left_of(i), rows, 0, tokens, threadIdx.x);
    cp_async_commit();
    sixteens.read(p.weight, S::kOverRows ? k : column, S::kOverRows ? column : k);
  };

  float sums[S::kM][S::kN][4];
  product::for_sums<S::kM, S::kN>(
      [&](int m, int n, int i, int, int at) { sums[m][n][i] = first_of(p, column + part * 8 * S::kN + at); });
  if (tiles > 0) begin_copy(0), sixteens.store(left_of(0) + S::kElements);
  for (int64_t i = 0; i < tiles; ++i) {
    cp_async_wait<0>();
    __syncthreads();
    if (i + 1 < tiles) begin_copy(i + 1);
    const T* const right = left_of(i) + S::kElements;
    const unsigned from_left = Left::left(left_of(i), row);
    const unsigned from_right = S::kOverRows ? Right::at(Right::transposed(right), part * 8 * S::kN)
                                             : Right::at(Right::right(right), 0, part * 8 * S::kN);
    if (row < tokens) {
#pragma unroll 2
      for (int k = 0; k < S::kDeep; k += Left::kStep) {
        typename Left::W of_left[S::kM][4], of_right[4];
#pragma unroll
        for (int m = 0; m < S::kM; ++m) Left::load(of_left[m], Left::at(from_left, k, 16 * m));
#pragma unroll
        for (int n = 0; n < S::kN; n += 2) {
          if constexpr (S::kOverRows) {
            Right::load_transposed(of_right, from_right, 8 * n, k);
          } else {
            Right::load(of_right, Right::at(from_right, k, 8 * n));
          }
          Left::add_products(sums, n, of_left, of_right);
        }
      }
    }
    if (i + 1 < tiles) sixteens.store(left_of(i + 1) + S::kElements);
  }
  __syncthreads();
  if (row >= tokens) return;
  const product::TileRows<T> to{p.out + token * p.columns() + column, p.columns(), columns, aligned.out};
  product::store_rows<S::kSide>(sums, stages + row * S::kSide, to, row, tokens, part, [](int, int) { return 1.f; });
}

template <typename F, typename S, typename P>
__global__ void __launch_bounds__(S::kThreads)
    tile_kernel(const __grid_constant__ P p, const __grid_constant__ Aligned aligned) {
  if (has_instructions_of(80)) multiply_tile<F, S>(p, aligned);
}

// Returns false, and launches nothing, if the GPU lacks the instructions.
template <typename F, bool kOverRows, typename T, template <typename> class P>
bool multiply_tiles(Call& call, const P<T>& p) {
  using S = TileShape<T, kOverRows>;
  const auto kernel = tile_kernel<F, S, P<T>>;
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < S::kBytes) return false;
  const auto has_packs = [](const T* first, int64_t length) {
    return is_aligned<kPackWidth<T>>(first) && length % kPackWidth<T> == 0;
  };
  const int64_t down = (p.tokens + S::kSide - 1) / S::kSide, across = (p.columns() + S::kSide - 1) / S::kSide;
  launch(call, kernel, down * across, S::kThreads, S::kBytes, p,
         Aligned{has_packs(p.x, p.deep()), has_packs(p.out, p.columns())});
  return true;
}

}  // namespace msops::gguf_matmul

#endif
