// One launch computes all layers for few tokens. Blocks stay, one a multiprocessor. Each takes some rows of every
// matrix, and some items of attention. These are a layer's steps, where -> is a way through words with tags, from all
// blocks to all:
//
//   norm, qkv -> norm and rotation of heads, attention to parts of the cache -> merge of the parts -> out, residual ->
//   norm, gates -> down, residual ->
//
// The words of a layer are overwritten by the next layer's. Nobody can still wait for the old ones: whoever writes has
// read words that come from all blocks that read the old ones before. So a block reads a vector only if it computes
// something from it in the same layer.
#pragma once

#include "few_attention.h"

namespace msops::decoder_stack {

template <typename T, int kMost>
__device__ void compute_layers(Worker<T, kMost>& w) {
  const FewTokens<T>& s = w.s;
  const Work& work = w.of_block;
  Attention<T, kMost> attention(w);
  const auto put = [&](int token, int unit, uint2 words) { w.put_operand(token, unit, words); };
  for (int layer = 0; layer < s.layers; ++layer) {
    const unsigned tag = layer + 1;
    w.aux.wait_full();
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      const Step step = static_cast<Step>(i);
      w.forget();
      if (step == kQkv || step == kGates) {
        const Factors<T> factors{w.factors(step / 2), (step == kQkv ? s.norm1 : s.norm2).is_wide};
        const uint2* const from = step == kGates ? s.results[kOut] : layer > 0 ? s.results[kDown] : nullptr;
        if (work.has(step) || work.has(static_cast<Step>(step + 1)))  // the step after it adds to the residual
          w.read_normed(from, step == kQkv ? tag - 1 : tag, 0, w.tokens(), factors, w.residual(step / 2), put);
      } else if (work.has(step)) {
        w.read_vectors(step == kOut ? s.of_attention : s.results[kGates], s.matrices[step].columns, tag, put);
      }
      if (step == kGates) w.aux.release();
      w.multiply(step, tag);
      if (step == kQkv) {
        w.forget();
        attention.take_items(layer);
        w.forget();
        attention.merge_parts(tag);
      }
    }
  }
  // y
  for (int token = blockIdx.x; token < w.tokens(); token += gridDim.x) {
    const int units = s.width / kUnitElements<T>;
    uint2* const y = reinterpret_cast<uint2*>(s.y) + int64_t{token} * units;
    const auto store = [&](int, int unit, uint2 words) { y[unit] = words; };
    if (s.norm.data) {
      w.read_normed(s.results[kDown], s.layers, token, 1, s.norm, w.residual(0), store);
    } else {
      read_units<4>(s.results[kDown] + 2 * token * units, s.layers, w.thread, units, w.kThreads, w.watch,
                    [&](int unit, uint2 words) { y[unit] = words; });
    }
  }
}

// kMost is the most tokens. One more warp than those that compute copies.
template <typename T, int kMost>
__global__ void __launch_bounds__(32 * (warps_for(kMost) + 1), 1)
    few_tokens_kernel(const __grid_constant__ FewTokens<T> s) {
  if (!has_instructions_of(80)) return;
  extern __shared__ uint4 dynamic[];
  unsigned char* const shared = reinterpret_cast<unsigned char*>(dynamic);
  __shared__ Work work;
  constexpr int kLayersAhead = 2, kWarps = warps_for(kMost);
  const unsigned address = shared_address(shared);
  const Ring ring{address, s.slots}, aux{address + 16 * s.slots, kLayersAhead};
  work.find(s, threadIdx.x, blockIdx.x, gridDim.x);
  const int angles = s.rows_of_table() * s.head_size / 2;
  for (int i = threadIdx.x; i < angles; i += blockDim.x) {
    float* const table = reinterpret_cast<float*>(shared + s.at_tables);
    table[i] = s.cos[i], table[angles + i] = s.sin[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ring.init(kWarps);
    aux.init(kWarps);
    fence_mbarrier_init();
    work.find_items(s, blockIdx.x, gridDim.x);
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kWarps) {
    Filler<T>{s, ring, aux, shared, work, lane}.run();
  } else {
    Worker<T, kMost> worker{s, shared, work, ring, aux, Watch(s.failed)};
    compute_layers(worker);
  }
}

}  // namespace msops::decoder_stack
