// Attention of few tokens: a block takes some queries that share a head of keys, and a part of the cache; a warp then
// puts the parts of four features together.
#pragma once

#include "few_mma.h"
#include "few_streams.h"

namespace msops::decoder_stack {

template <typename T, int kMost>
struct Attention {
  static constexpr int kWord = kWordElements<T>, kWarps = warps_for(kMost);
  Worker<T, kMost>& w;
  const FewTokens<T>& s;
  Heads<T, kMost> heads;

  __device__ explicit Attention(Worker<T, kMost>& worker) : w(worker), s(worker.s), heads{worker, worker.s} {}

  // Adds up the warps' parts and publishes them. A thread has two features; that of the first two has the total, too.
  __device__ void publish_item(const Item& item, unsigned tag) const {
    const int size = s.head_size, stride = s.most_queries * (size + 2);
    for (int i = 2 * w.thread; i < item.queries * size; i += 2 * w.kThreads) {
      int e;
      const int q = s.by_head_size.divide(i, &e);
      const float* const parts = heads.part(0, q);
      float of_warps[kWarps], most = kLowest, total = 0, sums[2] = {};
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        of_warps[warp] = parts[warp * stride + size];
        most = fmaxf(most, of_warps[warp]);
      }
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float* const part = parts + warp * stride;
        const float factor = Activations<T>::exp(of_warps[warp] - most);
        const Pack<float, 2> pack = load<2>(part + e);
        sums[0] += pack.values[0] * factor, sums[1] += pack.values[1] * factor, total += part[size + 1] * factor;
      }
      uint2* const to = s.of_parts + (int64_t{heads.row(item, q)} * s.splits + item.split) * (size + 2);
      publish(to + e, __float_as_uint(sums[0]), tag);
      publish(to + e + 1, __float_as_uint(sums[1]), tag);
      if (e == 0) {
        publish(to + size, __float_as_uint(most), tag);
        publish(to + size + 1, __float_as_uint(total), tag);
      }
    }
    w.sync();
  }

  __device__ void take_items(int layer) {
    for (int i = 0; i < w.of_block.items; ++i) {
      const Item& item = w.of_block.of_item[i];
      heads.read(layer, item);
      w.forget();
      if constexpr (sizeof(T) == 2) {
        MmaAttention<kMost>{heads}.attend(item);
      } else {
        Streams<T, kMost>(heads).attend(item);
      }
      w.sync();
      w.forget();
      publish_item(item, layer + 1);
    }
  }

  // ---- Parts ----

  // Puts the parts of a token's head together. A warp takes 4 features, and has 8 streams of parts.
  __device__ void merge_parts(unsigned tag) {
    constexpr int kFeatures = 4, kStreams = 32 / kFeatures, kAhead = 6;
    const int all = w.tokens() * s.heads * s.head_size / kFeatures;
    for (int i = w.warp * gridDim.x + blockIdx.x; i < all; i += kWarps * gridDim.x) {
      int feature;
      const int row = s.by_head_size.divide(kFeatures * i, &feature);
      feature += w.lane % kFeatures;
      const int used = w.of_block.splits[kMost == 1 || s.batch == 1 ? 0 : row / (s.heads * s.length)];
      const int stride = s.head_size + 2;
      const uint2* const from = s.of_parts + int64_t{row} * s.splits * stride;
      float most = kLowest, total = 0, sum = 0;
      for (int first = w.lane / kFeatures; first < used; first += kAhead * kStreams) {
        uint2 sums[kAhead];
        uint4 others[kAhead];  // maximum and total
        bool waits;
        w.watch.begin();
        do {
          waits = false;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            const uint2* const part = from + (first + j * kStreams) * stride;
            if (first + j * kStreams < used)
              sums[j] = ld_relaxed_b64(part + feature), others[j] = ld_relaxed_v2_b64(part + s.head_size);
          }
#pragma unroll
          for (int j = 0; j < kAhead; ++j)
            if (first + j * kStreams < used) waits |= sums[j].y != tag || others[j].y != tag || others[j].w != tag;
        } while (waits && w.watch.goes_on());
        float higher = most;
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (first + j * kStreams < used) higher = fmaxf(higher, __uint_as_float(others[j].x));
        const float before = Activations<T>::exp(most - higher);
        most = higher, total *= before, sum *= before;
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (first + j * kStreams < used) {
            const float factor = Activations<T>::exp(__uint_as_float(others[j].x) - higher);
            total += __uint_as_float(others[j].z) * factor;
            sum += __uint_as_float(waits ? kNanWord : sums[j].x) * factor;
          }
      }
      float highest = most;
      for (int distance = kFeatures; distance < 32; distance *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
      const float factor = Activations<T>::exp(most - highest);
      total *= factor, sum *= factor;
      for (int distance = kFeatures; distance < 32; distance *= 2) {
        total += __shfl_xor_sync(~0u, total, distance);
        sum += __shfl_xor_sync(~0u, sum, distance);
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
