// The gradient of attention on the CPU, from one pass over the logits. An item owns some keys of a head: it adds up
// their dk and dv over all queries in order, and a share of dq, which is rounded at once if there is one share alone.
#pragma once

#include "cpu.h"

namespace msops::flash_attention::cpu {

// delta_i = sum_c dout_ic out_ic - dlse_i. Index i is a query.
template <typename T>
struct Delta {
  using C = Compute<T>;
  Attention<T> a;
  AttentionGradient<T> g;

  int64_t rows() const { return a.is_packed() ? a.query_rows : a.queries; }
  int64_t size() const { return (a.is_packed() ? 1 : a.batch) * a.heads * rows(); }

  MSOPS_CPU void operator()(int64_t index) const {
    const int64_t i = index % rows(), h = index / rows() % a.heads, b = index / rows() / a.heads;
    const T *const out = a.out + a.of_out.offset(b, h, i), *const dout = g.dout + a.of_out.offset(b, h, i);
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < a.value_width; ++c) sum += C(out[c]) * C(dout[c]);
    const int64_t at = a.of_lse.offset(b, h, i);
    g.delta[at] = sum - g.dlse[at];
  }
};

// Computes the rests of queries (see extended.h). An item is a vector of queries, which is done at once where lse of
// all of them is near 0.
template <typename T>
struct Rest {
  using C = Compute<T>;
  ExtendedAttention<T> a;
  AttentionGradient<T> g;

  int64_t tiles() const { return parts_of(a.queries, kColumns<C>); }
  int64_t items() const { return a.batch * a.heads * tiles(); }

  struct Workspace {
    int64_t heads[kColumns<C>] = {}, queries[kColumns<C>] = {}, columns = 0;
    C lse[kColumns<C>] = {}, sums[kColumns<C>] = {}, x[kKeys * kColumns<C>];
    std::unique_ptr<C[]> k, v, q, row;

    explicit Workspace(const Attention<T>& a)
        : k(new C[kKeys * a.width]),
          v(new C[kKeys * a.value_width]),
          q(new C[kColumns<C> * a.width]()),
          row(new C[a.width]) {}
  };

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    Workspace w(a);
    const int64_t end = part_begin(items(), part + 1, parts);
    for (int64_t item = part_begin(items(), part, parts); item < end; ++item) tile(w, item);
  }

 private:
  struct AddPanel {
    const Rest& f;
    Workspace& w;
    const Logits<T>& logits;

    MSOPS_CPU void operator()(int64_t j, int64_t n, bool in_range) const {
      multiply(n, w.columns, f.a.width, View<C>{w.k.get(), f.a.width, 1}, w.q.get(), kColumns<C>, w.x, kColumns<C>,
               Set<C>{});
      logits.finish(w.x, j, n, w.columns, w.heads, w.queries, in_range);
      for (int64_t k = 0; k < n; ++k)
#pragma omp simd
        for (int l = 0; l < kColumns<C>; ++l) w.sums[l] += Exponential<C>::exp(w.x[k * kColumns<C> + l] - w.lse[l]);
    }
  };

  MSOPS_CPU void tile(Workspace& w, int64_t item) const {
    const int64_t begin = item % tiles() * kColumns<C>, h = item / tiles() % a.heads, b = item / tiles() / a.heads;
    const Sequence s = a.sequence(b);
    const Span queries{begin, least(begin + kColumns<C>, s.queries)};
    w.columns = queries.size();
    bool any = false;
    for (int64_t c = 0; c < w.columns; ++c) {
      const int64_t i = s.first_query + begin + c, at = a.of_lse.offset(b, h, i);
      const bool is_far = a.is_far(a.lse[at]);
      w.heads[c] = h, w.queries[c] = begin + c, w.sums[c] = 0, w.lse[c] = is_far ? a.lse[at] : C(0);
      g.rest[at] = 0, any |= is_far;
    }
    if (!any) return;
    for (int64_t c = 0; c < w.columns; ++c) {
      load_rows(a.q + a.of_q.offset(b, h, s.first_query + begin + c), 0, 1, a.width, w.row.get(), a.width);
      for (int64_t d = 0; d < a.width; ++d) w.q[d * kColumns<C> + c] = a.scale * w.row[d];
    }
    for_panels(a, s, b, h / a.group(), queries, a.keys_of(s, queries), w.k.get(), w.v.get(), a.value_width,
               AddPanel{*this, w, Logits<T>{a, s, b}});
    for (int64_t c = 0; c < w.columns; ++c)
      if (w.lse[c] != 0) g.rest[a.of_lse.offset(b, h, s.first_query + begin + c)] = log(w.sums[c]);
  }
  // std::log has symbols that Ubuntu 18.04 lacks.
  static MSOPS_CPU C log(C x) { return x > 1 ? std::log1p(x - 1) : -std::log1p(1 / x - 1); }
};

// Computes what both gradients need of each query.
template <typename T>
void prepare_backward(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g) {
  const Delta<T> delta{a, g};
  on_cpu(call, delta.size(), delta, static_cast<double>(a.value_width));
  const Rest<T> rest{a, g};
  if (g.rest) on_threads(call, rest.items(), a.work() / 4, rest);
}

// Scores are the weights p of a panel, which dropout does not change, and the gradients dx of its logits.
template <typename T>
struct Scores {
  using C = Compute<T>;
  int64_t heads[kColumns<C>] = {}, queries[kColumns<C>] = {};  // of the columns
  C p[kKeys * kColumns<C>], dx[kKeys * kColumns<C>];
  C slopes[kKeys * kColumns<C>];  // of logits with respect to q k, where there is softcap
  C kept[kKeys * kColumns<C>];    // what multiplies p where there is dropout

  // Computes the panel of n keys, from key j on, and of queries of head h, from query i on. k and v are the keys' rows;
  // q and dout are panels, and q is scaled.
  MSOPS_CPU void compute(const ExtendedAttention<T>& a, const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j,
                         int64_t n, int64_t columns, View<C> k, View<C> v, const C* q, const C* dout, const C* lse,
                         const C* rest, const C* delta, bool in_range) {
    for (int64_t c = 0; c < columns; ++c) heads[c] = h, queries[c] = i + c;
    const Logits<T> logits{a, s, b};
    logits.fetch_mask(j, n, columns, heads, queries);
    multiply(n, columns, a.width, k, q, kColumns<C>, p, kColumns<C>, Set<C>{});
    multiply(n, columns, a.value_width, v, dout, kColumns<C>, dx, kColumns<C>, Set<C>{});
    logits.finish(p, j, n, columns, heads, queries, in_range, slopes);
    if (a.seed) {
      logits.draw(kept, j, n, heads, queries);
#pragma omp simd
      for (int64_t e = 0; e < n * kColumns<C>; ++e) dx[e] *= kept[e];
    }
    for (int64_t row = 0; row < n; ++row)
#pragma omp simd
      for (int l = 0; l < kColumns<C>; ++l) {
        const int64_t e = row * kColumns<C> + l;
        p[e] = Exponential<C>::exp(p[e] - lse[l] - rest[l]);
        dx[e] = p[e] * (dx[e] - delta[l]);
      }
  }
};

template <typename T>
struct Backward {
  using C = Compute<T>;
  ExtendedAttention<T> a;
  AttentionGradient<T> g;
  C* shares = nullptr;  // (chunks, elements of q), if there are several chunks

  // The number of chunks of keys depends on the shapes alone, so that results do not depend on the number of threads.
  int64_t chunks() const { return most(1, least(parts_of(a.keys, 512), 16 / most(1, a.batch * a.kv_heads))); }
  int64_t chunk_keys() const { return parts_of(parts_of(a.keys, chunks()), kKeys) * kKeys; }
  int64_t items() const { return a.batch * a.kv_heads * chunks(); }
  int64_t dq_size() const { return (a.is_packed() ? a.query_rows : a.batch * a.queries) * a.heads * a.width; }

  struct Workspace {
    int64_t pitch, value_pitch;  // of rows that begin at whole vectors
    C lse[kQueries<C>] = {}, rest[kQueries<C>] = {}, delta[kQueries<C>] = {};
    Scores<T> scores;
    std::unique_ptr<C[]> k, v, dk, dv;                        // rows of a chunk
    std::unique_ptr<C[]> q, dout, dq, q_panels, dout_panels;  // rows of a tile

    Workspace(const Attention<T>& a, int64_t keys)
        : pitch(padded<C>(a.width)),
          value_pitch(padded<C>(a.value_width)),
          k(new C[keys * pitch]),
          v(new C[keys * value_pitch]),
          dk(new C[keys * pitch]),
          dv(new C[keys * value_pitch]),
          q(new C[kQueries<C> * pitch]),
          dout(new C[kQueries<C> * value_pitch]),
          dq(new C[kQueries<C> * pitch]),
          q_panels(new C[kQueries<C> * a.width]),
          dout_panels(new C[kQueries<C> * a.value_width]) {}
  };

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    Workspace w(a, chunk_keys());
    const int64_t end = part_begin(items(), part + 1, parts);
    for (int64_t item = part_begin(items(), part, parts); item < end; ++item) chunk(w, item);
  }

 private:
  MSOPS_CPU void chunk(Workspace& w, int64_t item) const {
    const int64_t number = balanced(item % chunks(), chunks());
    const int64_t kv_head = item / chunks() % a.kv_heads, b = item / chunks() / a.kv_heads;
    const Sequence s = a.sequence(b);
    const int64_t begin = number * chunk_keys(), all = a.is_packed() ? s.keys : a.keys;
    const Span own{begin, least(begin + chunk_keys(), all)}, keys{begin, least(own.end, s.keys)};
    std::fill_n(w.dk.get(), keys.size() * w.pitch, C(0));
    std::fill_n(w.dv.get(), keys.size() * w.value_pitch, C(0));
    load_rows(a.k + a.of_k.offset(b, kv_head, s.first_key + begin), a.of_k.row, keys.size(), a.width, w.k.get(),
              w.pitch);
    load_rows(a.v + a.of_v.offset(b, kv_head, s.first_key + begin), a.of_v.row, keys.size(), a.value_width, w.v.get(),
              w.value_pitch);
    const Span every{0, s.queries}, some = keys.empty() ? Span{0, 0} : a.queries_of(s, keys);
    const Span queries = shares ? some : every;  // dq of all queries is written where there are no shares
    for (int64_t h = kv_head * a.group(); !queries.empty() && h < (kv_head + 1) * a.group(); ++h)
      for (int64_t i = queries.begin; i < queries.end; i += kQueries<C>)
        tile(w, s, b, h, {i, least(i + kQueries<C>, queries.end)}, keys, number);
    const int64_t hidden = own.size() - keys.size();  // rows to which multiply may have added what does not count
    std::fill_n(w.dk.get() + keys.size() * w.pitch, hidden * w.pitch, C(0));
    std::fill_n(w.dv.get() + keys.size() * w.value_pitch, hidden * w.value_pitch, C(0));
    store_rows(w.dk.get(), w.pitch, own.size(), a.width, g.dk + a.of_k.offset(b, kv_head, s.first_key + begin),
               a.of_k.row);
    store_rows(w.dv.get(), w.value_pitch, own.size(), a.value_width,
               g.dv + a.of_v.offset(b, kv_head, s.first_key + begin), a.of_v.row);
  }

  // Adds what some queries of head h give to the gradients of these keys, and stores their dq.
  MSOPS_CPU void tile(Workspace& w, const Sequence& s, int64_t b, int64_t h, Span queries, Span keys,
                      int64_t number) const {
    const int64_t rows = queries.size(), first = s.first_query + queries.begin;
    load_rows(a.q + a.of_q.offset(b, h, first), a.of_q.row, rows, a.width, w.q.get(), w.pitch);
    load_rows(g.dout + a.of_out.offset(b, h, first), a.of_out.row, rows, a.value_width, w.dout.get(), w.value_pitch);
    std::fill_n(w.dq.get(), rows * w.pitch, C(0));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = a.of_lse.offset(b, h, first + r);
      w.lse[r] = a.lse[at] == C(-HUGE_VAL) ? C(0) : a.lse[at], w.delta[r] = g.delta[at];
      w.rest[r] = g.rest ? g.rest[at] : C(0);
    }
    for (int64_t r = 0; r < rows; r += kColumns<C>) {
      const int64_t columns = least(kColumns<C>, rows - r);
      transpose(w.q.get() + r * w.pitch, w.pitch, columns, a.width, a.scale, w.q_panels.get() + r * a.width);
      transpose(w.dout.get() + r * w.value_pitch, w.value_pitch, columns, a.value_width, C(1),
                w.dout_panels.get() + r * a.value_width);
    }
    const Span seen = a.keys_of(s, queries);
    const int64_t before = most(0, seen.begin - keys.begin) / kKeys * kKeys;  // keys that no query sees
    for (int64_t j = keys.begin + before; j < least(keys.end, seen.end); j += kKeys) {
      const int64_t n = least(kKeys, keys.end - j);
      const bool in_range = cpu::in_range(a, s, queries, {j, j + n});
      for (int64_t r = 0; r < rows; r += kColumns<C>) panel(w, s, b, h, queries, r, j, n, j - keys.begin, in_range);
    }
    if (shares)
      store_rows(w.dq.get(), w.pitch, rows, a.width, shares + number * dq_size() + a.of_q.offset(b, h, first),
                 a.of_q.row);
    else
      store_rows(w.dq.get(), w.pitch, rows, a.width, g.dq + a.of_q.offset(b, h, first), a.of_q.row);
  }

  // Adds what the panel of n keys, from row `at` of the chunk on, and of queries from row r of the tile on gives.
  MSOPS_CPU void panel(Workspace& w, const Sequence& s, int64_t b, int64_t h, Span queries, int64_t r, int64_t j,
                       int64_t n, int64_t at, bool in_range) const {
    const int64_t columns = least(kColumns<C>, queries.size() - r);
    const C *const k = w.k.get() + at * w.pitch, *const v = w.v.get() + at * w.value_pitch;
    C *const p = w.scores.p, *const dz = w.scores.dx, *const slopes = w.scores.slopes, *const kept = w.scores.kept;
    w.scores.compute(a, s, b, h, queries.begin + r, j, n, columns, View<C>{k, w.pitch, 1}, View<C>{v, w.value_pitch, 1},
                     w.q_panels.get() + r * a.width, w.dout_panels.get() + r * a.value_width, w.lse + r, w.rest + r,
                     w.delta + r, in_range);
    for (int64_t e = 0; a.seed && e < n * kColumns<C>; ++e) p[e] *= kept[e];
    if (a.softcap > 0) {
#pragma omp simd
      for (int64_t e = 0; e < n * kColumns<C>; ++e) dz[e] *= slopes[e];
    } else {
#pragma omp simd
      for (int64_t e = 0; e < n * kColumns<C>; ++e) dz[e] *= a.scale;
    }
    for (int64_t e = n * kColumns<C>; e < (n + kRows - 1) / kRows * kRows * kColumns<C>; ++e) p[e] = dz[e] = 0;
    multiply(n, a.value_width, columns, View<C>{p, kColumns<C>, 1}, w.dout.get() + r * w.value_pitch, w.value_pitch,
             w.dv.get() + at * w.value_pitch, w.value_pitch, Add<C>{});
    multiply(n, a.width, columns, View<C>{dz, kColumns<C>, 1}, w.q.get() + r * w.pitch, w.pitch,
             w.dk.get() + at * w.pitch, w.pitch, Add<C>{});
    multiply(columns, a.width, n, View<C>{dz, 1, kColumns<C>}, k, w.pitch, w.dq.get() + r * w.pitch, w.pitch, Add<C>{});
  }

  template <typename To>
  static MSOPS_CPU void store_rows(const C* from, int64_t pitch, int64_t rows, int64_t width, To* to, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) narrow(from + r * pitch, to + r * stride, width);
  }
};

// Adds the shares of dq in order. Index i is a run of elements.
template <typename T>
struct AddShares {
  static constexpr int64_t kRun = 1024;
  using C = Compute<T>;
  const C* shares;
  int64_t chunks, size;
  T* dq;

  MSOPS_CPU void operator()(int64_t run) const {
    const int64_t begin = run * kRun, n = least(kRun, size - begin);
    C sums[kRun] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
#pragma omp simd
      for (int64_t e = 0; e < n; ++e) sums[e] += shares[chunk * size + begin + e];
    narrow(sums, dq + begin, n);
  }
};

template <typename T>
void backward(Call& call, const ExtendedAttention<T>& a, const AttentionGradient<T>& g) {
  using C = Compute<T>;
  prepare_backward(call, a, g);
  Backward<T> body{a, g};
  std::unique_ptr<C[]> shares;
  if (body.chunks() > 1) shares.reset(new C[body.chunks() * body.dq_size()]());
  body.shares = shares.get();
  on_threads(call, body.items(), a.work() / 2, body);
  if (shares) {
    const int64_t size = body.dq_size();
    on_cpu(call, parts_of(size, AddShares<T>::kRun), AddShares<T>{shares.get(), body.chunks(), size, g.dq},
           static_cast<double>(body.chunks() * AddShares<T>::kRun));
  }
}

}  // namespace msops::flash_attention::cpu
