// Products of attention's tiles by wgmma (see shared/product/wgmma_tiles.h), for sm_90a.
#pragma once

#include "../shared/product/wgmma_tiles.h"
#include "delta.h"
#include "mma_forward.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

using product::clear_rows, product::store_aligned, product::wgmma_blocks;
using product::Ring, product::SharedArray, product::SharedMemory, product::SharedTile, product::Stages;

// Begins a group of products x = a b^T, of 64 rows of one tile and the rows of another.
template <int kN, int kRowsOfA, int kRowsOfB, int kWidth>
__device__ __forceinline__ void begin_product(float (&x)[kN][4], SharedTile<kRowsOfA, kWidth> a,
                                              SharedTile<kRowsOfB, kWidth> b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) wgmma_k16<0>(x, a.columns(step), b.columns(step), step > 0);
  wgmma_commit_group();
}

// Begins a group of products x = a b^T, where a is in registers.
template <int kN, int kK, int kRows>
__device__ __forceinline__ void begin_product(float (&x)[kN][4], const uint32_t (&a)[kK][4],
                                              SharedTile<kRows, 16 * kK> b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK; ++step) wgmma_k16<0>(x, a[step], b.columns(step), step > 0);
  wgmma_commit_group();
}

// Begins a group of products x += a b, or x = a b, where a is in registers, and b has 16 kK rows.
template <int kN, int kK, typename Tile>
__device__ __forceinline__ void begin_product(float (&x)[kN][4], const uint32_t (&a)[kK][4], Tile b, bool adds) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK; ++step) wgmma_k16<1>(x, a[step], b.transposed_rows(step), step > 0 || adds);
  wgmma_commit_group();
}

// Begins a group of products x = a^T b of two boxes.
template <int kRows>
__device__ __forceinline__ void begin_transposed(float (&x)[8][4], SharedTile<kRows, 64> a, SharedTile<kRows, 64> b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step)
    wgmma_m64n64k16<1, 1>(x, a.transposed_rows(step), b.transposed_rows(step), step > 0);
  wgmma_commit_group();
}

// Loads a warp's operand from the first 16 rows of a box.
template <int kRows>
__device__ __forceinline__ void load_operand(uint32_t (&words)[4][4], SharedTile<kRows, 64> box) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) ldmatrix_x4(words[k], box.pack(lane % 16, 2 * k + lane / 16));
}

// Stores a warp's operand as the first 16 rows of a box.
template <int kRows>
__device__ __forceinline__ void store_operand(SharedTile<kRows, 64> box, const uint32_t (&words)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) stmatrix_x4(words[k], box.pack(lane % 16, 2 * k + lane / 16));
}

// Describes a tensor of rows to TMA, which copies boxes of `box` rows and 64 columns. Returns false if it cannot.
inline bool encode_rows(TensorMap* map, const Half* data, const Strides& strides, int64_t width, int64_t rows,
                        int64_t heads, int64_t batch, int box) {
  if (!rows_are_aligned(data, strides, width) || least(least(width, rows), least(heads, batch)) < 1) return false;
  // The stride of an axis of size 1 may be anything, such as 0, which TMA refuses.
  const int64_t head = heads > 1 ? strides.head : 8, of_batch = batch > 1 ? strides.batch : 8;
  const int64_t row = rows > 1 ? strides.row : 8;
  const TensorMap::Dimension dimensions[] = {{width, 1, 64}, {rows, row, box}, {heads, head, 1}, {batch, of_batch, 1}};
  return map->encode(data, dimensions);
}

}  // namespace msops::flash_attention

#endif
#endif
