// Tiles of float16 that TMA copies to shared memory, and products of them by wgmma, for sm_90a.
//
// A tile has boxes of 64 columns; a box has rows of 128 bytes, with TMA's swizzle. A warpgroup owns 64 rows of a
// product.
#pragma once

#include "delta.h"
#include "mma_forward.h"

#ifdef __CUDACC__

#include "../common/gpu/barrier.h"
#include "../common/gpu/mbarrier.h"
#include "../common/gpu/tma.h"
#include "../common/gpu/wgmma.h"

#if CUDART_VERSION >= 12000

namespace msops::flash_attention {

// Ring is a ring of stages with its mbarriers. Copy number c goes to stage c % kStages; it ends the phase c / kStages
// of `full`, and each warp that uses it arrives at `empty`.
template <int kStages>
struct Ring {
  unsigned data, barriers;
  int bytes;  // of a stage

  __device__ __forceinline__ unsigned stage(int copy) const { return data + copy % kStages * bytes; }
  __device__ __forceinline__ unsigned full(int copy) const { return barriers + copy % kStages * 16; }
  __device__ __forceinline__ unsigned empty(int copy) const { return full(copy) + 8; }
  __device__ __forceinline__ void init(int users, int makers = 1) const {
    for (int i = 0; i < kStages; ++i) mbarrier_init(full(i), makers), mbarrier_init(empty(i), users);
  }
  // Waits for a copy. `zero` is 0, but the compiler does not know that, so that the wait comes after what computes it.
  __device__ __forceinline__ void wait(int copy, int zero = 0) const {
    mbarrier_wait(full(copy), copy / kStages + zero);
  }
  __device__ __forceinline__ void release(int copy) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(copy));
  }
  // Begins to copy kBoxes boxes of kRows rows of a head.
  template <int kBoxes, int kRows>
  __device__ __forceinline__ void load(int copy, const TensorMap& map, int64_t row, int head, int batch) const {
    if (copy >= kStages) mbarrier_wait(empty(copy), copy / kStages - 1);
    mbarrier_arrive_expect_tx(full(copy), bytes);
    for (int box = 0; box < kBoxes; ++box)
      tma_load_5d(stage(copy) + box * (kRows * 128), full(copy), map, 64 * box, static_cast<int>(row), head, batch, 0);
  }
};

// Stores a warp's 16 rows of sums times `factor` of a row's half. Threads of a quad first exchange words, so that each
// stores packs of 16 bytes.
template <int kN>
__device__ __forceinline__ void store_packed(const float (&sums)[kN][4], const float (&factor)[2],
                                             const HalfRows<Half>& rows, int begin, int end) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = begin + 8 * half + lane / 4;
    Half* const to = rows[row];
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pair_of(sums[n + j][2 * half] * factor[half], sums[n + j][2 * half + 1] * factor[half]);
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j & apart) continue;
          const bool upper = quad & apart;
          const uint32_t other = __shfl_xor_sync(~0u, upper ? words[j] : words[j + apart], apart);
          if (upper) {
            words[j] = other;
          } else {
            words[j + apart] = other;
          }
        }
      const int column = (n + quad) * 8;
      if (row >= end || column >= rows.width) continue;
      Pack<Half, 8> pack;
      memcpy(&pack, words, sizeof pack);
      store(to + column, pack);
    }
  }
}

// Begins a group of products x = a b^T, of 64 rows of one tile and the rows of another, as addresses. A tile's boxes
// have a_rows or b_rows rows.
template <int kWidth, int kN>
__device__ __forceinline__ void begin_rows(float (&x)[kN][4], unsigned a, int a_rows, unsigned b, int b_rows) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step)
    wgmma_k16<0>(x, wgmma_matrix(a + step / 4 * (a_rows * 128) + step % 4 * 32),
                 wgmma_matrix(b + step / 4 * (b_rows * 128) + step % 4 * 32), step > 0);
  wgmma_commit_group();
}

// Begins a group of products x += a b, or x = a b, where b is a tile of 16 kK rows in boxes of b_rows rows.
template <int kN, int kK>
__device__ __forceinline__ void begin_columns(float (&x)[kN][4], const uint32_t (&a)[kK][4], unsigned b, int b_rows,
                                              bool adds) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK; ++step)
    wgmma_k16<1>(x, a[step], wgmma_transposed(b + step * (16 * 128), b_rows * 128), step > 0 || adds);
  wgmma_commit_group();
}

// Begins a group of products x = a^T b, where a and b are boxes of kK rows of 64.
template <int kK>
__device__ __forceinline__ void begin_transposed(float (&x)[8][4], unsigned a, unsigned b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK / 16; ++step)
    wgmma_m64n64k16<1, 1>(x, wgmma_transposed(a + step * (16 * 128), kK * 128),
                          wgmma_transposed(b + step * (16 * 128), kK * 128), step > 0);
  wgmma_commit_group();
}

// Stores a warp's operand of 16 rows to a box of rows of 64; the first of them is `row`.
__device__ __forceinline__ void store_operand(unsigned box, int row, const uint32_t (&words)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    stmatrix_x4(words[k], box + (row + lane % 16) * 128 + ((2 * k + lane / 16) ^ lane % 8) * 16);
}

// Sets a tile's rows from `inside` on to 0, if they may be anything: rows of other sequences, or those that kv_lengths
// hides. A whole warpgroup calls this; `barrier` is its own.
template <int kBoxes, int kRows>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int inside, bool may_be_anything, int barrier) {
  if (inside >= kRows || !may_be_anything) return;
  for (int i = threadIdx.x % 128; i < kBoxes * kRows * 8; i += 128)
    if (i / 8 % kRows >= inside) *reinterpret_cast<uint4*>(tile + i * 16) = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  bar_sync(barrier, 128);
}

// Describes a tensor of rows to TMA, which copies boxes of `box` rows and 64 columns. Returns false if it cannot.
inline bool encode_rows(TensorMap* map, const Half* data, const Strides& strides, int64_t width, int64_t rows,
                        int64_t heads, int64_t batch, int box) {
  if (!is_packed(data, strides, width) || least(least(width, rows), least(heads, batch)) < 1) return false;
  // The stride of an axis of size 1 may be anything, such as 0, which TMA refuses.
  const int64_t head = heads > 1 ? strides.head : 8, of_batch = batch > 1 ? strides.batch : 8;
  const int64_t row = rows > 1 ? strides.row : 8;
  const TensorMap::Dimension dimensions[] = {{width, 1, 64}, {rows, row, box}, {heads, head, 1}, {batch, of_batch, 1}};
  return map->encode(data, dimensions);
}

}  // namespace msops::flash_attention

#endif
#endif
