// An item is what a block of a kernel for tensor cores takes at once: a tile of queries with the keys that they see, or
// a tile of keys with the queries that see them. Here is where item number i lies, and which rows of q, k and v it has:
//
//   kernels                                            number -> place    place -> rows
//   mma_forward, mma_backward_queries, wgmma_forward   Order              QueryItem
//   mma_backward_keys, wgmma_backward                  Order              KeyItem
//   mma_decode                                         SplitOrder         GroupItem
//
// These kernels count in 32 bits (see fits_tensor_cores); the plain ones count in 64, so they find their items by
// themselves. Whether an item is empty is only asked after all is computed:
// ptxas spills more registers around branches in between.
//
// The keys of an ExtendedAttention's items begin at multiples of 4, as its random words do.
#pragma once

#include "problem.h"

#ifdef __CUDACC__

namespace msops::flash_attention {

// Returns whether the numbers in which the kernels count have enough bits. Rows have up to 256 elements.
template <typename T>
bool fits_tensor_cores(const Attention<T>& a) {
  constexpr int64_t kMost = 1 << 28;
  const bool is_wide = most(a.width, a.value_width) > 256 || least(a.width, a.value_width) < 1;
  return !is_wide && a.queries <= kMost / a.group() && a.keys <= kMost && most(a.batch, a.heads) <= INT32_MAX;
}

// Order says which tile of which head an item is. The longest tiles of causal attention come first. Heads go in
// sections that are small enough for the L2 cache to hold what their blocks read.
template <typename N>
struct OrderOf {
  N heads, tiles, heads_at_once;
  bool last_first;

  struct Place {
    int b, h;
    N tile;
  };

  N count() const { return heads * tiles; }

  // Returns the place of item i, where each of the batch has so many heads.
  __device__ Place find(N i, N heads_of_batch) const {
    const N section = i / (heads_at_once * tiles), rest = i - section * heads_at_once * tiles;
    const N here = heads_of(section);
    const N tile = last_first ? tiles - 1 - rest / here : rest / here;
    const N head = section * heads_at_once + rest % here;
    return {static_cast<int>(head / heads_of_batch), static_cast<int>(head % heads_of_batch), tile};
  }

 private:
  __device__ N heads_of(N section) const {
    const N others = heads - section * heads_at_once;
    return others < heads_at_once ? others : heads_at_once;
  }
};
using Order = OrderOf<int64_t>;

// Returns the order of a pass's tiles, of which each head has `tiles`. The heads that run at once read `bytes` each.
template <typename N, typename Bytes>
MSOPS_BOTH OrderOf<N> order_of(N heads, N tiles, Bytes bytes, bool last_first) {
  constexpr Bytes kCache = 24 << 20;  // about half of an H200's L2 cache
  const N in_cache = static_cast<N>(kCache / (bytes + 1)), at_once = in_cache < 1 ? 1 : in_cache;
  return {heads, tiles, heads < at_once ? heads : at_once, last_first};
}

// SplitOrder is the order of items that share the keys of a head, so that blocks that read the same keys are
// neighbours. Its numbers have 32 bits, and the host divides where it can, since a block divides before it reads.
struct SplitOrder {
  unsigned kv_heads, group, tiles, splits;  // tiles and splits of each head of keys

  struct Place {
    int b, h;
    unsigned tile, split;
  };

  // Describes the items of so many rows each, at most 2^31 - 1 in all.
  template <typename A>
  static SplitOrder of(const A& a, int64_t rows) {
    const auto number = [](int64_t x) { return static_cast<unsigned>(x); };
    return {number(a.kv_heads), number(a.group()), number(parts_of(a.queries * a.group(), rows)), number(a.splits)};
  }

  __device__ __forceinline__ Place find(unsigned i) const {
    const unsigned head = i / (tiles * splits), rest = i - head * (tiles * splits), split = rest / tiles;
    const unsigned b = head / kv_heads;
    return {static_cast<int>(b), static_cast<int>(head - b * kv_heads), rest - split * tiles, split};
  }
};

template <typename A>
__device__ __forceinline__ Span whole_fours(Span keys) {
  if constexpr (A::kIsExtended) keys.begin -= keys.begin % 4;
  return keys;
}

// QueryItem is a tile of queries of head h, from i0 to i1 - 1, with the keys of head kv_head from begin to end - 1: all
// that any of these queries sees.
struct QueryItem {
  Sequence s;
  int b, h, kv_head, i0, i1, begin, end;

  template <typename A>
  static __device__ __forceinline__ QueryItem of(const A& a, int b, int h, int64_t i0, int tile) {
    return of(a, a.sequence(b), b, h, h / static_cast<int>(a.group()), i0, tile);
  }
  template <typename A>
  static __device__ __forceinline__ QueryItem of(const A& a, const Sequence& s, int b, int h, int kv_head, int64_t i0,
                                                 int tile) {
    QueryItem item{s, b, h, kv_head, static_cast<int>(i0), 0, 0, 0};
    item.i1 = static_cast<int>(least(item.i0 + tile, item.s.queries));
    const Span keys = whole_fours<A>(a.keys_of(item.s, {item.i0, item.i1}));
    item.begin = static_cast<int>(keys.begin), item.end = static_cast<int>(most(keys.begin, keys.end));
    return item;
  }
  // Returns the item of a number in an order, where tiles have so many queries.
  template <typename A>
  static __device__ __forceinline__ QueryItem find(const A& a, const Order& order, int64_t number, int tile) {
    const Order::Place at = order.find(number, a.heads);
    return of(a, at.b, at.h, at.tile * tile, tile);
  }
  __device__ __forceinline__ bool empty() const { return i0 >= i1; }

  // Return where query i or key j lies in a tensor.
  __device__ __forceinline__ int64_t query(const Strides& x, int64_t i) const {
    return x.offset(b, h, s.first_query + i);
  }
  __device__ __forceinline__ int64_t key(const Strides& x, int64_t j) const {
    return x.offset(b, kv_head, s.first_key + j);
  }
};

// KeyItem is a tile of keys of head kv_head, from j0 to j1 - 1, with the queries from begin to end - 1 of each head
// that reads them: all that see any of these keys. Keys from `keys` on, which kv_lengths hides, have the gradient 0.
struct KeyItem {
  Sequence s;
  int b, kv_head, j0, j1, keys, begin, end;

  template <typename T>
  __device__ __forceinline__ KeyItem(const Attention<T>& a, int b_, int kv_head_, int64_t first, int tile)
      : s(a.sequence(b_)), b(b_), kv_head(kv_head_), j0(static_cast<int>(first)), keys(static_cast<int>(s.keys)) {
    j1 = static_cast<int>(least(j0 + tile, a.is_packed() ? s.keys : a.keys));
    Span queries{0, 0};
    if (j0 < keys) queries = a.queries_of(s, {j0, least(j1, keys)});
    begin = static_cast<int>(least(queries.begin, queries.end)), end = static_cast<int>(queries.end);
  }
  __device__ __forceinline__ bool empty() const { return j0 >= j1; }

  // Return where query i of head h or key j lies in a tensor.
  __device__ __forceinline__ int64_t query(const Strides& x, int64_t h, int64_t i) const {
    return x.offset(b, h, s.first_query + i);
  }
  __device__ __forceinline__ int64_t key(const Strides& x, int64_t j) const {
    return x.offset(b, kv_head, s.first_key + j);
  }
};

// GroupItem is a tile of the rows that are the queries of all heads that read the same keys, one head after another. It
// has the rows from `first` on, of `all`, and the keys from begin to end - 1: a split of all that any query sees.
// Splits begin at multiples of kSplit keys, counted from the first of these.
struct GroupItem {
  Sequence s;
  int b, kv_head, first_head, first, all, begin, end;

  template <int kRows, int kSplit, typename A>
  static __device__ __forceinline__ GroupItem of(const A& a, const SplitOrder& order, const SplitOrder::Place& at) {
    const int group = static_cast<int>(order.group);
    GroupItem item{a.sequence(at.b), at.b, at.h, at.h * group, static_cast<int>(at.tile) * kRows, 0, 0, 0};
    item.all = static_cast<int>(item.s.queries) * group;
    const Span keys = whole_fours<A>(a.keys_of(item.s, {0, item.s.queries}));
    item.begin = static_cast<int>(keys.begin), item.end = static_cast<int>(most(keys.begin, keys.end));
    const auto parts = static_cast<unsigned>(item.end - item.begin + kSplit - 1) / kSplit;
    const int next = item.begin + static_cast<int>(parts * (at.split + 1) / order.splits) * kSplit;
    item.begin += static_cast<int>(parts * at.split / order.splits) * kSplit, item.end = std::min(item.end, next);
    return item;
  }
  __device__ __forceinline__ bool empty() const { return first >= all; }
  __device__ __forceinline__ bool has(int row) const { return first + row < all; }
  __device__ __forceinline__ int head(int row) const {
    return first_head + (first + row) / static_cast<int>(s.queries);
  }
  __device__ __forceinline__ int query(int row) const { return (first + row) % static_cast<int>(s.queries); }
  __device__ __forceinline__ int64_t key(const Strides& x, int64_t j) const {
    return x.offset(b, kv_head, s.first_key + j);
  }
};

}  // namespace msops::flash_attention

#endif
