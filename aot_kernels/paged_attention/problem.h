// Paged says what a call of paged attention reads, writes and must compute (see flash_attention/problem.h for the
// formulas). The keys of a sequence lie in blocks of rows, which its row of the block table names in order.
#pragma once

#include "../common/scratch.h"
#include "../flash_attention/extended.h"

namespace msops::paged {

using flash_attention::Floats, flash_attention::Span, flash_attention::least, flash_attention::most,
    flash_attention::parts_of;

// The keys of a sequence of few tokens are summed in parts, so that one sequence keeps many multiprocessors busy. Where
// parts begin depends on the sequence's number of keys alone.
constexpr int64_t kMostParts = 32, kLeastPart = 512, kPartUnit = 64;  // in keys
constexpr int64_t kSplitRows = 64;                                    // of queries of the heads that share keys
constexpr int64_t kMostFeatures = 576;
constexpr int64_t kMostPlans = 3;  // see plan.h

// Returns how many numbers the plans of a call take, with a counter.
inline int64_t plan_size(int64_t batch) { return kMostPlans * (batch + 1) + 1; }

// Returns how many keys a part has, of so many keys in all.
MSOPS_BOTH int64_t keys_of_part(int64_t keys) {
  return most(kLeastPart, parts_of(parts_of(keys, kMostParts), kPartUnit) * kPartUnit);
}
MSOPS_BOTH int64_t parts_of_keys(int64_t keys) { return most(1, parts_of(keys, keys_of_part(keys))); }
// Returns the most parts that up to so many keys have: 16384 keys have 32 parts, but 16385 have 29 longer ones.
inline int64_t most_parts(int64_t keys) { return most(1, least(kMostParts, parts_of(keys, kLeastPart))); }

// Codes are what turns whole numbers of a cache into numbers: (code - zero) scale, of each head and feature, or of each
// head.
template <typename T>
struct Codes {
  using C = Compute<T>;
  Floats<T> scales, zeros;
  const int8_t* whole_zeros;              // in place of zeros, or null; without both, zero is 0
  int64_t scale_features, zero_features;  // in a head's row, D or 1

  MSOPS_BOTH C scale(int64_t head, int64_t feature) const {
    return scales[head * scale_features + (scale_features > 1 ? feature : 0)];
  }
  MSOPS_BOTH C zero(int64_t head, int64_t feature) const {
    const int64_t at = head * zero_features + (zero_features > 1 ? feature : 0);
    return whole_zeros ? C(whole_zeros[at]) : zeros ? zeros[at] : C(0);
  }
};

// A Sequence has tokens `first` to first + tokens - 1 of q, and so many keys.
struct Sequence {
  int64_t first, tokens, keys;

  // Token i stands at the place of key i + shift(), so that the last token stands at the last key.
  MSOPS_BOTH int64_t shift() const { return keys - tokens; }
};

// T are the elements of q, K those of the caches: T or int8_t.
template <typename T, typename K>
struct Paged {
  using Element = T;
  using Cached = K;
  using C = Compute<T>;
  static constexpr bool kHasCodes = !std::is_same<T, K>::value;

  // `columns` are those of block_tables.
  int64_t tokens, batch, heads, kv_heads, width, value_width, blocks, block_size, columns;
  // Heads that read the same keys, and the most tokens of a sequence whose keys are split: divide_heads() sets them.
  int64_t group, most_split;

  const T* q;                                          // (tokens, heads, width)
  const K *k, *v;                                      // (blocks, block_size, kv_heads, width or value_width)
  int64_t v_width;                                     // features of a row of v, of which value_width count: v may be k
  T* out;                                              // (tokens, heads, value_width)
  C* lse;                                              // (heads, tokens)
  const int32_t *block_tables, *lengths, *cu_seqlens;  // the last one is null if each sequence has one token
  bool has_starts;                                     // whether there is cu_seqlens

  C scale, softcap;     // softcap 0: none
  int64_t left, right;  // as in Attention
  int64_t last_key;     // keys from there on are not seen

  const bool* mask;  // or null
  int64_t mask_token, mask_head, mask_key;
  Floats<T> bias, slopes;
  int64_t bias_token, bias_head, bias_key, slopes_batch;
  Codes<T> of_k, of_v;  // of caches of int8_t

  // (parts, sums (split_tokens, heads, value_width), statistics (split_tokens, heads, 2)), where parts are as many as
  // any sequence could have.
  C* partial;
  int64_t parts;

  void divide_heads() {
    group = heads / std::max<int64_t>(1, kv_heads);
    most_split = std::max<int64_t>(1, kSplitRows / std::max<int64_t>(1, group));
  }
  MSOPS_BOTH bool adds_to_logits() const { return bias || slopes; }
  MSOPS_BOTH bool has_terms() const { return bias || slopes || mask; }

  // Returns sequence b, which lies in the tensors whatever the numbers are.
  MSOPS_BOTH Sequence sequence(int64_t b) const {
    const int64_t keys = most(0, least(lengths[b], columns * block_size));
    if (!has_starts) return {b, 1, keys};
    const int64_t first = most(0, least(cu_seqlens[b], tokens));
    return {first, most(0, least(cu_seqlens[b + 1], tokens) - first), keys};
  }

  // Returns the keys that token i sees, except for the mask.
  MSOPS_BOTH Span keys_of_token(const Sequence& s, int64_t i) const {
    const int64_t place = i + s.shift(), end = right < 0 ? s.keys : least(s.keys, place + right + 1);
    return {left < 0 ? 0 : most(0, place - left), least(end, last_key)};
  }

  // Returns a range that has all keys which any of the tokens i, at least one, sees.
  MSOPS_BOTH Span keys_of(const Sequence& s, Span i) const {
    return {keys_of_token(s, i.begin).begin, keys_of_token(s, i.end - 1).end};
  }

  // Returns the row of the caches that has key j of sequence b, or -1 if the table leads nowhere.
  MSOPS_BOTH int64_t row_of_key(int64_t b, int64_t j) const {
    const int64_t block = block_tables[b * columns + j / block_size];
    return 0 <= block && block < blocks ? block * block_size + j % block_size : -1;
  }

  MSOPS_BOTH const T* query(int64_t token, int64_t head) const { return q + (token * heads + head) * width; }
  MSOPS_BOTH const K* key(int64_t row, int64_t kv_head) const { return k + (row * kv_heads + kv_head) * width; }
  MSOPS_BOTH const K* value(int64_t row, int64_t kv_head) const { return v + (row * kv_heads + kv_head) * v_width; }

  // Returns the logit of key j for token i of sequence b, given their product times the scale, with softcap.
  MSOPS_BOTH C logit(C x, const Sequence& s, int64_t b, int64_t head, int64_t i, int64_t j) const {
    const Span seen = keys_of_token(s, i);
    if (j < seen.begin || j >= seen.end) return C(-HUGE_VAL);
    if (mask && mask[(s.first + i) * mask_token + head * mask_head + j * mask_key]) return C(-HUGE_VAL);
    if (bias) x += bias[(s.first + i) * bias_token + head * bias_head + j * bias_key];
    if (slopes) {
      const int64_t distance = i + s.shift() - j;
      x -= slopes[b * slopes_batch + head] * C(distance < 0 ? -distance : distance);
    }
    return x;
  }

  MSOPS_BOTH int64_t split_tokens() const { return has_starts ? least(tokens, batch * most_split) : tokens; }
  MSOPS_BOTH bool is_split(const Sequence& s) const { return s.tokens <= most_split; }
  MSOPS_BOTH int64_t parts_of_sequence(const Sequence& s) const { return is_split(s) ? parts_of_keys(s.keys) : 1; }
  // Returns whether sums over its keys are results, and no parts of them.
  MSOPS_BOTH bool has_results(const Sequence& s) const { return parts_of_sequence(s) == 1; }
  // Returns the keys of a part.
  MSOPS_BOTH Span part(const Sequence& s, int64_t number) const {
    if (!is_split(s)) return {0, s.keys};
    const int64_t length = keys_of_part(s.keys);
    return {number * length, least(s.keys, (number + 1) * length)};
  }

  // Return where a part puts its sums of a token, and its maximum and total.
  MSOPS_BOTH C* partial_sums(int64_t part, const Sequence& s, int64_t b, int64_t i, int64_t head) const {
    return of_part(part) + place(s, b, i, head) * value_width;
  }
  MSOPS_BOTH C* partial_stats(int64_t part, const Sequence& s, int64_t b, int64_t i, int64_t head) const {
    return of_part(part) + split_tokens() * heads * value_width + place(s, b, i, head) * 2;
  }

  // Returns how many numbers a part has.
  MSOPS_BOTH int64_t part_size() const { return split_tokens() * heads * (value_width + 2); }
  // Returns how many numbers `partial` has.
  int64_t partial_size() const {
    return parts > 1 ? std::max<int64_t>(1, size_of({parts, split_tokens(), heads, value_width + 2})) : 1;
  }

 private:
  MSOPS_BOTH C* of_part(int64_t part) const { return partial + part * part_size(); }
  MSOPS_BOTH int64_t place(const Sequence& s, int64_t b, int64_t i, int64_t head) const {
    const bool by_token = !has_starts || tokens <= batch * most_split;
    return (by_token ? s.first + i : b * most_split + i) * heads + head;
  }
};

}  // namespace msops::paged
