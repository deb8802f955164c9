// Streams attend to keys and values by the cores for float32: for float32.
#pragma once

#include "few_heads.h"

namespace msops::decoder_stack {

// The rows of a tile are dealt to streams: so many lanes of a warp as have a pack of a row each. A stream has its own
// maximum, total and sums of the rows that it has seen.
template <typename T>
struct Stream {
  static constexpr int kQueries = kStreamQueries, kPack = kPackWidth<T>;
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

template <typename T, int kMost>
struct Streams {
  static constexpr int kWarps = warps_for(kMost), kPack = kPackWidth<T>, kQueries = kStreamQueries;
  Heads<T, kMost>& h;
  int lanes_log2 = 0;  // lanes of a stream

  __device__ explicit Streams(Heads<T, kMost>& heads) : h(heads) {
    while (kPack << lanes_log2 < h.s.head_size) ++lanes_log2;
  }

  // Takes rows of keys and values from shared memory. A query sees the rows below its limit.
  template <typename Limit>
  __device__ __forceinline__ void attend(Stream<T>& stream, const float (&queries)[kQueries][kPack], const T* keys,
                                         const T* values, int rows, const Limit& limit) const {
    const int rows_at_once = 32 >> lanes_log2, pack = h.w.lane & ((1 << lanes_log2) - 1);
    for (int first = h.w.warp * rows_at_once; first < rows; first += kWarps * rows_at_once) {
      const int row = first + (h.w.lane >> lanes_log2);
      Pack<T, kPack> key = {}, value = {};
      if (row < rows && pack * kPack < h.s.head_size) {
        key = load<kPack>(keys + row * h.s.head_size + pack * kPack);
        value = load<kPack>(values + row * h.s.head_size + pack * kPack);
      }
      float scores[kQueries];
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        scores[q] = 0;
#pragma unroll
        for (int e = 0; e < kPack; ++e) scores[q] += queries[q][e] * float(key.values[e]);
      }
      for (int distance = 1 << lanes_log2 >> 1; distance > 0; distance /= 2)
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

  // Leaves the warps' parts in shared memory.
  __device__ void attend(const Item& item) const {
    const int lanes = 1 << lanes_log2, pack = h.w.lane & (lanes - 1), size = h.s.head_size;
    float queries[kQueries][kPack];
#pragma unroll
    for (int q = 0; q < kQueries; ++q)
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        queries[q][e] = q < item.queries && pack * kPack < size ? float(h.query(q)[pack * kPack + e]) * h.s.scale : 0;
    Stream<T> stream;
    h.for_tiles(item, [&](const T* keys, const T* values, int rows) {
      attend(stream, queries, keys, values, rows, [=](int) { return rows; });
    });
    if (item.is_last)
      attend(stream, queries, h.fresh(0, 0), h.fresh(1, 0), h.w.length(), [&](int q) { return h.place(item, q) + 1; });
    for (int distance = lanes; distance < 32; distance *= 2) stream.merge(distance);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (q >= item.queries || h.w.lane >= lanes) continue;
      float* const to = h.part(h.w.warp, q);
#pragma unroll
      for (int e = 0; e < kPack; ++e)
        if (pack * kPack < size) to[pack * kPack + e] = stream.sums[q][e];
      if (pack == 0) to[size] = stream.most[q], to[size + 1] = stream.total[q];
    }
  }
};

}  // namespace msops::decoder_stack
