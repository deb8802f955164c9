// Attention of few new tokens of a text to its cache, in float16: mma_decode of flash_attention sums over splits of the
// cached rows, where they are, and finish_kernel adds up the splits and the new rows.
#pragma once

#ifdef __CUDACC__

#include "../common/launch.h"
#include "../common/sum.h"
#include "../flash_attention/delta.h"
#include "../flash_attention/mma_decode.h"
#include "stack.h"

namespace msops::decoder_stack::gpu {

// A block sums a split. There are two at least, since finish_kernel adds the new rows to what splits write, at most 64,
// and about as many blocks as an H200 has room for at once, with 128 keys or more for each.
template <typename T>
int64_t cache_splits(const Stack<T>& s) {
  constexpr int64_t kMostBlocks = 384, kLeastKeys = 128;
  const int64_t blocks = kMostBlocks / flash_attention::most(1, s.batch * s.kv_heads);
  return std::clamp<int64_t>(std::min(blocks, s.room / kLeastKeys), 2, 64);
}

// Returns how many numbers of float the splits write.
template <typename T>
int64_t split_numbers(const Stack<T>& s) {
  return size_of({cache_splits(s), s.tokens(), s.heads, s.head_size + 2});
}

// `lengths` has how many cached rows of each text count.
inline flash_attention::Attention<Half> attention_to_cache(const Stack<Half>& s, const Layer<Half>& layer,
                                                           const Half* q, const int32_t* lengths, float* partial) {
  flash_attention::Attention<Half> a{};
  a.batch = s.batch, a.heads = s.heads, a.kv_heads = s.kv_heads, a.queries = a.query_rows = s.length;
  a.keys = a.key_rows = s.room, a.width = a.value_width = s.head_size;
  a.q = q, a.k = layer.keys, a.v = layer.values;
  a.of_q = {s.length * s.of_heads(), s.head_size, s.of_heads()};
  a.of_k = a.of_v = {s.room * s.of_kv_heads(), s.head_size, s.of_kv_heads()};
  a.scale = s.scale(), a.left = a.right = -1, a.splits = cache_splits(s), a.partial = partial;
  a.kv_lengths = lengths;
  return a;
}

constexpr int kFinishWarps = 4;

// Splits are what finish_kernel reads of the cached rows.
struct Splits {
  flash_attention::Attention<Half> a;

  MSOPS_BOTH int64_t parts_of_text(int64_t) const { return a.splits; }
  MSOPS_BOTH const float* stats_of(int64_t split, int64_t b, int64_t head, int64_t i) const {
    return a.partial_stats(split, b, head, i);
  }
  MSOPS_BOTH const float* sums_of(int64_t split, int64_t b, int64_t head, int64_t i) const {
    return a.partial_sums(split, b, head, i);
  }
};

// Computes heads of o from what the parts of the cached rows have summed, and from the new rows up to the query's own.
// A warp takes a head of a token, and a lane every 32nd of up to 32 kPerLane features.
template <int kPerLane, typename Parts>
__global__ void __launch_bounds__(32 * kFinishWarps)
    finish_kernel(const __grid_constant__ Stack<Half> s, const __grid_constant__ Layer<Half> layer, const Parts cached,
                  const Half* queries, float scale, Half* o) {
  const int64_t item = int64_t{blockIdx.x} * kFinishWarps + threadIdx.x / 32;
  if (item >= s.tokens() * s.heads) return;
  const int64_t t = item / s.heads, head = item % s.heads, b = t / s.length, i = t % s.length;
  const int64_t size = s.head_size, kv_head = head / s.group();
  const int lane = threadIdx.x % 32;
  // Calls f(e, feature) for the lane's features.
  const auto for_features = [&](const auto& f) {
#pragma unroll
    for (int e = 0; e < kPerLane; ++e)
      if (lane + 32 * e < size) f(e, lane + 32 * e);
  };
  float q[kPerLane] = {}, total[kPerLane] = {}, max = -INFINITY, sum = 0;
  for_features([&](int e, int feature) { q[e] = float(queries[item * size + feature]) * scale; });
  // Adds some rows of the cache, or a new row. Their weights sum to e^logit of_sum, and their weighted values to
  // e^logit number(feature).
  const auto add = [&](float logit, float of_sum, const auto& number) {
    if (of_sum == 0) return;
    const float greatest = fmaxf(max, logit), kept = expf(max - greatest), share = expf(logit - greatest);
    max = greatest, sum = sum * kept + of_sum * share;
    for_features([&](int e, int feature) { total[e] = total[e] * kept + share * number(feature); });
  };
  for (int64_t part = 0; part < cached.parts_of_text(b); ++part) {
    const float *const stats = cached.stats_of(part, b, head, i), *const sums = cached.sums_of(part, b, head, i);
    add(stats[0], stats[1], [&](int feature) { return sums[feature]; });
  }
  for (int64_t j = 0; j <= i; ++j) {
    const int64_t row = ((b * s.length + j) * s.kv_heads + kv_head) * size;
    float dot = 0;
    for_features([&](int e, int feature) { dot += q[e] * float(layer.k[row + feature]); });
    add(team_sum<32>(dot), 1, [&](int feature) { return float(layer.v[row + feature]); });
  }
  for_features([&](int e, int feature) { o[item * size + feature] = Half(total[e] / sum); });
}

template <int kWidth, typename Parts>
void finish(Call& call, const Stack<Half>& s, const Layer<Half>& layer, const Parts& cached, const Half* q, Half* o) {
  launch(call, finish_kernel<kWidth / 32, Parts>, flash_attention::parts_of(s.tokens() * s.heads, kFinishWarps),
         32 * kFinishWarps, 0, s, layer, cached, q, s.scale(), o);
}

// Computes o, or returns false and does nothing if the GPU lacks the instructions.
template <int kWidth>
bool attend_to_cache(Call& call, const Stack<Half>& s, const Layer<Half>& layer,
                     const flash_attention::Attention<Half>& a, Half* o) {
  using namespace flash_attention;
  const int aligned = aligned_rows(a);
  const auto go = [&](auto shape) {
    if (!launch_decode<decltype(shape)>(call, a, aligned)) return false;
    return finish<kWidth>(call, s, layer, Splits{a}, a.q, o), true;
  };
  return has_few_aligned_rows(a, aligned) ? go(DecodeShape<kWidth, false>{}) : go(DecodeShape<kWidth, true>{});
}

}  // namespace msops::decoder_stack::gpu

#endif
