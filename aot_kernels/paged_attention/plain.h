// Paged attention on any GPU, by multiply-adds of single numbers: for float32 and float64, for caches of int8, and for
// heads that the kernel for tensor cores does not take.
//
// A block takes a tile of kRows rows with tiles of kKeys keys. Eight lanes share a product of a row and a key; then a
// thread has columns of the sums of values.
#pragma once

#include "../common/pack.h"
#include "plan.h"

#ifdef __CUDACC__

namespace msops::paged::plain {

constexpr int kRows = 8, kKeys = 32, kThreads = 128, kWarps = kThreads / 32;

template <typename C>
struct Shared {
  C q[kRows][kMostFeatures];  // times the scale, and those of codes
  C x[kRows][kKeys], offset[kRows], max[kRows], sum[kRows], factor[kRows];
  int64_t row[kKeys];                 // of the caches, or -1
  int64_t head[kRows], token[kRows];  // of q
};

// products[r] += q[r] k over the columns of a key that the lane has: packs of N, eight lanes next to each other.
template <int N, typename P>
__device__ __forceinline__ void multiply(typename P::C (&products)[kRows], const P& p, const typename P::Cached* key,
                                         const Shared<typename P::C>& shared, int lane) {
  using C = typename P::C;
#pragma unroll 2
  for (int d = lane * N; d < p.width; d += 8 * N) {
    const auto pack = load<N>(key + d);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const C of_key = C(static_cast<C>(pack.values[e]));
#pragma unroll
      for (int r = 0; r < kRows; ++r) products[r] += shared.q[r][d + e] * of_key;
    }
  }
}

// Loads the queries of an item, times all scales of keys.
template <typename P>
__device__ void load_queries(Shared<typename P::C>& shared, const P& p, const Item& item) {
  using C = typename P::C;
  if (threadIdx.x < kRows) {
    shared.head[threadIdx.x] = item.head_of(p, threadIdx.x), shared.token[threadIdx.x] = item.token_of(threadIdx.x);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < kRows * static_cast<int>(p.width); e += kThreads) {
    const int r = e / static_cast<int>(p.width), d = e % static_cast<int>(p.width);
    C value = 0;
    if (item.has(r)) value = C(p.query(item.s.first + shared.token[r], shared.head[r])[d]) * p.scale;
    if (P::kHasCodes) value *= p.of_k.scale(item.head, d);
    shared.q[r][d] = value;
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    const int r = threadIdx.x;
    C offset = 0;
    for (int d = 0; P::kHasCodes && d < p.width; ++d) offset += shared.q[r][d] * p.of_k.zero(item.head, d);
    shared.offset[r] = offset, shared.max[r] = C(-INFINITY), shared.sum[r] = 0;
  }
  __syncthreads();
}

// Computes logits of kKeys keys from key j on.
template <typename P>
__device__ void compute_logits(Shared<typename P::C>& shared, const P& p, const Item& item, int64_t j, bool in_packs) {
  using C = typename P::C;
  constexpr int N = kPackWidth<typename P::Cached>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 8;
#pragma unroll
  for (int round = 0; round < kKeys / kWarps / 4; ++round) {
    const int key = (round * kWarps + warp) * 4 + threadIdx.x % 32 / 8;
    const int64_t row = shared.row[key];
    C products[kRows] = {};
    if (row >= 0) {
      const auto* const from = p.key(row, item.head);
      in_packs ? multiply<N>(products, p, from, shared, lane) : multiply<1>(products, p, from, shared, lane);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      C x = products[r];
#pragma unroll
      for (int apart = 4; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
      if (lane == r) products[0] = x;
    }
    C x = C(-INFINITY);
    if (row >= 0 && item.has(lane)) {
      x = products[0] - shared.offset[lane];
      if (p.softcap > 0) x = p.softcap * tanh(x / p.softcap);
      x = p.logit(x, item.s, item.b, shared.head[lane], shared.token[lane], j + key);
    }
    shared.x[lane][key] = x;
  }
  static_assert(kRows == 8, "a lane has a row in the end");
}

// Turns logits into weights. A warp takes a row after another, and a lane a key.
template <typename C>
__device__ void compute_weights(Shared<C>& shared) {
  static_assert(kKeys == 32, "a lane has a key");
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < kRows; r += kWarps) {
    const C x = shared.x[r][lane], old = shared.max[r];
    C max = x > old ? x : old;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const C other = __shfl_xor_sync(~0u, max, apart);
      max = other > max ? other : max;
    }
    const C base = max == C(-INFINITY) ? C(0) : max, weight = exp(x - base), factor = exp(old - base);
    C sum = weight;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    shared.x[r][lane] = weight;
    __syncwarp();  // all lanes have read the maximum
    if (lane == 0) shared.max[r] = max, shared.factor[r] = factor, shared.sum[r] = shared.sum[r] * factor + sum;
  }
}

template <typename P, int kSlices>
__global__ void __launch_bounds__(kThreads) plain_paged(const P p, const Plan plan, bool in_packs) {
  using C = typename P::C;
  using T = typename P::Element;
  __shared__ Shared<C> shared;
  const int64_t count = plan.first[p.batch];
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const Item item = Item::of(p, plan, number);
    __syncthreads();  // others may still read what is overwritten
    load_queries(shared, p, item);
    C out[kSlices][kRows] = {};
    for (int64_t j = item.keys.begin; j < item.keys.end; j += kKeys) {
      if (threadIdx.x < kKeys)
        shared.row[threadIdx.x] = j + threadIdx.x < item.keys.end ? p.row_of_key(item.b, j + threadIdx.x) : -1;
      __syncthreads();
      compute_logits(shared, p, item, j, in_packs);
      __syncthreads();
      compute_weights(shared);
      __syncthreads();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
        for (int r = 0; r < kRows; ++r) out[slice][r] *= shared.factor[r];
#pragma unroll 4
      for (int key = 0; key < kKeys; ++key) {
        if (shared.row[key] < 0) continue;
        const auto* const from = p.value(shared.row[key], item.head);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          const int column = slice * kThreads + threadIdx.x;
          if (column >= p.value_width) continue;
          const C value = C(from[column]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) out[slice][r] += shared.x[r][key] * value;
        }
      }
      __syncthreads();
    }
    const bool is_whole = p.parts_of_sequence(item.s) == 1;
    for (int r = 0; r < kRows && item.has(r); ++r) {
      const int64_t i = shared.token[r], head = shared.head[r], token = item.s.first + i;
      const C sum = shared.sum[r], inverse = sum == 0 ? C(0) : 1 / sum;
      if (threadIdx.x == 0 && is_whole) p.lse[head * p.tokens + token] = shared.max[r] + log(sum);
      if (threadIdx.x == 0 && !is_whole) {
        C* const stats = p.partial_stats(item.part, item.s, item.b, i, head);
        stats[0] = shared.max[r], stats[1] = sum;
      }
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = slice * kThreads + threadIdx.x;
        if (column >= p.value_width) continue;
        C value = 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) value = row == r ? out[slice][row] : value;
        if (P::kHasCodes) value = (value - sum * p.of_v.zero(item.head, column)) * p.of_v.scale(item.head, column);
        if (is_whole)
          p.out[(token * p.heads + head) * p.value_width + column] = T(value * inverse);
        else
          p.partial_sums(item.part, item.s, item.b, i, head)[column] = value;
      }
    }
  }
}

// Computes out and lse of the sequences that have rows as the plan says, or what parts of their keys have summed.
template <typename P>
void launch_paged(Call& call, const P& p, int64_t* first, int64_t least_rows) {
  using K = typename P::Cached;
  const Plan plan{first, kRows, least_rows, INT64_MAX, p.kv_heads, p.group, nullptr};
  launch_plans(call, p, {{plan}, 1});
  const auto kernel = p.value_width <= 2 * kThreads ? plain_paged<P, 2> : plain_paged<P, 5>;
  static_assert(kMostFeatures <= 5 * kThreads, "a thread has at most 5 columns");
  const bool in_packs = p.width % kPackWidth<K> == 0 && is_aligned<kPackWidth<K>>(p.k);
  const int64_t tiles = parts_of(p.tokens * p.group, kRows) + p.batch;
  const int64_t blocks = std::max(1, blocks_at_once(Gpu(), kernel, kThreads, 0));
  launch(call, kernel, least(blocks, tiles * p.kv_heads * p.parts), kThreads, 0, p, plan, in_packs);
}

}  // namespace msops::paged::plain

#endif
