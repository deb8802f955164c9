// Heads reads the queries of an item of attention, and its text's new keys and values, into shared memory.
#pragma once

#include "few_worker.h"

namespace msops::decoder_stack {

constexpr float kLowest = -1e30f;  // below any score

template <typename T, int kMost>
struct Heads {
  static constexpr int kWord = kWordElements<T>, kWarps = warps_for(kMost);
  Worker<T, kMost>& w;
  const FewTokens<T>& s;

  // Shared memory: queries (most_queries, head_size), new keys and values (length, head_size), parts of warps.
  __device__ T* query(int q) const { return reinterpret_cast<T*>(w.work()) + q * s.head_size; }
  __device__ T* fresh(int which, int row) const {
    return query(s.most_queries) + (which * w.length() + row) * s.head_size;
  }
  __device__ float* part(int warp, int q) const {
    return reinterpret_cast<float*>(fresh(2, 0)) + (warp * s.most_queries + q) * (s.head_size + 2);
  }
  // Returns which of the new tokens a query of the item is of, and sets *head among those that share keys.
  __device__ int place(const Item& item, int q, int* head) const {
    if constexpr (kMost == 1) return *head = item.first_query + q, 0;
    return s.by_group.divide(item.first_query + q, head);
  }
  __device__ int place(const Item& item, int q) const {
    int head;
    return place(item, q, &head);
  }
  // Returns the row of parts and of o that a query of the item has.
  __device__ int row(const Item& item, int q) const {
    int head;
    const int at = place(item, q, &head);
    return (item.text * w.length() + at) * s.heads + item.kv_head * s.by_group.value() + head;
  }

  // Reads the item's queries, and with its last part the new keys and values; norms queries and keys by head, if there
  // are factors, and rotates them. A row of up to 64 features takes half a warp, else a whole one, so that all rows of
  // an item of one token are read at once. A lane has pairs 2 lane and 2 lane + 1.
  __device__ __forceinline__ void read(int layer, const Item& item) {
    const int size = s.head_size, half = size / 2, lanes_log2 = size > 64 ? 5 : 4, rows_of_warp = 32 >> lanes_log2;
    const int lane = w.lane & ((1 << lanes_log2) - 1);
    const int first = s.interleaved ? 4 * lane : 2 * lane, second = s.interleaved ? first + 2 : first + half;
    const int rows = item.queries + (item.is_last ? 2 * w.length() : 0);
    for (int begin = w.warp * rows_of_warp; begin < rows; begin += kWarps * rows_of_warp) {
      const int i = begin + (w.lane >> lanes_log2);
      const bool is_there = i < rows && 2 * lane < half;
      // which: 0 for a query, 1 for a key, 2 for a value
      const int which = i < item.queries ? 0 : i < item.queries + w.length() ? 1 : 2;
      int head = 0;
      const int at = which == 0 ? place(item, i, &head) : i - item.queries - (which - 1) * w.length();
      head += which == 0 ? item.kv_head * s.by_group.value() : s.heads + (which - 1) * s.kv_heads + item.kv_head;
      const int token = item.text * w.length() + at;
      const uint2* const from = s.results[kQkv] + (token * s.qkv_rows() + head * size) / kWord;
      Pack<float, 2> cos = {}, sin = {};
      if (is_there && which < 2) {
        const float* const angles = w.tables() + (s.has_table_of_text ? token : at) * half + 2 * lane;
        cos = load<2>(angles), sin = load<2>(angles + s.rows_of_table() * half);
      }
      float numbers[4] = {};  // at `first`, + 1, `second`, + 1
      bool waits = false;
      w.watch.begin();
      do {
        if (is_there)
          waits = !read_two<T>(from + first / kWord, layer + 1, numbers[0], numbers[1]) |
                  !read_two<T>(from + second / kWord, layer + 1, numbers[2], numbers[3]);
      } while (waits && w.watch.goes_on());
      if (waits) numbers[0] = numbers[1] = numbers[2] = numbers[3] = __uint_as_float(kNanWord);
      const Factors<T>& norm = which == 0 ? s.q_norm : s.k_norm;
      if (s.q_norm.data || s.k_norm.data) {
        float squares = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) squares += numbers[e] * numbers[e];
        __syncwarp();
        for (int distance = 1 << lanes_log2 >> 1; distance > 0; distance /= 2)
          squares += __shfl_xor_sync(~0u, squares, distance);
        const float r = rsqrtf(squares / size + s.eps);
        const Factors<T> by{w.factors(2 + which % 2), norm.is_wide};
        if (is_there && which < 2 && norm.data)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            numbers[e] = rounded<T>(rounded<T>(numbers[e] * r) * rounded<T>(by[(e < 2 ? first : second) + e % 2]));
      }
      const auto swap = [&] {  // where pairs are neighbours
        const float second_of_first = numbers[1];
        if (s.interleaved) numbers[1] = numbers[2], numbers[2] = second_of_first;
      };
      if (which < 2) {
        swap();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float before = numbers[j];
          numbers[j] = before * cos.values[j] - numbers[2 + j] * sin.values[j];
          numbers[2 + j] = numbers[2 + j] * cos.values[j] + before * sin.values[j];
        }
        swap();
      }
      if (!is_there) continue;
      const Pack<T, 2> a = rounded_pack<T, 2>({numbers[0], numbers[1]}),
                       b = rounded_pack<T, 2>({numbers[2], numbers[3]});
      T* const to = which == 0 ? query(i) : fresh(which - 1, at);
      store(to + first, a), store(to + second, b);
      if (which > 0 && item.first_query == 0) {
        T* const out =
            (which == 1 ? s.k : s.v) + ((int64_t{layer} * w.tokens() + token) * s.kv_heads + item.kv_head) * size;
        store(out + first, a), store(out + second, b);
      }
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
