// Attention of few tokens: a block takes some queries that share a head of keys, and a part of the cache; a warp then
// puts the parts of four features together.
#pragma once

#include "few_worker.h"

namespace msops::decoder_stack {

constexpr float kLowest = -1e30f;  // below any score

// The rows of a tile are dealt to streams: so many lanes of a warp as have a pack of a row each. A stream has its own
// maximum, total and sums of the rows that it has seen.
template <typename T>
struct Stream {
  static constexpr int kQueries = kMostQueries;
  static constexpr int kPack = kPackWidth<T>;
  float most[kQueries], total[kQueries], sums[kQueries][kPack];

  __device__ Stream() {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      most[q] = kLowest, total[q] = 0;
#pragma unroll
      for (int e = 0; e < kPack; ++e) sums[q][e] = 0;
    }
  }
  // Adds what lanes at a distance have seen.
  __device__ __forceinline__ void merge(int distance) {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      const float other = __shfl_xor_sync(~0u, most[q], distance), higher = fmaxf(most[q], other);
      const float own = Activations<T>::exp(most[q] - higher), theirs = Activations<T>::exp(other - higher);
      total[q] = total[q] * own + __shfl_xor_sync(~0u, total[q], distance) * theirs;
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        sums[q][e] = sums[q][e] * own + __shfl_xor_sync(~0u, sums[q][e], distance) * theirs;
      most[q] = higher;
    }
  }
};

template <typename T, int kWarps>
struct Attention {
  using W = Worker<T, kWarps>;
  static constexpr int kPack = kPackWidth<T>, kWord = kWordElements<T>;
  W& w;
  const FewTokens<T>& s;
  int lanes;  // of a stream, a power of two

  // Shared memory: queries (kMostQueries, head_size), new keys and values (length, head_size), parts of warps.
  __device__ float* query(int q) const { return reinterpret_cast<float*>(w.work()) + q * s.head_size; }
  __device__ T* fresh(int which, int row) const {
    return reinterpret_cast<T*>(query(kMostQueries)) + (which * s.length + row) * s.head_size;
  }
  __device__ float* part(int warp, int q) const {
    return reinterpret_cast<float*>(fresh(2, 0)) + (warp * kMostQueries + q) * (s.head_size + 2);
  }

  __device__ explicit Attention(W& worker) : w(worker), s(worker.s), lanes(1) {
    while (lanes * kPack < s.head_size) lanes *= 2;
  }

  // ---- Heads of q, k and v ----

  // Reads a head of a token, which begins at a row of qkv; norms it, if there are factors; rotates it, if `turns`.
  // Calls put(i, number). A lane has kPairs pairs.
  template <int kPairs, typename Put>
  __device__ __forceinline__ void read_head(int layer, int token, int row, const unsigned char* factors, bool is_wide,
                                            bool turns, const Put& put) {
    const int half = s.head_size / 2;
    const unsigned tag = layer + 1;
    const uint2* const from = s.results[kQkv] + (token * s.qkv_rows() + row) / kWord;
    const int64_t angles = int64_t{s.has_table_of_text ? token : token % s.length} * half;
    float a[kPairs], b[kPairs], c[kPairs], d[kPairs];
    const auto first = [&](int pair) { return s.interleaved ? 2 * pair : pair; };
    const auto second = [&](int pair) { return s.interleaved ? 2 * pair + 1 : pair + half; };
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
      if (turns && w.lane + 32 * j < half)
        c[j] = s.cos[angles + w.lane + 32 * j], d[j] = s.sin[angles + w.lane + 32 * j];
    uint2 words[kPairs][2];
    bool waits;
    w.watch.begin();
    do {
      waits = false;
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        if (w.lane + 32 * j < half) {
          words[j][0] = ld_relaxed_b64(from + first(w.lane + 32 * j) / kWord);
          words[j][1] = ld_relaxed_b64(from + second(w.lane + 32 * j) / kWord);
        }
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        if (w.lane + 32 * j < half) waits |= words[j][0].y != tag || words[j][1].y != tag;
    } while (waits && w.watch.goes_on());
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      a[j] = b[j] = 0;
      if (w.lane + 32 * j < half) {
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
      if (pair >= half) continue;
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

  // Reads the item's queries, and its text's new keys and values where they belong to its part.
  template <int kPairs>
  __device__ __forceinline__ void read_heads(int layer, const Item& item) {
    const int rows = item.queries + (item.is_last ? 2 * s.length : 0);
    for (int i = w.warp; i < rows; i += kWarps) {
      w.forget();
      if (i < item.queries) {
        int head;
        const int place = s.by_group.divide(item.first_query + i, &head);
        read_head<kPairs>(layer, item.text * s.length + place, (item.kv_head * s.by_group.value() + head) * s.head_size,
                          s.q_norm.data ? w.factors(2) : nullptr, s.q_norm.is_wide, true,
                          [&](int e, float number) { query(i)[e] = number * s.scale; });
        continue;
      }
      const int which = i - item.queries < s.length ? 0 : 1, place = i - item.queries - which * s.length;
      const int row = (s.heads + which * s.kv_heads + item.kv_head) * s.head_size;
      const int64_t token = item.text * s.length + place;
      T* const out =
          (which == 0 ? s.k : s.v) + ((int64_t{layer} * s.tokens() + token) * s.kv_heads + item.kv_head) * s.head_size;
      read_head<kPairs>(layer, token, row, which == 0 && s.k_norm.data ? w.factors(3) : nullptr, s.k_norm.is_wide,
                        which == 0, [&](int e, float number) {
                          fresh(which, place)[e] = T(number);
                          if (item.first_query == 0) out[e] = T(number);
                        });
    }
    w.sync();
  }

  // ---- Rows of keys and values ----

  // Takes rows of keys and values from shared memory. A query sees the rows below its limit.
  template <typename Limit>
  __device__ __forceinline__ void attend(Stream<T>& stream, const float (&queries)[kMostQueries][kPack], const T* keys,
                                         const T* values, int rows, const Limit& limit) const {
    constexpr int kQueries = kMostQueries;
    const int rows_at_once = 32 / lanes, pack = w.lane % lanes;
    for (int first = w.warp * rows_at_once; first < rows; first += kWarps * rows_at_once) {
      const int row = first + w.lane / lanes;
      Pack<T, kPack> key = {}, value = {};
      if (row < rows && pack * kPack < s.head_size) {
        key = load<kPack>(keys + row * s.head_size + pack * kPack);
        value = load<kPack>(values + row * s.head_size + pack * kPack);
      }
      float scores[kQueries];
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        scores[q] = 0;
#pragma unroll
        for (int e = 0; e < kPack; ++e) scores[q] += queries[q][e] * float(key.values[e]);
      }
      for (int distance = lanes / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int q = 0; q < kQueries; ++q) scores[q] += __shfl_xor_sync(~0u, scores[q], distance);
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        const bool sees = row < rows && row < limit(q);
        const float higher = sees ? fmaxf(stream.most[q], scores[q]) : stream.most[q];
        const float before = Activations<T>::exp(stream.most[q] - higher);
        const float weight = sees ? Activations<T>::exp(scores[q] - higher) : 0;
        stream.total[q] = stream.total[q] * before + weight;
#pragma unroll
        for (int e = 0; e < kPack; ++e)
          stream.sums[q][e] = stream.sums[q][e] * before + weight * float(value.values[e]);
        stream.most[q] = higher;
      }
    }
  }

  __device__ void attend_item(const Item& item) {
    constexpr int kQueries = kMostQueries;
    const int pack = w.lane % lanes;
    float queries[kQueries][kPack];
#pragma unroll
    for (int q = 0; q < kQueries; ++q)
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        queries[q][e] = q < item.queries && pack * kPack < s.head_size ? query(q)[pack * kPack + e] : 0;
    Stream<T> stream;
    const int most = s.cache_rows_of_slot();
    for (int begin = item.rows.begin; begin < item.rows.end; begin += most) {
      const int rows = min(most, item.rows.end - begin);
      w.ring.wait_full();
      const T* const keys = reinterpret_cast<const T*>(w.slot());
      attend(stream, queries, keys, keys + rows * s.head_size, rows, [=](int) { return rows; });
      w.ring.release();
    }
    if (item.is_last)
      attend(stream, queries, fresh(0, 0), fresh(1, 0), s.length, [&](int q) {
        int head;
        return s.by_group.divide(item.first_query + q, &head) + 1;
      });
    for (int distance = lanes; distance < 32; distance *= 2) stream.merge(distance);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (q >= item.queries || w.lane >= lanes) continue;
      float* const to = part(w.warp, q);
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (pack * kPack < s.head_size) to[pack * kPack + e] = stream.sums[q][e];
      if (pack == 0) to[s.head_size] = stream.most[q], to[s.head_size + 1] = stream.total[q];
    }
    w.sync();
  }

  // Adds up the warps' parts and publishes them.
  __device__ void publish_item(const Item& item, unsigned tag) const {
    for (int i = w.thread; i < item.queries * s.head_size; i += W::kThreads) {
      int e, head;
      const int q = s.by_head_size.divide(i, &e), place = s.by_group.divide(item.first_query + q, &head);
      float most = kLowest, sum = 0, total = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) most = fmaxf(most, part(warp, q)[s.head_size]);
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float factor = Activations<T>::exp(part(warp, q)[s.head_size] - most);
        sum += part(warp, q)[e] * factor;
        total += part(warp, q)[s.head_size + 1] * factor;
      }
      const int row = (item.text * s.length + place) * s.heads + item.kv_head * s.by_group.value() + head;
      uint2* const to = s.of_parts + (int64_t{row} * s.splits + item.split) * (s.head_size + 2);
      publish(to + e, __float_as_uint(sum), tag);
      if (e == 0) {
        publish(to + s.head_size, __float_as_uint(most), tag);
        publish(to + s.head_size + 1, __float_as_uint(total), tag);
      }
    }
    w.sync();
  }

  __device__ void take_items(int layer) {
    for (int i = 0; i < w.of_block.items; ++i) {
      const Item& item = w.of_block.of_item[i];
      if (s.head_size <= 64) {
        read_heads<1>(layer, item);
      } else {
        read_heads<kMostHeadSize / 64>(layer, item);
      }
      attend_item(item);
      publish_item(item, layer + 1);
    }
  }

  // ---- Parts ----

  // Puts the parts of a token's head together. A warp takes 4 features, and has 8 streams of parts.
  __device__ void merge_parts(unsigned tag) {
    constexpr int kFeatures = 4, kStreams = 32 / kFeatures, kAhead = 4;
    const int all = s.tokens() * s.heads * s.head_size / kFeatures;
    for (int i = w.warp * gridDim.x + blockIdx.x; i < all; i += kWarps * gridDim.x) {
      int feature;
      const int row = s.by_head_size.divide(kFeatures * i, &feature);
      feature += w.lane % kFeatures;
      const int used = w.of_block.splits[s.batch == 1 ? 0 : row / (s.heads * s.length)];
      const uint2* const from = s.of_parts + int64_t{row} * s.splits * (s.head_size + 2);
      float most = kLowest, total = 0, sum = 0;
      const auto add = [&](float of_most, float of_total, float of_sum) {
        const float higher = fmaxf(most, of_most);
        const float own = Activations<T>::exp(most - higher), theirs = Activations<T>::exp(of_most - higher);
        total = total * own + of_total * theirs, sum = sum * own + of_sum * theirs, most = higher;
      };
      for (int first = w.lane / kFeatures; first < used; first += kAhead * kStreams) {
        uint2 sums[kAhead];
        uint4 others[kAhead];
        bool waits;
        w.watch.begin();
        do {
          waits = false;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            const uint2* const part = from + (first + j * kStreams) * (s.head_size + 2);
            if (first + j * kStreams < used)
              sums[j] = ld_relaxed_b64(part + feature), others[j] = ld_relaxed_v2_b64(part + s.head_size);
          }
#pragma unroll
          for (int j = 0; j < kAhead; ++j)
            if (first + j * kStreams < used) waits |= sums[j].y != tag || others[j].y != tag || others[j].w != tag;
        } while (waits && w.watch.goes_on());
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (first + j * kStreams < used)
            add(__uint_as_float(others[j].x), __uint_as_float(others[j].z),
                __uint_as_float(waits ? kNanWord : sums[j].x));
      }
      for (int distance = kFeatures; distance < 32; distance *= 2) {
        const float of_most = __shfl_xor_sync(~0u, most, distance), of_total = __shfl_xor_sync(~0u, total, distance);
        add(of_most, of_total, __shfl_xor_sync(~0u, sum, distance));
      }
      const float result = sum / total;
      float numbers[kWord];
      for (int e = 0; e < kWord; ++e) numbers[e] = __shfl_down_sync(~0u, result, e);
      if (w.lane < kFeatures && w.lane % kWord == 0)
        publish(s.of_attention + (row * s.head_size + feature) / kWord, word_of<T>(numbers), tag);
    }
  }
};

}  // namespace msops::decoder_stack
