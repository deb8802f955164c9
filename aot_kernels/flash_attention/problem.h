// Attention and AttentionGradient say what a call of flash attention reads, writes and must compute. Kernels get them
// by value.
//
//   x_ij  = scale q_i k_j, or softcap tanh(scale q_i k_j / softcap)     for keys j that query i sees
//   lse_i = log sum_j e^x_ij,   p_ij = e^(x_ij - lse_i),   out_i = sum_j p_ij v_j
//
// A query that sees no key has out_i = 0 and lse_i = -infinity. The gradient needs no other sum than
//
//   delta_i = sum_c dout_ic out_ic - dlse_i,   dx_ij = p_ij (dout_i v_j - delta_i)
//   dv_j = sum_i p_ij dout_i,   dq_i = sum_j dz_ij k_j,   dk_j = sum_i dz_ij q_i,   dz_ij = scale dx_ij dx_ij/dz_ij
//
// where the last factor is 1 without softcap, and 1 - (x_ij / softcap)^2 with it.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace msops::flash_attention {

// The strides of a tensor of rows (batch, head, row), in elements. The elements of a row are contiguous.
struct Strides {
  int64_t batch, head, row;

  MSOPS_BOTH int64_t offset(int64_t b, int64_t h, int64_t i) const { return b * batch + h * head + i * row; }
};

struct Span {
  int64_t begin, end;

  MSOPS_BOTH bool empty() const { return end <= begin; }
  MSOPS_BOTH int64_t size() const { return end > begin ? end - begin : 0; }
};

// Returns into how many parts of a length `part` the length is cut; the last one may be shorter.
MSOPS_BOTH constexpr int64_t parts_of(int64_t length, int64_t part) { return (length + part - 1) / part; }

// These differ from msops::min and max in that they have no NaN to keep, so they take one instruction.
MSOPS_BOTH int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
MSOPS_BOTH int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

// A Sequence is one of the batch. Its query i is row first_query + i of q, out and lse, its key j is row first_key + j
// of k and v.
struct Sequence {
  int64_t first_query, first_key;
  int64_t queries, keys;  // without the keys that kv_lengths hides

  // Query i stands at the place of key i + shift(), so that the last query stands at the last key.
  MSOPS_BOTH int64_t shift() const { return keys - queries; }
};

// Splits of the keys begin at multiples of this number of keys, counted from the first key that any query sees. Those
// of mma_decode begin at multiples of its own.
constexpr int64_t kSplitKeys = 128;

template <typename T>
struct Attention {
  using Element = T;
  using C = Compute<T>;
  static constexpr bool kIsExtended = false;  // see extended.h

  // The lengths of the longest sequence are `queries` and `keys`; query_rows and key_rows are the rows of a packed
  // tensor, which hold all sequences. Head h reads the keys of head h / group() of kv_heads.
  int64_t batch, heads, kv_heads, queries, keys, width, value_width;
  int64_t query_rows, key_rows;

  const T *q, *k, *v;  // rows of width, width, value_width
  T* out;              // rows of value_width
  C* lse;              // rows of 1
  Strides of_q, of_k, of_v, of_out, of_lse;

  C scale, softcap;     // softcap 0: none
  int64_t left, right;  // query i sees keys from i + shift - left to i + shift + right; -1: to the end. Causal: right 0

  const int32_t* kv_lengths;                            // (batch), or null
  const int32_t *cu_seqlens_q, *cu_seqlens_k;           // (batch + 1): where packed sequences begin, or null
  const bool* mask;                                     // true where a key is not seen, or null
  int64_t mask_batch, mask_head, mask_query, mask_key;  // the strides of mask; 0 along axes that it does not have

  // With few queries, the keys are split over blocks if `splits` is above 1. Each split writes its sums and statistics,
  // and another kernel adds them in order; mma_decode may do without it. The number of splits depends on the shapes
  // alone.
  int64_t splits;
  // (splits, sums (batch, heads, queries, value_width), statistics (batch, heads, queries, 2)). If the keys
  // are not split, wgmma_forward may count items with it.
  C* partial;

  MSOPS_BOTH int64_t group() const { return heads / kv_heads; }
  MSOPS_BOTH bool is_packed() const { return cu_seqlens_q != nullptr; }
  MSOPS_BOTH bool adds_to_logits() const { return false; }

  // Returns about how many multiply-adds all pairs of a query and a key take.
  double work() const {
    const double rows = static_cast<double>(batch) * static_cast<double>(heads) * static_cast<double>(queries);
    return rows * static_cast<double>(keys) * static_cast<double>(width + value_width + 20);
  }

  // Returns sequence b, which lies in the tensors whatever the lengths are.
  MSOPS_BOTH Sequence sequence(int64_t b) const {
    if (is_packed()) {
      const Span i = rows_in_sequence(cu_seqlens_q, b, query_rows), j = rows_in_sequence(cu_seqlens_k, b, key_rows);
      return {i.begin, j.begin, least(i.size(), queries), least(j.size(), keys)};
    }
    const int64_t length = kv_lengths ? kv_lengths[b] : keys;
    return {0, 0, queries, most(0, least(length, keys))};
  }

  // Returns the keys that query i sees, except for the mask.
  MSOPS_BOTH Span keys_of_query(const Sequence& s, int64_t i) const {
    const int64_t place = i + s.shift();
    return {left < 0 ? 0 : most(0, place - left), right < 0 ? s.keys : least(s.keys, place + right + 1)};
  }

  // Returns a range that has all keys which any of the queries i, at least one, sees.
  MSOPS_BOTH Span keys_of(const Sequence& s, Span i) const {
    return {keys_of_query(s, i.begin).begin, keys_of_query(s, i.end - 1).end};
  }

  // Returns a range that has all queries which see any of the keys j, at least one.
  MSOPS_BOTH Span queries_of(const Sequence& s, Span j) const {
    const int64_t first = j.begin - s.shift(), last = j.end - 1 - s.shift();  // the queries at these places
    return {right < 0 ? 0 : most(0, first - right), left < 0 ? s.queries : least(s.queries, last + left + 1)};
  }

  // Returns whether each of the queries i sees each of the keys j, so that no test of an element is needed.
  MSOPS_BOTH bool sees_all(const Sequence& s, Span i, Span j) const {
    const Span first = keys_of_query(s, i.begin), last = keys_of_query(s, i.end - 1);
    return mask == nullptr && last.begin <= j.begin && j.end <= first.end;
  }

  // Returns whether the mask hides key j from query i. Packed sequences have no mask.
  MSOPS_BOTH bool hides(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return mask != nullptr && mask[b * mask_batch + h * mask_head + i * mask_query + j * mask_key];
  }

  MSOPS_BOTH bool sees(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Span seen = keys_of_query(s, i);
    return seen.begin <= j && j < seen.end && !hides(b, h, i, j);
  }

  // Returns where split `split` puts sum_j e^(x_ij - max) v_j of a query.
  MSOPS_BOTH C* partial_sums(int64_t split, int64_t b, int64_t h, int64_t i) const {
    const int64_t rows = batch * heads * queries;
    return partial + split * rows * (value_width + 2) + ((b * heads + h) * queries + i) * value_width;
  }

  // Returns where split `split` puts max x_ij, or -infinity, and sum_j e^(x_ij - max) of a query.
  MSOPS_BOTH C* partial_stats(int64_t split, int64_t b, int64_t h, int64_t i) const {
    const int64_t rows = batch * heads * queries;
    return partial + split * rows * (value_width + 2) + rows * value_width + ((b * heads + h) * queries + i) * 2;
  }

  // Returns the part of a range of keys j that split `split` takes; it may be empty.
  MSOPS_BOTH Span part(Span j, int64_t split) const {
    const int64_t tiles = (j.size() + kSplitKeys - 1) / kSplitKeys;
    return {j.begin + tiles * split / splits * kSplitKeys,
            least(j.end, j.begin + tiles * (split + 1) / splits * kSplitKeys)};
  }

 private:
  static MSOPS_BOTH Span rows_in_sequence(const int32_t* cu_seqlens, int64_t b, int64_t rows) {
    const int64_t begin = most(0, least(cu_seqlens[b], rows));
    return {begin, most(begin, least(cu_seqlens[b + 1], rows))};
  }
};

// QuerySums are sums of dq in global memory, of a tile of queries each, as the threads of wgmma_backward.h have them. A
// sequence's tiles follow one another; a sequence of packed ones may skip one before them.
struct QuerySums {
  static constexpr int64_t kNumbers = 8192;  // of a tile

  float* numbers;                // (tiles, kNumbers), or null
  int64_t tiles;                 // of all heads
  unsigned *counters, *tickets;  // (tiles): how many tiles of keys have added to each; how many items were taken

  // Returns how many tiles all heads have, or 0 where no kernel uses them. `a` may have no data.
  template <typename T>
  static int64_t count(const Attention<T>& a, bool is_packed) {
    const bool is_used = std::is_same<T, Half>::value && least(a.width, a.value_width) > 0 &&
                         most(a.width, a.value_width) <= 128 && (a.width | a.value_width) % 8 == 0;
    const int64_t queries = most(a.width, a.value_width) <= 64 ? kNumbers / 64 : kNumbers / 128;
    const int64_t of_head = is_packed ? a.query_rows / queries + a.batch : a.batch * parts_of(a.queries, queries);
    return is_used ? a.heads * of_head : 0;
  }

  // Returns how many numbers of scratch the tiles need: their sums, their counters and the number of tickets.
  static int64_t scratch(int64_t tiles) { return tiles > 0 ? tiles * (kNumbers + 1) + 1 : 1; }

  // Returns where the tiles of sequence b begin among those of a head.
  template <typename S, typename T>
  MSOPS_BOTH int64_t first_tile(const Attention<T>& a, int64_t first_query, int64_t b) const {
    return a.is_packed() ? first_query / S::kQueries + b : b * ((a.queries + S::kQueries - 1) / S::kQueries);
  }
};

// AlignedRows are bits for tensors whose rows begin at multiples of 16 bytes and have a whole number of packs of 16
// bytes (see aligned_rows).
enum AlignedRows { kAlignedQ = 1, kAlignedK = 2, kAlignedV = 4, kAlignedOut = 8, kAlignedAll = 15 };

// The gradients have the shapes and strides of what they are gradients of.
template <typename T>
struct AttentionGradient {
  using C = Compute<T>;

  const T* dout;
  const C* dlse;
  C* delta;  // scratch of the shape of lse
  C* rest;   // likewise, of an ExtendedAttention that adds to logits, or null (see extended.h)
  T *dq, *dk, *dv;
  QuerySums query_sums;  // scratch
};

}  // namespace msops::flash_attention
