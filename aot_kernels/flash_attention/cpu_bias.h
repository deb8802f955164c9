// The gradient of a bias on the CPU. An item owns a tile of it, and adds up dx of all samples, heads, queries and keys
// that share these elements, in order.
#pragma once

#include "cpu_backward.h"

namespace msops::flash_attention::cpu {

template <typename T>
struct BiasBackward {
  using C = Compute<T>;
  using Bias = BiasGradient<T>;
  ExtendedAttention<T> a;
  AttentionGradient<T> g;
  Bias to;

  int64_t query_tiles() const { return parts_of(to.queries, kColumns<C>); }
  int64_t key_tiles() const { return parts_of(to.keys, kKeys); }
  int64_t items() const { return to.batch * to.heads * query_tiles() * key_tiles(); }

  struct Workspace {
    Scores<T> scores;
    C sums[kKeys * kColumns<C>], lse[kColumns<C>] = {}, rest[kColumns<C>] = {}, delta[kColumns<C>] = {};
    std::unique_ptr<C[]> k, v, q, dout;  // rows, and panels of one vector of queries
    std::unique_ptr<C[]> row;

    explicit Workspace(const Attention<T>& a)
        : k(new C[kKeys * a.width]),
          v(new C[kKeys * a.value_width]),
          q(new C[kColumns<C> * a.width]()),
          dout(new C[kColumns<C> * a.value_width]()),
          row(new C[most(a.width, a.value_width)]) {}
  };

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    Workspace w(a);
    const int64_t end = part_begin(items(), part + 1, parts);
    for (int64_t item = part_begin(items(), part, parts); item < end; ++item) tile(w, item);
  }

 private:
  MSOPS_CPU void tile(Workspace& w, int64_t item) const {
    const int64_t j0 = item % key_tiles() * kKeys, i0 = item / key_tiles() % query_tiles() * kColumns<C>;
    const int64_t outer = item / key_tiles() / query_tiles(), head = outer % to.heads, sample = outer / to.heads;
    const Span samples = Bias::sharing(to.batch, a.batch, sample), heads = Bias::sharing(to.heads, a.heads, head);
    const Span queries = Bias::sharing(to.queries, a.queries, i0, kColumns<C>);
    const Span keys = Bias::sharing(to.keys, a.keys, j0, kKeys);
    std::fill_n(w.sums, kKeys * kColumns<C>, C(0));
    for (int64_t b = samples.begin; b < samples.end; ++b)
      for (int64_t h = heads.begin; h < heads.end; ++h)
        for (int64_t i = queries.begin; i < queries.end; i += kColumns<C>)
          add(w, b, h, {i, least(i + kColumns<C>, queries.end)}, keys);
    if (to.queries != a.queries)
      for (int64_t k = 0; k < kKeys; ++k)
        for (int64_t c = 1; c < kColumns<C>; ++c) w.sums[k * kColumns<C>] += w.sums[k * kColumns<C> + c];
    if (to.keys != a.keys)
      for (int64_t k = 1; k < kKeys; ++k)
        for (int64_t c = 0; c < kColumns<C>; ++c) w.sums[c] += w.sums[k * kColumns<C> + c];
    for (int64_t c = 0; c < least(kColumns<C>, to.queries - i0); ++c)
      for (int64_t k = 0; k < least(kKeys, to.keys - j0); ++k)
        to.store(sample, head, i0 + c, j0 + k, w.sums[k * kColumns<C> + c]);
  }

  struct AddPanel {
    const BiasBackward& f;
    Workspace& w;
    const Sequence& s;
    int64_t b, h, query, columns;

    MSOPS_CPU void operator()(int64_t j, int64_t n, bool in_range) const {
      const View<C> k{w.k.get(), f.a.width, 1}, v{w.v.get(), f.a.value_width, 1};
      w.scores.compute(f.a, s, b, h, query, j, n, columns, k, v, w.q.get(), w.dout.get(), w.lse, w.rest, w.delta,
                       in_range);
      for (int64_t e = 0; e < n; ++e)
        for (int64_t c = 0; c < columns; ++c) w.sums[e * kColumns<C> + c] += w.scores.dx[e * kColumns<C> + c];
    }
  };

  // Adds dx of one vector of queries of head h, and of keys.
  MSOPS_CPU void add(Workspace& w, int64_t b, int64_t h, Span queries, Span keys) const {
    const Sequence s = a.sequence(b);
    const int64_t columns = queries.size(), kv_head = h / a.group();
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t i = s.first_query + queries.begin + c, at = a.of_lse.offset(b, h, i);
      load_rows(a.q + a.of_q.offset(b, h, i), 0, 1, a.width, w.row.get(), a.width);
      for (int64_t d = 0; d < a.width; ++d) w.q[d * kColumns<C> + c] = a.scale * w.row[d];
      load_rows(g.dout + a.of_out.offset(b, h, i), 0, 1, a.value_width, w.row.get(), a.value_width);
      for (int64_t d = 0; d < a.value_width; ++d) w.dout[d * kColumns<C> + c] = w.row[d];
      w.lse[c] = a.lse[at] == C(-HUGE_VAL) ? C(0) : a.lse[at], w.delta[c] = g.delta[at];
      w.rest[c] = g.rest ? g.rest[at] : C(0);
    }
    const Span seen = a.keys_of(s, queries);
    const int64_t before = most(0, seen.begin - keys.begin) / kKeys * kKeys;  // keys that no query sees
    for_panels(a, s, b, kv_head, queries, {keys.begin + before, least(keys.end, seen.end)}, w.k.get(), w.v.get(),
               a.value_width, AddPanel{*this, w, s, b, h, queries.begin, columns});
  }
};

template <typename T>
void bias_backward(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g,
                   const BiasGradient<T>& to) {
  prepare_backward(call, a, g);
  const BiasBackward<T> body{a, g, to};
  on_threads(call, body.items(), a.work(), body);
}

}  // namespace msops::flash_attention::cpu
