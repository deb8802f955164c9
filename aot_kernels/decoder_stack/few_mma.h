// Attends to keys and values of float16 by tensor cores: a warp takes 16 rows of keys and up to 8 queries at once.
#pragma once

#include "../common/gpu/ldmatrix.h"
#include "few_heads.h"

namespace msops::decoder_stack {

template <int kWarps>
struct MmaAttention {
  static constexpr int kRows = 16, kPairs = kMostHeadSize / 16;  // kPairs: of 8 features
  Heads<Half, kWarps>& h;
  float most = kLowest, total = 0;  // of query lane / 4; total: of the keys that the lane has
  float sums[2 * kPairs][2] = {};   // of query lane / 4 and feature 8 i + 2 (lane % 4), + 1

  // Returns the scores of 8 rows, at row 2 (lane % 4), + 1.
  __device__ __forceinline__ void score(float (&scores)[4], const Half* keys, int rows) const {
    const int bytes = h.s.head_bytes(), row = h.w.lane / 4, at = h.w.lane % 4 * 16;
    const unsigned char* const key = reinterpret_cast<const unsigned char*>(keys + row * h.s.head_size);
    const unsigned char* const query = reinterpret_cast<const unsigned char*>(h.query(row));
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < (kPairs + 1) / 2; ++i) {
      if (64 * i >= bytes) break;
      const int from = 64 * i + at;
      const uint4 a = from < bytes ? *reinterpret_cast<const uint4*>(query + from) : zero;
      const uint4 b = from < bytes && row < rows ? *reinterpret_cast<const uint4*>(key + from) : zero;
      multiply_add<Half>(scores, {a.x, a.z, a.y, a.w}, zero, b);
    }
  }

  // Takes up to 16 rows, of which the query sees those below its limit.
  __device__ __forceinline__ void attend(const Half* keys, const Half* values, int rows, int limit) {
    const int size = h.s.head_size, lane = h.w.lane;
    float scores[2][4] = {};
    score(scores[0], keys, rows);
    score(scores[1], keys + 8 * size, rows - 8);
    bool sees[2][2];
    float higher = most;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 8 * i + lane % 4 * 2 + j;
        sees[i][j] = row < rows && row < limit;
        scores[i][j] *= h.s.scale;
        if (sees[i][j]) higher = fmaxf(higher, scores[i][j]);
      }
    higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
    higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
    const float before = Activations<Half>::exp(most - higher);
    most = higher, total *= before;
    uint32_t weights[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_rows[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        of_rows[j] = sees[i][j] ? rounded<Half>(Activations<Half>::exp(scores[i][j] - higher)) : 0;
      total += of_rows[0] + of_rows[1];
      weights[2 * i] = word_of<Half>(of_rows);
    }
    // Rows that are not there have weight 0, and another row's values.
    const unsigned row = min(lane % 16, rows - 1) * size;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (16 * i >= size) break;
      uint32_t words[4];
      ldmatrix_x4_trans(words, shared_address(values + row + min(16 * i + lane / 16 * 8, size - 8)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float (&to)[2] = sums[2 * i + j];
        float all[4] = {to[0] * before, to[1] * before, 0, 0};  // there are no queries from 8 on
        mma_m16n8k16(all, weights, {words[2 * j], words[2 * j + 1]});
        to[0] = all[0], to[1] = all[1];
      }
    }
  }

  // Leaves the warps' parts in shared memory.
  __device__ void attend(const Item& item) {
    const int size = h.s.head_size, q = h.w.lane / 4;
    h.for_tiles(item, [&](const Half* keys, const Half* values, int rows) {
#pragma unroll 1
      for (int first = kRows * h.w.warp; first < rows; first += kRows * kWarps)
        attend(keys + first * size, values + first * size, min(rows - first, kRows), kRows);
    });
    if (item.is_last && h.w.warp == kWarps - 1)  // this warp has the fewest rows
      attend(h.fresh(0, 0), h.fresh(1, 0), h.s.length, h.place(item, q) + 1);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (q >= item.queries) return;
    float* const to = h.part(h.w.warp, q);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i)
      if (8 * i < size) *reinterpret_cast<float2*>(to + 8 * i + h.w.lane % 4 * 2) = {sums[i][0], sums[i][1]};
    if (h.w.lane % 4 == 0) to[size] = most, to[size + 1] = total;
  }
};

}  // namespace msops::decoder_stack
