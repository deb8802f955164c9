// Heads reads the queries of an item of attention, and its text's new keys and values, into shared memory.
#pragma once

#include "few_worker.h"

namespace msops::decoder_stack {

constexpr float kLowest = -1e30f;  // below any score

template <typename T, int kWarps>
struct Heads {
  static constexpr int kWord = kWordElements<T>, kPairs = kMostHeadSize / 64;  // kPairs: of a lane
  Worker<T, kWarps>& w;
  const FewTokens<T>& s;

  // Shared memory: queries (most_queries, head_size), new keys and values (length, head_size), parts of warps.
  __device__ T* query(int q) const { return reinterpret_cast<T*>(w.work()) + q * s.head_size; }
  __device__ T* fresh(int which, int row) const {
    return query(s.most_queries) + (which * s.length + row) * s.head_size;
  }
  __device__ float* part(int warp, int q) const {
    return reinterpret_cast<float*>(fresh(2, 0)) + (warp * s.most_queries + q) * (s.head_size + 2);
  }
  // Returns which of the new tokens a query of the item is of.
  __device__ int place(const Item& item, int q) const {
    int head;
    return s.by_group.divide(item.first_query + q, &head);
  }
  // Returns the row of parts and of o that a query of the item has.
  __device__ int row(const Item& item, int q) const {
    int head;
    const int place = s.by_group.divide(item.first_query + q, &head);
    return (item.text * s.length + place) * s.heads + item.kv_head * s.by_group.value() + head;
  }

  // Reads a head of a token, which begins at a row of qkv; norms it, if there are factors; rotates it, if `turns`.
  // Calls put(i, number). `place` is the row of the tables.
  template <typename Put>
  __device__ __forceinline__ void read_head(unsigned tag, int token, int place, int row, const unsigned char* factors,
                                            bool is_wide, bool turns, const Put& put) {
    const int half = s.head_size / 2;
    const uint2* const from = s.results[kQkv] + (token * s.qkv_rows() + row) / kWord;
    const float* const cos = w.tables() + place * half;
    const float* const sin = cos + s.rows_of_table() * half;
    float a[kPairs], b[kPairs], c[kPairs], d[kPairs];
    const auto first = [&](int pair) { return s.interleaved ? 2 * pair : pair; };
    const auto second = [&](int pair) { return s.interleaved ? 2 * pair + 1 : pair + half; };
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
      if (32 * j < half && turns && w.lane + 32 * j < half) c[j] = cos[w.lane + 32 * j], d[j] = sin[w.lane + 32 * j];
    uint2 words[kPairs][2];
    bool waits;
    w.watch.begin();
    do {
      waits = false;
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        if (32 * j < half && w.lane + 32 * j < half) {
          words[j][0] = ld_relaxed_b64(from + first(w.lane + 32 * j) / kWord);
          words[j][1] = ld_relaxed_b64(from + second(w.lane + 32 * j) / kWord);
        }
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        if (32 * j < half && w.lane + 32 * j < half) waits |= words[j][0].y != tag || words[j][1].y != tag;
    } while (waits && w.watch.goes_on());
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      a[j] = b[j] = 0;
      if (32 * j < half && w.lane + 32 * j < half) {
        a[j] = element_of<T>(waits ? kNanWord : words[j][0].x, first(w.lane + 32 * j) % kWord);
        b[j] = element_of<T>(waits ? kNanWord : words[j][1].x, second(w.lane + 32 * j) % kWord);
        squares += a[j] * a[j] + b[j] * b[j];
      }
    }
    float r = 1;
    if (factors) r = rsqrtf(sum_of_warp(squares) / s.head_size + s.eps);
    const Factors<T> by{factors, is_wide};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int pair = w.lane + 32 * j;
      if (32 * j >= half || pair >= half) continue;
      if (factors) {
        a[j] = rounded<T>(rounded<T>(a[j] * r) * rounded<T>(by[first(pair)]));
        b[j] = rounded<T>(rounded<T>(b[j] * r) * rounded<T>(by[second(pair)]));
      }
      if (turns) {
        const float before = a[j];
        a[j] = rounded<T>(before * c[j] - b[j] * d[j]);
        b[j] = rounded<T>(b[j] * c[j] + before * d[j]);
      }
      put(first(pair), a[j]);
      put(second(pair), b[j]);
    }
  }

  __device__ __forceinline__ void read(int layer, const Item& item) {
    const int rows = item.queries + (item.is_last ? 2 * s.length : 0);
    for (int i = w.warp; i < rows; i += kWarps) {
      w.forget();
      // which: 0 for a query, 1 for a key, 2 for a value
      const int which = i < item.queries ? 0 : i < item.queries + s.length ? 1 : 2;
      int head = 0;
      const int at =
          which == 0 ? s.by_group.divide(item.first_query + i, &head) : i - item.queries - (which - 1) * s.length;
      head += which == 0 ? item.kv_head * s.by_group.value() : s.heads + (which - 1) * s.kv_heads + item.kv_head;
      const int token = item.text * s.length + at;
      T* const to = which == 0 ? query(i) : fresh(which - 1, at);
      T* const out =
          (which == 1 ? s.k : s.v) + ((int64_t{layer} * s.tokens() + token) * s.kv_heads + item.kv_head) * s.head_size;
      const bool is_out = which > 0 && item.first_query == 0;
      const Factors<T>& norm = which == 0 ? s.q_norm : s.k_norm;
      read_head(layer + 1, token, s.has_table_of_text ? token : at, head * s.head_size,
                which < 2 && norm.data ? w.factors(2 + which) : nullptr, norm.is_wide, which < 2,
                [&](int e, float number) {
                  to[e] = T(number);
                  if (is_out) out[e] = T(number);
                });
    }
    w.sync();
  }

  // Calls f(keys, values, rows) for the item's tiles of the cache.
  template <typename F>
  __device__ __forceinline__ void for_tiles(const Item& item, const F& f) {
    const int most = s.cache_rows;
    for (int begin = item.rows.begin; begin < item.rows.end; begin += most) {
      const int rows = min(most, item.rows.end - begin);
      w.ring.wait_full();
      const T* const keys = reinterpret_cast<const T*>(w.slot());
      f(keys, keys + rows * s.head_size, rows);
      fence_proxy_async();  // cp.async has written the slot, and a bulk copy may be next
      w.ring.release();
    }
  }
};

}  // namespace msops::decoder_stack
