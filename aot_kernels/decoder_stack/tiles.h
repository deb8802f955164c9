// Attention by tiles of queries, for many new tokens: the kernels of flash_attention read the cached rows that count
// and the new ones where they lie one after another.
#pragma once

#include "../flash_attention/problem.h"
#include "stack.h"

namespace msops::decoder_stack {

// Space has q, o, lse and, where there is a cache, the rows of keys and values, and how many each text has.
template <typename T, typename Space>
flash_attention::Attention<T> attention_of(const Stack<T>& s, const Layer<T>& layer, const Space& space) {
  const int64_t rows = s.length + (s.has_cache ? s.room : 0);
  flash_attention::Attention<T> a{};
  a.batch = s.batch, a.heads = s.heads, a.kv_heads = s.kv_heads, a.queries = a.query_rows = s.length;
  a.keys = a.key_rows = rows, a.width = a.value_width = s.head_size;
  a.q = space.q, a.k = s.has_cache ? space.keys : layer.k, a.v = s.has_cache ? space.values : layer.v;
  a.out = space.o, a.lse = space.lse;
  a.of_q = a.of_out = {s.length * s.of_heads(), s.head_size, s.of_heads()};
  a.of_k = a.of_v = {rows * s.of_kv_heads(), s.head_size, s.of_kv_heads()};
  a.of_lse = {s.heads * s.length, s.length, 1};
  a.scale = s.scale(), a.left = -1, a.right = 0, a.splits = 1;
  a.kv_lengths = s.has_cache ? space.lengths : nullptr;
  return a;
}

}  // namespace msops::decoder_stack
