// Attends to keys and values of float16 by tensor cores: a warp takes 16 rows of keys and up to 8 queries at once.
#pragma once

#include "../common/gpu/ldmatrix.h"
#include "few_heads.h"

namespace msops::decoder_stack {

template <int kMost>
struct MmaAttention {
  static constexpr int kWarps = warps_for(kMost), kRows = 16, kPairs = kMostHeadSize / 16;  // kPairs: of 8 features
  Heads<Half, kMost>& h;
  float most = kLowest, total = 0;  // of query lane / 4; total: of the keys that the lane has
  float sums[2 * kPairs][2] = {};   // of query lane / 4 and feature 8 i + 2 (lane % 4), + 1

  // Adds the scores of rows 8 i + 2 (lane % 4), + 1 to scores[i]. Loads of 64 features come before their products.
  __device__ __forceinline__ void score(float (&scores)[2][4], const Half* keys, int rows) const {
    const int bytes = h.s.head_bytes(), row = h.w.lane / 4, at = h.w.lane % 4 * 16;
    const unsigned char* const key = reinterpret_cast<const unsigned char*>(keys + row * h.s.head_size);
    const unsigned char* const query = reinterpret_cast<const unsigned char*>(h.query(row));
#pragma unroll
    for (int begin = 0; begin < 16 * kPairs; begin += 64) {
      if (2 * begin >= bytes) break;
      uint4 a[2], b[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int from = 2 * begin + 64 * j + at;
        const auto load = [&](const unsigned char* bytes_of_row, bool is_there) {
          return is_there && from < bytes ? *reinterpret_cast<const uint4*>(bytes_of_row + from) : uint4{0, 0, 0, 0};
        };
        a[j] = load(query, true);
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i][j] = load(key + i * 8 * h.s.head_bytes(), row + 8 * i < rows);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          multiply_add<Half>(scores[i], {a[j].x, a[j].z, a[j].y, a[j].w}, {0, 0, 0, 0}, b[i][j]);
    }
  }

  // Takes up to 16 rows, of which the query sees those below its limit.
  __device__ __forceinline__ void attend(const Half* keys, const Half* values, int rows, int limit) {
    const int size = h.s.head_size, lane = h.w.lane;
    float scores[2][4] = {};
    score(scores, keys, rows);
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
    constexpr int kAhead = 4;
#pragma unroll
    for (int first = 0; first < kPairs; first += kAhead) {
      if (16 * first >= size) break;
      uint32_t words[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        ldmatrix_x4_trans(words[i], shared_address(values + row + min(16 * (first + i) + lane / 16 * 8, size - 8)));
#pragma unroll
      for (int i = 0; i < 2 * kAhead; ++i) {
        float (&to)[2] = sums[2 * first + i];
        float all[4] = {to[0] * before, to[1] * before, 0, 0};  // there are no queries from 8 on
        mma_m16n8k16(all, weights, {words[i / 2][i % 2 * 2], words[i / 2][i % 2 * 2 + 1]});
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
      attend(h.fresh(0, 0), h.fresh(1, 0), h.w.length(), h.place(item, q) + 1);
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
