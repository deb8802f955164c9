// The mask as bits, for the kernels for tensor cores of sm_90a, and the kernels that pack it.
//
// A warp of those kernels has sums of 16 rows and of columns in parts of 64. A word of MaskBits has the bits of one
// thread's sums of a part (see mma_tiles.h): bit 16 half + 2 n + k says whether row lane / 4 + 8 half does not see
// column 8 n + 2 (lane % 4) + k. So a warp reads 128 neighbouring bytes for 16 x 64 sums. Forward, rows are queries and
// columns keys; in the transposed products of the gradient, rows are keys and columns queries.
#pragma once

#include "../common/scratch.h"
#include "problem.h"

namespace msops::flash_attention {

struct MaskBits {
  static constexpr int64_t kRows = 16, kColumns = 128;  // of a block, which has two parts

  uint32_t* words;                            // (batch, head, part, block of rows, lane)
  int64_t batches, heads, parts, row_blocks;  // the lengths of these axes; 1 along those that the mask lacks

  // Describes the bits of the mask whose strides `a` has. Both may have no data.
  template <typename T>
  static MaskBits of(const Attention<T>& a, bool transposed, uint32_t* words = nullptr) {
    const int64_t queries = a.mask_query ? a.queries : 1, keys = a.mask_key ? a.keys : 1;
    const int64_t rows = transposed ? keys : queries, columns = transposed ? queries : keys;
    return {words, a.mask_batch ? a.batch : 1, a.mask_head ? a.heads : 1,
            columns > 1 ? 2 * parts_of(columns, kColumns) : 1, parts_of(rows, kRows)};
  }

  // Returns whether a pass might use the bits of a mask: whether wgmma.h might take it.
  template <typename T>
  static bool are_used(const Attention<T>& a, bool transposed) {
    const int64_t widest = most(a.width, a.value_width);
    return std::is_same<T, Half>::value && least(a.width, a.value_width) > 0 && (a.width | a.value_width) % 8 == 0 &&
           widest <= (transposed ? 128 : 256);
  }

  // Returns the number of words, or 2^61 if there are more.
  int64_t size() const { return size_of({batches, heads, parts, row_blocks, 32}); }

  MSOPS_BOTH int64_t part_stride() const { return parts > 1 ? row_blocks * 32 : 0; }
  MSOPS_BOTH int64_t head_stride() const { return heads > 1 ? parts * row_blocks * 32 : 0; }
  MSOPS_BOTH int64_t batch_stride() const { return batches > 1 ? heads * parts * row_blocks * 32 : 0; }

  // Returns where the words of the block of rows that has row `row`, or of the last block, begin.
  MSOPS_BOTH int64_t first_word(int64_t b, int64_t h, int64_t row) const {
    return b * batch_stride() + h * head_stride() + least(row / kRows, row_blocks - 1) * 32;
  }
};

}  // namespace msops::flash_attention

#ifdef __CUDACC__

#include "../common/gpu/unrolled.h"
#include "../common/launch.h"

namespace msops::flash_attention {

// HiddenSums tells which of a thread's sums, of 16 rows and 8 kN columns, the mask hides. Without kHasMask it hides
// nothing.
template <bool kHasMask, int kN>
struct HiddenSums {
  static_assert(kN % 8 == 0, "columns are whole parts");
  uint32_t words[kN / 8];

  // Reads the words from `first` on, which a warp of queries or keys shares, of the parts from part `part` on.
  __device__ __forceinline__ HiddenSums(const MaskBits& bits, int64_t first, int part) {
    if constexpr (kHasMask) {
      const uint32_t* const from = bits.words + first + threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) words[i] = __ldg(from + (part + i) * bits.part_stride());
    }
  }

  // Sets hidden ones of these sums to `value`; if they have fewer columns, they begin with part `first`.
  template <int kSums>
  __device__ __forceinline__ void hide(float (&x)[1][kSums][4], float value, int first = 0) const {
    if constexpr (kHasMask) {
      uint32_t any = 0;
#pragma unroll
      for (int i = 0; i < kSums / 8; ++i) any |= words[first + i];
      if (!__any_sync(~0u, any != 0)) return;
      unrolled<kSums / 8, 2, 8, 2>([&](int i, int half, int n, int k) {
        if (words[first + i] >> (16 * half + 2 * n + k) & 1) x[0][8 * i + n][2 * half + k] = value;
      });
    }
  }
};

constexpr int kPackThreads = 128;

// Returns 4 bytes of the mask, 0 or 1 each, of keys from key j on.
__device__ __forceinline__ uint32_t masked_keys(const Attention<Half>& a, int64_t row, int64_t j, bool aligned) {
  const bool* const from = a.mask + row + j * a.mask_key;
  if (aligned) return j < a.keys ? *reinterpret_cast<const uint32_t*>(from) : 0;
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (j + k < a.keys) bytes |= static_cast<uint32_t>(from[k * a.mask_key]) << 8 * k;
  return bytes;
}

// Packs the bits of queries as rows. A warp takes a block of 16 x 128. Where `aligned`, four keys are a word.
__global__ void __launch_bounds__(kPackThreads)
    pack_mask(const Attention<Half> a, const MaskBits to, int64_t count, bool aligned) {
  constexpr int kWarps = kPackThreads / 32;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int64_t part_pairs = (to.parts + 1) / 2;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += int64_t{gridDim.x} * kWarps) {
    const int64_t pair = i % part_pairs, rows = i / part_pairs % to.row_blocks, outer = i / part_pairs / to.row_blocks;
    const int64_t b = outer / to.heads, h = outer % to.heads;
    uint32_t bytes[16], own[2] = {};  // `own` has the thread's bits of two parts, of its two rows
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const int64_t query = rows * MaskBits::kRows + r;
      const int64_t row = b * a.mask_batch + h * a.mask_head + query * a.mask_query;
      bytes[r] = query < a.queries ? masked_keys(a, row, pair * MaskBits::kColumns + 4 * lane, aligned) : 0;
    }
    // The warp votes on keys 4 l + s, l = 0 to 31, at once. Key 8 n + 2 quad + k is that of l = 2 n + quad / 2 and
    // s = 2 (quad % 2) + k.
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      uint32_t votes[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) votes[s] = __ballot_sync(~0u, bytes[r] >> 8 * s & 1);
      const uint32_t even = (quad % 2 ? votes[2] : votes[0]) >> quad / 2 & 0x55555555;
      const uint32_t odd = (quad % 2 ? votes[3] : votes[1]) >> quad / 2 & 0x55555555;
      if (r % 8 == lane / 4) own[r / 8] = even | odd << 1;
    }
    uint32_t* const words = to.words + to.first_word(b, h, rows * MaskBits::kRows) + lane;
    words[2 * pair * to.part_stride()] = (own[0] & 0xffff) | own[1] << 16;
    if (to.parts > 1) words[(2 * pair + 1) * to.part_stride()] = own[0] >> 16 | (own[1] & 0xffff0000);
  }
}

// Packs the bits of keys as rows. A block of threads takes 128 keys and 128 queries, of which a warp reads 32.
__global__ void __launch_bounds__(kPackThreads)
    pack_transposed_mask(const Attention<Half> a, const MaskBits to, int64_t count, bool aligned) {
  __shared__ uint32_t
      bytes[4][4][32];  // (queries / 32, quad, keys / 4): bit 2 n + k of a byte is query 8 n + 2 quad + k
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t part_pairs = (to.parts + 1) / 2, tiles = (to.row_blocks + 7) / 8;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t tile = i % tiles, pair = i / tiles % part_pairs, outer = i / tiles / part_pairs;
    const int64_t b = outer / to.heads, h = outer % to.heads, key = tile * 128;
    uint32_t own[4] = {};
#pragma unroll
    for (int r = 0; r < 32; ++r) {
      const int64_t query = pair * MaskBits::kColumns + 32 * warp + r;
      const int64_t row = b * a.mask_batch + h * a.mask_head + query * a.mask_query;
      const uint32_t four = query < a.queries ? masked_keys(a, row, key + 4 * lane, aligned) : 0;
      own[r % 8 / 2] |= four << (r / 8 * 2 + r % 2);
    }
    __syncthreads();
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) bytes[warp][quad][lane] = own[quad];
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = 2 * warp + half, first = 16 * block + lane / 4;  // of the 128 keys
      const int64_t row = key + 16 * block;
      if (row >= to.row_blocks * MaskBits::kRows) continue;
      const auto byte = [&](int level, int of_key) {
        return bytes[level][lane % 4][of_key / 4] >> of_key % 4 * 8 & 0xff;
      };
      uint32_t* const words = to.words + to.first_word(b, h, row) + lane;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int level = 2 * part;
        if (part == 0 || to.parts > 1)
          words[(2 * pair + part) * to.part_stride()] = byte(level, first) | byte(level + 1, first) << 8 |
                                                        byte(level, first + 8) << 16 | byte(level + 1, first + 8) << 24;
      }
    }
  }
}

// Packs the mask for a pass.
inline void launch_pack_mask(Call& call, const Attention<Half>& a, const MaskBits& to, bool transposed) {
  const uint64_t places = static_cast<uint64_t>(a.mask_batch | a.mask_head | a.mask_query | a.keys);
  const bool aligned = a.mask_key == 1 && (reinterpret_cast<uintptr_t>(a.mask) | places) % 4 == 0;
  const int64_t outer = to.batches * to.heads * ((to.parts + 1) / 2);
  const int64_t tiles = outer * (transposed ? parts_of(to.row_blocks, 8) : to.row_blocks);
  const int64_t blocks = transposed ? tiles : parts_of(tiles, kPackThreads / 32);
  launch(call, transposed ? pack_transposed_mask : pack_mask, least(blocks, INT32_MAX), kPackThreads, 0, a, to, tiles,
         aligned);
}

}  // namespace msops::flash_attention

#endif
