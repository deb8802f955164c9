// Attention on the CPU. A panel is a tile of logits with a vector lane for each of some queries and a row for each of
// some keys, so that the maximum and the sum over keys need no sum across lanes.
//
//   forward:  x^T = K Q^T,  out^T += V^T p^T
//   backward: x^T = K Q^T,  dp^T = V dout^T,  dv += p^T dout,  dk += dz^T q,  dq += dz k
#pragma once

#include <cmath>
#include <memory>

#include "../common/exponential.h"
#include "../common/parallel.h"
#include "cpu_product.h"
#include "extended.h"

namespace msops::flash_attention::cpu {

constexpr int64_t kKeys = 64;  // of a panel
constexpr int64_t kPanels = 4;
template <typename C>
constexpr int64_t kQueries = kPanels * kColumns<C>;  // of a tile

// Returns the i-th of n tiles in the order first, last, second, last but one, ..., so that equal shares of causal
// attention are equal work.
MSOPS_CPU int64_t balanced(int64_t i, int64_t n) { return i % 2 ? n - 1 - i / 2 : i / 2; }

// Returns whether each of the queries i sees each of the keys j, except for the mask.
template <typename T>
MSOPS_CPU bool in_range(const Attention<T>& a, const Sequence& s, Span i, Span j) {
  const Span first = a.keys_of_query(s, i.begin), last = a.keys_of_query(s, i.end - 1);
  return last.begin <= j.begin && j.end <= first.end;
}

// Logits turns the products of a panel, which the scale has multiplied already, into logits. Column c of the panel is
// query i[c] of head h[c]; the first row is key j.
template <typename T>
struct Logits {
  using C = Compute<T>;
  const ExtendedAttention<T>& a;
  const Sequence& s;
  int64_t b;

  // Applies softcap, adds bias and ALiBi, and hides keys that a query does not see; in_range says whether the mask
  // alone does. Where softcap is above 0, `slopes`, if any, get the logits' derivatives with respect to q k.
  MSOPS_CPU void finish(C* x, int64_t j, int64_t keys, int64_t columns, const int64_t* h, const int64_t* i,
                        bool in_range, C* slopes = nullptr) const {
    if (a.softcap > 0) {
      const C inverse = 1 / a.softcap;
#pragma omp simd
      for (int64_t n = 0; n < keys * kColumns<C>; ++n) x[n] = Exponential<C>::tanh(x[n] * inverse);
      if (slopes) {
#pragma omp simd
        for (int64_t n = 0; n < keys * kColumns<C>; ++n) slopes[n] = (1 - x[n] * x[n]) * a.scale;
      }
#pragma omp simd
      for (int64_t n = 0; n < keys * kColumns<C>; ++n) x[n] *= a.softcap;
    }
    for (int64_t c = 0; c < columns && a.bias; ++c)
      for (int64_t k = 0; k < keys; ++k) x[k * kColumns<C> + c] += a.bias_at(b, h[c], i[c], j + k);
    for (int64_t c = 0; c < columns && a.slopes; ++c) {
      const int64_t distance = i[c] + s.shift() - j;
      const C slope = a.slope(b, h[c]);
      for (int64_t k = 0; k < keys; ++k) x[k * kColumns<C> + c] -= slope * std::abs(static_cast<C>(distance - k));
    }
    if (!in_range) hide_out_of_range(x, j, keys, columns, i);
    if (a.mask) hide_masked(x, j, keys, columns, h, i);
  }

  MSOPS_CPU void hide_out_of_range(C* x, int64_t j, int64_t keys, int64_t columns, const int64_t* i) const {
    int first[kColumns<C>] = {}, end[kColumns<C>] = {};
    for (int64_t c = 0; c < columns; ++c) {
      const Span seen = a.keys_of_query(s, i[c]);
      first[c] = static_cast<int>(most(0, least(seen.begin - j, keys)));
      end[c] = static_cast<int>(most(0, least(seen.end - j, keys)));
    }
    for (int k = 0; k < keys; ++k)
#pragma omp simd
      for (int c = 0; c < kColumns<C>; ++c)
        x[k * kColumns<C> + c] = first[c] <= k && k < end[c] ? x[k * kColumns<C> + c] : C(-HUGE_VAL);
  }

  // Begins to fetch what hide_masked reads, whose rows are far apart. Products that come before it hide the latency.
  MSOPS_CPU void fetch_mask(int64_t j, int64_t keys, int64_t columns, const int64_t* h, const int64_t* i) const {
    if (!a.mask) return;
    const int64_t last = a.mask_key ? keys - 1 : 0;
    for (int64_t c = 0; c < (shares_mask(columns, h) ? 1 : columns); ++c) {
      const uint8_t* const row = row_of_mask(h[c], i[c], j);
      __builtin_prefetch(row), __builtin_prefetch(row + last);
    }
  }

  // Returns where the mask's elements of a query begin, from key j on.
  MSOPS_CPU const uint8_t* row_of_mask(int64_t head, int64_t query, int64_t j) const {
    return reinterpret_cast<const uint8_t*>(a.mask) + b * a.mask_batch + head * a.mask_head + query * a.mask_query +
           j * a.mask_key;
  }

  // Returns whether the mask hides the same keys from all columns.
  MSOPS_CPU bool shares_mask(int64_t columns, const int64_t* h) const {
    return a.mask_query == 0 && (a.mask_head == 0 || h[0] == h[columns - 1]);
  }

  // Hides what the mask does. It is read along keys, and the panel is written along queries: in between, each key has a
  // word with a bit for each column.
  MSOPS_CPU void hide_masked(C* x, int64_t j, int64_t keys, int64_t columns, const int64_t* h, const int64_t* i) const {
    using Word = std::conditional_t<sizeof(C) == 4, uint32_t, uint64_t>;  // as wide as C, for vectors of both
    static_assert(kColumns<C> <= 32, "a word has a bit for each column");
    Word words[kKeys] = {}, any = 0;
    const bool is_shared = shares_mask(columns, h);
    for (int64_t c = 0; c < (is_shared ? 1 : columns); ++c) {
      const uint8_t* const row = row_of_mask(h[c], i[c], j);
      const Word bits = is_shared ? ~Word(0) : Word(1) << c;
      if (a.mask_key == 0) {
        const Word all = *row ? bits : 0;
#pragma omp simd
        for (int64_t k = 0; k < keys; ++k) words[k] |= all;
      } else {
#pragma omp simd
        for (int64_t k = 0; k < keys; ++k) words[k] |= (Word(0) - Word(row[k])) & bits;
      }
    }
#pragma omp simd reduction(| : any)
    for (int64_t k = 0; k < keys; ++k) any |= words[k];
    if (any == 0) return;
    const C hidden = C(-HUGE_VAL);
    Word bits_of_hidden;
    std::memcpy(&bits_of_hidden, &hidden, sizeof hidden);
    for (int64_t k = 0; k < keys; ++k) {
      const Word word = words[k];
#pragma omp simd
      for (int c = 0; c < kColumns<C>; ++c) {
        // GCC would make a branch of a choice between two numbers.
        const Word choice = Word(0) - (word >> c & 1);
        Word bits;
        std::memcpy(&bits, x + k * kColumns<C> + c, sizeof bits);
        bits = (bits & ~choice) | (bits_of_hidden & choice);
        std::memcpy(x + k * kColumns<C> + c, &bits, sizeof bits);
      }
    }
  }

  // Sets factors to what dropout multiplies the panel's weights by.
  MSOPS_CPU void draw(C* factors, int64_t j, int64_t keys, const int64_t* h, const int64_t* i) const {
    uint32_t words[4][kColumns<C>];
    for (int64_t k = 0; k < keys; ++k) {
      if (k == 0 || (j + k) % 4 == 0) {
#pragma omp simd
        for (int c = 0; c < kColumns<C>; ++c) {
          const Words four = a.words(b, h[c], i[c], (j + k) / 4);
          words[0][c] = four.at[0], words[1][c] = four.at[1], words[2][c] = four.at[2], words[3][c] = four.at[3];
        }
      }
      const uint32_t* const row = words[(j + k) % 4];
#pragma omp simd
      for (int c = 0; c < kColumns<C>; ++c) factors[k * kColumns<C> + c] = row[c] >= a.threshold ? a.kept : C(0);
    }
  }
};

// Calls f(j, n, in_range) for panels of n keys from key j on, whose rows it has loaded to k and v; in_range says
// whether each of the queries sees each of them, except for the mask.
template <typename T, typename F>
MSOPS_CPU void for_panels(const Attention<T>& a, const Sequence& s, int64_t b, int64_t kv_head, Span queries, Span keys,
                          Compute<T>* k, Compute<T>* v, int64_t value_pitch, const F& f) {
  for (int64_t j = keys.begin; j < keys.end; j += kKeys) {
    const int64_t n = least(kKeys, keys.end - j);
    load_rows(a.k + a.of_k.offset(b, kv_head, s.first_key + j), a.of_k.row, n, a.width, k, a.width);
    load_rows(a.v + a.of_v.offset(b, kv_head, s.first_key + j), a.of_v.row, n, a.value_width, v, value_pitch);
    f(j, n, in_range(a, s, queries, {j, j + n}));
  }
}

// A thread takes items: tiles of queries of a key's heads, or splits of their keys.
template <typename T>
struct Forward {
  using C = Compute<T>;
  ExtendedAttention<T> a;

  // Where there are few queries, a tile holds several heads that read the same keys.
  int64_t heads_of_tile() const { return most(1, least(a.group(), kQueries<C> / most(1, a.queries))); }
  int64_t head_tiles() const { return parts_of(a.group(), heads_of_tile()); }
  int64_t query_tiles() const { return parts_of(a.queries, kQueries<C>); }
  int64_t items() const { return a.batch * a.kv_heads * head_tiles() * query_tiles() * a.splits; }

  struct Workspace {
    int64_t value_pitch;  // of v, and the rows of a panel of out
    int64_t columns = 0, heads[kQueries<C>] = {}, queries[kQueries<C>] = {};
    C max[kQueries<C>], sum[kQueries<C>], factors[kColumns<C>];
    C x[kKeys * kColumns<C>], kept[kKeys * kColumns<C>];
    std::unique_ptr<C[]> q, k, v, out, row;

    explicit Workspace(const Attention<T>& a)
        : value_pitch(padded<C>(a.value_width)),
          q(new C[kQueries<C> * a.width]),
          k(new C[kKeys * a.width]),
          v(new C[kKeys * value_pitch]),
          out(new C[kQueries<C> * value_pitch]),
          row(new C[most(a.width, a.value_width)]) {}
  };

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    Workspace w(a);
    const int64_t end = part_begin(items(), part + 1, parts);
    for (int64_t item = part_begin(items(), part, parts); item < end; ++item) tile(w, item);
  }

 protected:  // paged_attention takes its keys from elsewhere
  // This is no lambda, since nvcc drops MSOPS_CPU from a lambda, which then need not be inlined.
  struct AddPanels {
    const Forward& f;
    Workspace& w;
    const Sequence& s;
    int64_t b;

    MSOPS_CPU void operator()(int64_t j, int64_t n, bool in_range) const {
      for (int64_t c = 0; c < w.columns; c += kColumns<C>) f.panel(w, s, b, c, j, n, in_range);
    }
  };
  struct ScaleAndAdd {
    const C* factors;

    MSOPS_CPU C operator()(C before, C added, int column) const { return before * factors[column] + added; }
  };

  MSOPS_CPU void tile(Workspace& w, int64_t item) const {
    const int64_t split = item % a.splits, tile_of_queries = item / a.splits % query_tiles();
    const int64_t outer = item / a.splits / query_tiles(), tile_of_heads = outer % head_tiles();
    const int64_t kv_head = outer / head_tiles() % a.kv_heads, b = outer / head_tiles() / a.kv_heads;
    const Sequence s = a.sequence(b);
    const int64_t begin = balanced(tile_of_queries, query_tiles()) * kQueries<C>;
    const Span queries{begin, least(begin + kQueries<C>, s.queries)};
    if (queries.empty()) return;
    const int64_t first_head = kv_head * a.group() + tile_of_heads * heads_of_tile();
    load_queries(w, s, b, first_head, least(first_head + heads_of_tile(), (kv_head + 1) * a.group()), queries);
    const Span seen = a.keys_of(s, queries), keys = a.splits > 1 ? a.part(seen, split) : seen;
    for_panels(a, s, b, kv_head, queries, keys, w.k.get(), w.v.get(), w.value_pitch, AddPanels{*this, w, s, b});
    for (int64_t c = 0; c < w.columns; ++c) a.splits > 1 ? store_partial(w, c, split, b) : store(w, c, s, b);
  }

  // Loads the queries of heads [head, end), as panels of columns.
  MSOPS_CPU void load_queries(Workspace& w, const Sequence& s, int64_t b, int64_t head, int64_t end,
                              Span queries) const {
    w.columns = 0;
    for (; head < end; ++head)
      for (int64_t i = queries.begin; i < queries.end; ++i, ++w.columns) {
        w.heads[w.columns] = head, w.queries[w.columns] = i;
        load_rows(a.q + a.of_q.offset(b, head, s.first_query + i), 0, 1, a.width, w.row.get(), a.width);
        C* const to = column_of(w.q.get(), w.columns, a.width);
        for (int64_t d = 0; d < a.width; ++d) to[d * kColumns<C>] = a.scale * w.row[d];
      }
    for (int64_t c = w.columns; c % kColumns<C>; ++c)
      for (int64_t d = 0; d < a.width; ++d) column_of(w.q.get(), c, a.width)[d * kColumns<C>] = 0;
    std::fill_n(w.max, kQueries<C>, C(-HUGE_VAL));
    std::fill_n(w.sum, kQueries<C>, C(0));
    std::fill_n(w.out.get(), kQueries<C> * w.value_pitch, C(0));
  }

  // Adds n keys from key j on to the columns of the panel that begins with column c.
  MSOPS_CPU void panel(Workspace& w, const Sequence& s, int64_t b, int64_t c, int64_t j, int64_t n,
                       bool in_range) const {
    const int64_t columns = least(kColumns<C>, w.columns - c);
    C *const x = w.x, *const out = w.out.get() + c * w.value_pitch;
    const Logits<T> logits{a, s, b};
    logits.fetch_mask(j, n, columns, w.heads + c, w.queries + c);
    multiply(n, columns, a.width, View<C>{w.k.get(), a.width, 1}, w.q.get() + c * a.width, kColumns<C>, x, kColumns<C>,
             Set<C>{});
    logits.finish(x, j, n, columns, w.heads + c, w.queries + c, in_range);
    C max[kColumns<C>], shift[kColumns<C>], sum[kColumns<C>] = {};
    std::copy_n(w.max + c, kColumns<C>, max);
    for (int64_t k = 0; k < n; ++k)
#pragma omp simd
      for (int l = 0; l < kColumns<C>; ++l) max[l] = x[k * kColumns<C> + l] > max[l] ? x[k * kColumns<C> + l] : max[l];
#pragma omp simd
    for (int l = 0; l < kColumns<C>; ++l) shift[l] = max[l] == C(-HUGE_VAL) ? C(0) : max[l];
    for (int64_t k = 0; k < n; ++k)
#pragma omp simd
      for (int l = 0; l < kColumns<C>; ++l) {
        const C p = Exponential<C>::exp(x[k * kColumns<C> + l] - shift[l]);
        x[k * kColumns<C> + l] = p;
        sum[l] += p;
      }
    C* const factors = w.factors;
#pragma omp simd
    for (int l = 0; l < kColumns<C>; ++l) {
      factors[l] = Exponential<C>::exp(w.max[c + l] - shift[l]);
      w.sum[c + l] = w.sum[c + l] * factors[l] + sum[l];
      w.max[c + l] = max[l];
    }
    if (a.seed) {
      C* const kept = w.kept;
      logits.draw(kept, j, n, w.heads + c, w.queries + c);
#pragma omp simd
      for (int64_t e = 0; e < n * kColumns<C>; ++e) x[e] *= kept[e];
    }
    multiply(a.value_width, columns, n, View<C>{w.v.get(), 1, w.value_pitch}, x, kColumns<C>, out, kColumns<C>,
             ScaleAndAdd{factors});
  }

  MSOPS_CPU void store(const Workspace& w, int64_t c, const Sequence& s, int64_t b) const {
    const int64_t row = s.first_query + w.queries[c];
    T* const to = a.out + a.of_out.offset(b, w.heads[c], row);
    const C inverse = w.sum[c] == 0 ? C(0) : 1 / w.sum[c];
    const C* const out = column_of(w.out.get(), c, w.value_pitch);
    for (int64_t d = 0; d < a.value_width; ++d) assign(to[d], out[d * kColumns<C>] * inverse);
    a.lse[a.of_lse.offset(b, w.heads[c], row)] = w.max[c] + (w.sum[c] == 0 ? C(0) : std::log1p(w.sum[c] - 1));
  }

  MSOPS_CPU void store_partial(const Workspace& w, int64_t c, int64_t split, int64_t b) const {
    C* const sums = a.partial_sums(split, b, w.heads[c], w.queries[c]);
    C* const stats = a.partial_stats(split, b, w.heads[c], w.queries[c]);
    const C* const out = column_of(w.out.get(), c, w.value_pitch);
    for (int64_t d = 0; d < a.value_width; ++d) sums[d] = out[d * kColumns<C>];
    stats[0] = w.max[c], stats[1] = w.sum[c];
  }
};

// Index i is a query, whose splits are added.
template <typename T>
struct Combine {
  using C = Compute<T>;
  Attention<T> a;

  MSOPS_CPU void operator()(int64_t index) const {
    const int64_t i = index % a.queries, h = index / a.queries % a.heads, b = index / a.queries / a.heads;
    C max = C(-HUGE_VAL), sum = 0;
    for (int64_t split = 0; split < a.splits; ++split) max = std::max(max, a.partial_stats(split, b, h, i)[0]);
    const C shift = max == C(-HUGE_VAL) ? C(0) : max;
    for (int64_t split = 0; split < a.splits; ++split) {
      const C* const stats = a.partial_stats(split, b, h, i);
      sum += stats[1] * Exponential<C>::exp(stats[0] - shift);
    }
    T* const to = a.out + a.of_out.offset(b, h, i);
    const C inverse = sum == 0 ? C(0) : 1 / sum;
    for (int64_t d = 0; d < a.value_width; ++d) {
      C total = 0;
      for (int64_t split = 0; split < a.splits; ++split)
        total += a.partial_sums(split, b, h, i)[d] * Exponential<C>::exp(a.partial_stats(split, b, h, i)[0] - shift);
      assign(to[d], total * inverse);
    }
    a.lse[a.of_lse.offset(b, h, i)] = max + (sum == 0 ? C(0) : std::log1p(sum - 1));
  }
};

template <typename T>
void forward(Call& call, const ExtendedAttention<T>& a) {
  const Forward<T> body{a};
  on_threads(call, body.items(), a.work() / 4, body);
  if (a.splits > 1)
    on_cpu(call, a.batch * a.heads * a.queries, Combine<T>{a}, static_cast<double>(a.splits * a.value_width));
}

}  // namespace msops::flash_attention::cpu
