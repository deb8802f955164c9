// FewTokens is what the kernel for few tokens gets: the stack's tensors, the vectors by which its blocks tell each
// other their results, and how the work is dealt to blocks.
#pragma once

#include <cstdint>

#include "../common/dtype.h"
#include "../common/gpu/divisor.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "stack.h"

namespace msops::decoder_stack {

constexpr int kMostTokens = 16, kGroupRows = 8, kMostHeadSize = 128, kMostItems = 16;
constexpr int kStreamQueries = 4, kMmaQueries = 8;  // queries that attention takes at once

// Returns how many warps compute. Kernels are compiled for 1, up to 4 and up to 16 tokens; one token has no loops over
// tokens and no divisions by their number, which its chain of short steps would wait for.
constexpr MSOPS_BOTH int warps_for(int tokens) { return tokens > 4 ? 8 : 4; }

// kWordElements<T> elements are a word of 4 bytes, which travels with a tag of 4 bytes. A Unit is two words with tags.
template <typename T>
constexpr int kWordElements = 4 / sizeof(T);
template <typename T>
constexpr int kUnitElements = 8 / sizeof(T);

// Factors are numbers of type T, or of float beside float16.
template <typename T>
struct Factors {
  const void* data;
  bool is_wide;

  MSOPS_BOTH float operator[](int64_t i) const {
    return is_wide ? static_cast<const float*>(data)[i] : float(static_cast<const T*>(data)[i]);
  }
  MSOPS_BOTH int bytes(int count) const { return count * (is_wide ? 4 : static_cast<int>(sizeof(T))); }
  // Returns kUnitElements<T> factors from the i-th on, a multiple of that, rounded to T.
  __device__ __forceinline__ Pack<T, kUnitElements<T>> unit(int i) const {
    if (!is_wide) return load<kUnitElements<T>>(static_cast<const T*>(data) + i);
    const Pack<float, kUnitElements<T>> wide = load<kUnitElements<T>>(static_cast<const float*>(data) + i);
    return rounded_pack<T>(wide.values);
  }
  MSOPS_BOTH const void* at(int64_t i) const {
    return is_wide ? static_cast<const void*>(static_cast<const float*>(data) + i) : static_cast<const T*>(data) + i;
  }
};

// Blocks take a matrix by groups of 8 rows, and a group by tiles of 8 rows and `chunk` bytes of each. In a pair of
// matrices, a group is 4 rows of one, and 4 rows of the other.
template <typename T>
struct Matrix {
  const void* data;   // (layers, rows, columns), or (layers, 2, rows, columns)
  int rows, columns;  // rows: of one matrix of a pair
  bool is_pair;
  int chunk, stride;  // bytes of a row in a tile, and from a row to the next in shared memory

  MSOPS_BOTH int rows_of_group() const { return is_pair ? kGroupRows / 2 : kGroupRows; }
  MSOPS_BOTH int groups() const { return (rows - 1) / rows_of_group() + 1; }
  MSOPS_BOTH int row_bytes() const { return columns * static_cast<int>(sizeof(T)); }
  // Returns how many rows of each half of the tile there are.
  MSOPS_BOTH int rows_in(int group) const {
    const int left = rows - group * rows_of_group();
    return left < rows_of_group() ? left : rows_of_group();
  }
  // Returns whether the tile of a group has a row, and where the row is.
  MSOPS_BOTH bool has(int group, int row) const { return (is_pair ? row % 4 : row) < rows_in(group); }
  // Returns the number of the row among those of all layers.
  MSOPS_BOTH int64_t row_of_all(int layer, int group, int row) const {
    const int64_t of_pair = is_pair ? 2 * int64_t{layer} + row / 4 : layer;
    return of_pair * rows + group * rows_of_group() + (is_pair ? row % 4 : row);
  }
  MSOPS_BOTH const char* row(int layer, int group, int row) const {
    return static_cast<const char*>(data) + row_of_all(layer, group, row) * row_bytes();
  }
};

// Range is a part of something, from `begin` to `end`.
struct Range {
  int begin, end;

  MSOPS_BOTH int size() const { return end - begin; }
};

// Returns the part of n things that a block takes.
MSOPS_BOTH Range part_of(int n, int block, int blocks) {
  return {part_begin(n, block, blocks), part_begin(n, block + 1, blocks)};
}

template <typename T>
struct FewTokens {
  int layers, batch, length, width, heads, kv_heads, head_size, hidden;  // length: new tokens of each text
  int64_t room;                                                          // rows of the cache
  const T *x, *keys, *values, *qkv_bias;
  Factors<T> norm1, norm2, norm, q_norm, k_norm, cos, sin;
  const void* lengths;
  bool lengths_are_wide, has_table_of_text, interleaved;
  // What find_blocks has found: (batch, columns) and (batch), or null if the cache has no blocks.
  int32_t *tables, *counts;
  int64_t columns, rows_of_layer;  // rows_of_layer: of a cache in blocks
  Divisor by_block{1};
  float eps, scale, reciprocal_width;  // scale: of scores
  T *y, *k, *v;
  Matrix<T> matrices[kSteps];

  // Words with tags in global memory: the results of each step, for each token; o; and of parts of attention (token,
  // head, split, head_size + 2) sums, maximum and total.
  uint2 *results[kSteps], *of_attention, *of_parts;
  unsigned* failed;  // whether a block waited in vain

  Divisor by_group{1}, by_head_size{1};
  int splits, query_chunks, most_queries;                        // parts of a cache, and of the queries of a kv head
  int slots, slot_bytes, cache_rows, aux_bytes, groups_at_once;  // aux_bytes: of a layer's factors in shared memory
  int at_sums, at_tables, at_aux, at_residual, at_partial, at_work;  // bytes from the begin of shared memory
  int at_ring, at_factors[5], work_stride;                           // work_stride: bytes of a token's operand

  MSOPS_BOTH int tokens() const { return batch * length; }
  MSOPS_BOTH int group() const { return heads / kv_heads; }
  MSOPS_BOTH int queries() const { return group() * length; }
  MSOPS_BOTH int warps() const { return warps_for(tokens()); }
  MSOPS_BOTH int qkv_rows() const { return (heads + 2 * kv_heads) * head_size; }
  MSOPS_BOTH int items() const { return batch * kv_heads * query_chunks * splits; }
  MSOPS_BOTH int head_bytes() const { return head_size * static_cast<int>(sizeof(T)); }
  MSOPS_BOTH int rows_of_table() const { return has_table_of_text ? tokens() : length; }

  // Returns how many rows of a text's cache count.
  MSOPS_BOTH int cached(int text) const {
    if (!lengths) return 0;
    const int64_t rows =
        lengths_are_wide ? static_cast<const int64_t*>(lengths)[text] : static_cast<const int32_t*>(lengths)[text];
    return static_cast<int>(rows < 0 ? 0 : rows < room ? rows : room);
  }
  // Returns which row of a layer's cache in blocks is row j of a text.
  __device__ int64_t row_in_blocks(int text, int j) const {
    int row;
    const int column = by_block.divide(j, &row);
    return int64_t{tables[text * columns + column]} * by_block.value() + row;
  }
  // Returns how many cached rows each split takes, of a text that has `cached`.
  MSOPS_BOTH int rows_of_split(int cached) const {
    constexpr int kLeast = 16, kMultiple = 4;
    const int rows = ((cached + splits - 1) / splits + kMultiple - 1) / kMultiple * kMultiple;
    return rows < kLeast ? kLeast : rows;
  }
  MSOPS_BOTH int splits_used(int cached) const {
    const int rows = rows_of_split(cached), used = (cached + rows - 1) / rows;
    return used < 1 ? 1 : used;
  }
};

// Item is what a block does of attention: some queries that share a head of keys, and a part of the cache. The last
// part of a cache has the new rows, too.
struct Item {
  int text, kv_head, first_query, queries, split;
  Range rows;
  bool is_used, is_last;

  Item() = default;
  template <typename T>
  MSOPS_BOTH Item(const FewTokens<T>& s, int item, const int* cached) {
    split = item % s.splits, item /= s.splits;
    first_query = item % s.query_chunks * s.most_queries, item /= s.query_chunks;
    kv_head = item % s.kv_heads, text = item / s.kv_heads;
    const int left = s.queries() - first_query;
    queries = left < s.most_queries ? left : s.most_queries;
    const int all = cached[text], each = s.rows_of_split(all), used = s.splits_used(all);
    is_used = split < used, is_last = split == used - 1;
    rows = {split * each < all ? split * each : all, (split + 1) * each < all ? (split + 1) * each : all};
  }
};

// Work is what the launch leaves to a block, in all layers. It is in shared memory.
struct Work {
  int cached[kMostTokens];  // rows of each text's cache
  int splits[kMostTokens];  // parts of each text's cache
  Range mine[kSteps];       // groups of each matrix
  int items;
  Item of_item[kMostItems];

  // All threads of the block call this, before a barrier of all.
  template <typename T>
  MSOPS_BOTH void find(const FewTokens<T>& s, int thread, int block, int blocks) {
    if (thread < kSteps) mine[thread] = part_of(s.matrices[thread].groups(), block, blocks);
    if (thread < s.batch) {
      cached[thread] = s.cached(thread);
      splits[thread] = s.splits_used(cached[thread]);
    }
  }
  // One thread calls this, after a barrier.
  template <typename T>
  MSOPS_BOTH void find_items(const FewTokens<T>& s, int block, int blocks) {
    items = 0;
    for (int i = block; i < s.items(); i += blocks) {
      const Item item(s, i, cached);
      if (item.is_used) of_item[items++] = item;
    }
  }
  MSOPS_BOTH bool has(Step step) const { return mine[step].size() > 0; }
};

}  // namespace msops::decoder_stack
