// Products on the tensor cores of sm_80 and later (mma.sync).
#pragma once

#include "../shared/product/mma_tiles.h"
#include "problem.h"

#ifdef __CUDACC__

#include "../common/gpu/f16x2.h"
#include "../common/launch.h"

namespace msops::int8_matmul {

// A block of eight warps takes a tile of 128 x 128 sums; a warp takes 64 x 32 of them. Shared memory has kStages stages
// of kDeep terms of both sides. A tile has rows of 128 bytes, as one of 64 float16 has, with the same operands: a pair
// of float16 is four of int8.
constexpr int kSide = 128, kDeep = 128, kStages = 3, kThreads = 256, kM = 4, kN = 4;
constexpr int kTileBytes = kSide * kDeep, kBytes = 2 * kStages * kTileBytes;
using Tile = product::MmaTile<Half, kDeep / 2>;

__device__ __forceinline__ unsigned char* byte_at(unsigned char* tile, int row, int byte) {
  return tile + row * kDeep + (byte / 16 ^ row % 8) * 16 + byte % 16;
}

// Begins to copy `count` rows that have `left` terms. What is beyond these becomes 0.
__device__ __forceinline__ void load_rows(unsigned char* tile, const int8_t* from, int64_t stride, int count,
                                          int64_t left, bool has_packs) {
#pragma unroll
  for (int i = threadIdx.x; i < kTileBytes / 16; i += kThreads) {
    const int row = i / 8, byte = i % 8 * 16;
    const int8_t* const first = from + row * stride + byte;
    if (has_packs) {
      cp_async<16>(byte_at(tile, row, byte), first, row < count && byte < left);
    } else {
      Pack<int8_t, 16> pack;
#pragma unroll
      for (int j = 0; j < 16; ++j) pack.values[j] = row < count && byte + j < left ? first[j] : int8_t{0};
      store(reinterpret_cast<int8_t*>(byte_at(tile, row, byte)), pack);
    }
  }
}

// Turner turns a tile (terms, outputs) into one of (outputs, terms), through registers: four by four at a time. Lanes
// of a warp write to few rows, whose banks differ.
struct Turner {
  static constexpr int kParts = kTileBytes / 16 / kThreads;
  uint32_t words[kParts][4] = {};

  static __device__ __forceinline__ int output_of(int part) {
    return (part * kThreads + threadIdx.x) / 32 % 4 * 32 + threadIdx.x % 8 * 4;
  }
  static __device__ __forceinline__ int term_of(int part) {
    return (part * kThreads + threadIdx.x) / 128 * 16 + threadIdx.x % 32 / 8 * 4;
  }

  __device__ __forceinline__ void load(const int8_t* from, int64_t stride, int count, int64_t left, bool has_words) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int output = output_of(i), term = term_of(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int8_t* const first = from + (term + j) * stride + output;
        words[i][j] = 0;
        if (term + j >= left) continue;
        if (has_words) {
          if (output < count) words[i][j] = *reinterpret_cast<const uint32_t*>(first);
        } else {
#pragma unroll
          for (int b = 0; b < 4; ++b)
            if (output + b < count) words[i][j] |= static_cast<uint32_t>(static_cast<uint8_t>(first[b])) << 8 * b;
        }
      }
    }
  }
  __device__ __forceinline__ void store(unsigned char* tile) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint32_t (&w)[4] = words[i];
      const uint32_t lower[2] = {prmt<0x5140>(w[0], w[1]), prmt<0x5140>(w[2], w[3])};
      const uint32_t upper[2] = {prmt<0x7362>(w[0], w[1]), prmt<0x7362>(w[2], w[3])};
      const uint32_t turned[4] = {prmt<0x5410>(lower[0], lower[1]), prmt<0x7632>(lower[0], lower[1]),
                                  prmt<0x5410>(upper[0], upper[1]), prmt<0x7632>(upper[0], upper[1])};
#pragma unroll
      for (int j = 0; j < 4; ++j) *reinterpret_cast<uint32_t*>(byte_at(tile, output_of(i) + j, term_of(i))) = turned[j];
    }
  }
};

// x and weight say whether rows have whole packs of 16 bytes, for a weight that is not by terms of 4.
struct Aligned {
  bool x, weight;
};

template <bool kByTerms>
__device__ __forceinline__ void multiply_tiles(const Products& p, const Aligned& aligned) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int64_t down = (p.tokens + kSide - 1) / kSide;  // neighbouring blocks share the weight
  const int64_t token = blockIdx.x % down * kSide, output = blockIdx.x / down * kSide;
  const int rows = static_cast<int>(p.tokens - token < kSide ? p.tokens - token : kSide);
  const int columns = static_cast<int>(p.outputs - output < kSide ? p.outputs - output : kSide);
  const int64_t tiles = (p.deep + kDeep - 1) / kDeep;
  Turner turner;
  const auto left_tile = [&](int64_t i) { return shared + i % kStages * 2 * kTileBytes; };
  const auto right_tile = [&](int64_t i) { return left_tile(i) + kTileBytes; };
  const auto begin_copy = [&](int64_t i) {
    const int64_t k = i * kDeep;
    if (i < tiles) {
      load_rows(left_tile(i), p.x + token * p.deep + k, p.deep, rows, p.deep - k, aligned.x);
      if constexpr (kByTerms)
        load_rows(right_tile(i), p.weight + output * p.deep + k, p.deep, columns, p.deep - k, aligned.weight);
    }
    cp_async_commit();
  };
  const auto load_turner = [&](int64_t i) {
    const int64_t k = i * kDeep;
    turner.load(p.weight + k * p.outputs + output, p.outputs, columns, p.deep - k, aligned.weight);
  };

  const int warp = threadIdx.x / 32, row = warp / 4 * 16 * kM, column = warp % 4 * 8 * kN;
  int32_t sums[kM][kN][4] = {};
  for (int i = 0; i < kStages - 1; ++i) begin_copy(i);
  if (!kByTerms && tiles > 0) load_turner(0), turner.store(right_tile(0));
  for (int64_t i = 0; i < tiles; ++i) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    begin_copy(i + kStages - 1);
    if (!kByTerms && i + 1 < tiles) load_turner(i + 1);
    const unsigned left = Tile::left(reinterpret_cast<Half*>(left_tile(i)), row);
    const unsigned right = Tile::at(Tile::right(reinterpret_cast<Half*>(right_tile(i))), 0, column);
    if (row < rows)
#pragma unroll
      for (int step = 0; step < kDeep / 32; ++step) {
        uint32_t of_left[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) ldmatrix_x4(of_left[m], Tile::at(left, step * Tile::kStep, 16 * m));
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
          uint32_t of_right[4];
          ldmatrix_x4(of_right, Tile::at(right, step * Tile::kStep, 8 * n));
          unrolled<kM, 2>(
              [&](int m, int j) { mma_m16n8k32(sums[m][n + j], of_left[m], {of_right[2 * j], of_right[2 * j + 1]}); });
        }
      }
    if (!kByTerms && i + 1 < tiles) turner.store(right_tile(i + 1));
  }
  cp_async_wait<0>();
  const bool has_pairs = p.is_half && p.outputs % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % 4 == 0;
  unrolled<kM, kN, 2>([&](int m, int n, int half) {
    const int lane = threadIdx.x % 32, r = row + 16 * m + 8 * half + lane / 4, c = column + 8 * n + lane % 4 * 2;
    const int64_t at = token + r, to = output + c;
    const int32_t (&pair)[2] = {sums[m][n][2 * half], sums[m][n][2 * half + 1]};
    if (r >= rows || c >= columns) return;
    if (has_pairs) {
      product::store_pair(static_cast<Half*>(p.out) + at * p.outputs + to, p.result(at, to, pair[0]),
                          p.result(at, to + 1, pair[1]));
    } else {
      p.store(at, to, pair[0]);
      if (c + 1 < columns) p.store(at, to + 1, pair[1]);
    }
  });
}

template <bool kByTerms>
__global__ void __launch_bounds__(kThreads)
    tile_kernel(const __grid_constant__ Products p, const __grid_constant__ Aligned aligned) {
  if (has_instructions_of(80)) multiply_tiles<kByTerms>(p, aligned);
}

// Returns false, and launches nothing, if the GPU lacks the instructions.
template <bool kByTerms>
bool launch_tiles(Call& call, const Products& p) {
  const auto kernel = tile_kernel<kByTerms>;
  if (!is_compiled_for(80, kernel) || Gpu().dynamic_bytes() < kBytes) return false;
  const int64_t down = (p.tokens + kSide - 1) / kSide, across = (p.outputs + kSide - 1) / kSide;
  launch(call, kernel, down * across, kThreads, kBytes, p,
         Aligned{p.x_has_packs(16), p.weight_has_packs(kByTerms ? 16 : 4)});
  return true;
}

}  // namespace msops::int8_matmul

#endif
