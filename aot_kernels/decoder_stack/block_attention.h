// A cache in blocks on a GPU. What block tables name is found once a call, so that kernels need not check it. Attention
// of few new tokens of a text to the blocks, in float16: mma_paged of paged_attention sums over parts of the cached
// rows, and finish_kernel adds up the parts and the new rows.
#pragma once

#ifdef __CUDACC__

#include "../paged_attention/mma.h"
#include "cached_attention.h"
#include "find_blocks.h"

namespace msops::decoder_stack::gpu {

// CachedBlocks are the cached rows as mma_paged reads them. Each text has `length` queries, which see all of them. Sums
// of a single part are stored as those of several are.
struct CachedBlocks : paged::Paged<Half, Half> {
  int64_t length;

  MSOPS_BOTH paged::Sequence sequence(int64_t b) const { return {b * length, length, lengths[b]}; }
  MSOPS_BOTH int64_t parts_of_sequence(const paged::Sequence& s) const {
    return paged::most(1, paged::parts_of(s.keys, part_length(s)));
  }
  MSOPS_BOTH paged::Span part(const paged::Sequence& s, int64_t number) const {
    const int64_t each = part_length(s);
    return {number * each, paged::least(s.keys, (number + 1) * each)};
  }
  MSOPS_BOTH bool has_results(const paged::Sequence&) const { return false; }

  MSOPS_BOTH int64_t parts_of_text(int64_t b) const { return parts_of_sequence(sequence(b)); }
  MSOPS_BOTH const float* stats_of(int64_t part, int64_t b, int64_t head, int64_t i) const {
    return partial_stats(part, sequence(b), b, i, head);
  }
  MSOPS_BOTH const float* sums_of(int64_t part, int64_t b, int64_t head, int64_t i) const {
    return partial_sums(part, sequence(b), b, i, head);
  }

 private:
  MSOPS_BOTH int64_t part_length(const paged::Sequence& s) const {
    constexpr int64_t kLeast = 128, kUnit = 64;
    const int64_t each = paged::parts_of(s.keys, parts);
    return paged::most(kLeast, paged::parts_of(each, kUnit) * kUnit);
  }
};

// The stack has what find_blocks found.
inline CachedBlocks blocks_of(const Stack<Half>& s, const Layer<Half>& layer, const Half* q, float* partial) {
  CachedBlocks rows{};
  rows.tokens = s.tokens(), rows.batch = s.batch, rows.heads = s.heads, rows.kv_heads = s.kv_heads;
  rows.width = rows.value_width = rows.v_width = s.head_size, rows.blocks = s.blocks, rows.block_size = s.block_size;
  rows.columns = s.table_columns, rows.group = s.group(), rows.most_split = rows.length = s.length;
  rows.q = q, rows.k = layer.keys, rows.v = layer.values;
  rows.block_tables = static_cast<const int32_t*>(s.tables.data);
  rows.lengths = static_cast<const int32_t*>(s.lengths.data);
  rows.scale = s.scale(), rows.left = rows.right = -1, rows.last_key = INT64_MAX;
  rows.partial = partial, rows.parts = cache_splits(s);
  return rows;
}

// Computes o, or returns false and does nothing if the GPU lacks the instructions.
template <int kWidth>
bool attend_to_blocks(Call& call, const Stack<Half>& s, const Layer<Half>& layer, const CachedBlocks& rows,
                      int64_t* plan, Half* o) {
  using Few = paged::MmaShape<kWidth, false, false>;
  using Many = paged::MmaShape<kWidth, true, false>;
  const bool are_few = s.group() * s.length <= paged::kFewRows;
  const auto attend = [&](auto shape) {
    using S = decltype(shape);
    if (!paged::has_mma<S, CachedBlocks>()) return false;
    const paged::Plan all = paged::mma_plan<S>(rows, plan, 1, INT64_MAX);
    paged::Plans plans{};
    plans.add(all), paged::launch_plans(call, rows, plans);
    return paged::launch_mma<S>(call, rows, all), true;
  };
  if (!(are_few ? attend(Few{}) : attend(Many{}))) return false;
  return finish<kWidth>(call, s, layer, rows, rows.q, o), true;
}

}  // namespace msops::decoder_stack::gpu

#endif
