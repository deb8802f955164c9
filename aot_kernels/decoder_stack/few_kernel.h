// One launch computes all layers for few tokens. Blocks stay, one a multiprocessor. Each takes some rows of every matrix,
// and some items of attention. These are a layer's steps, where -> is a way through words with tags, from all blocks to
// all:
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

template <typename T, int kWarps>
__device__ void compute_layers(Worker<T, kWarps>& w) {
  const FewTokens<T>& s = w.s;
  const auto has_part = [&](const Matrix<T>& m) { return part_of(m.groups(), blockIdx.x, gridDim.x).size() > 0; };
  const bool has_out = has_part(s.out), has_down = has_part(s.down);
  const bool reads_h = has_part(s.qkv) || has_out, reads_middle = has_part(s.gate_up) || has_down;
  const auto put = [&](int token, int unit, uint2 words) { w.put_operand(token, unit, words); };
  const auto norm = [&](int which, const Factors<T>& factors) {
    return Factors<T>{w.factors(which), factors.is_wide};
  };
  for (int layer = 0; layer < s.layers; ++layer) {
    const unsigned tag = layer + 1;
    w.aux.wait_full();
    if (reads_h)
      w.read_normed(layer > 0 ? s.of_h : nullptr, tag - 1, 0, s.tokens(), norm(0, s.norm1), w.residual(0), put);
    w.multiply_qkv(tag);
    Attention<T, kWarps> attention(w, layer);
    attention.take_items();
    attention.merge_parts();
    if (has_out) {
      w.read_vectors(s.of_attention, s.heads * s.head_size, tag);
      w.multiply_and_add(s.out, w.residual(0), s.of_middle, tag);
    }
    if (reads_middle) w.read_normed(s.of_middle, tag, 0, s.tokens(), norm(1, s.norm2), w.residual(1), put);
    w.aux.release();
    w.multiply_gates(tag);
    if (has_down) {
      w.read_vectors(s.of_hidden, s.hidden, tag);
      w.multiply_and_add(s.down, w.residual(1), s.of_h, tag);
    }
  }
  // y
  for (int token = blockIdx.x; token < s.tokens(); token += gridDim.x) {
    const int units = s.width / kUnitElements<T>;
    uint2* const y = reinterpret_cast<uint2*>(s.y) + int64_t{token} * units;
    const auto store = [&](int, int unit, uint2 words) { y[unit] = words; };
    if (s.norm.data) {
      w.read_normed(s.of_h, s.layers, token, 1, s.norm, w.residual(0), store);
    } else {
      read_units(s.of_h + 2 * token * units, s.layers, w.thread, units, w.kThreads, w.watch,
                 [&](int unit, uint2 words) { y[unit] = words; });
    }
  }
}

template <typename T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps + 32, 1) few_tokens_kernel(const __grid_constant__ FewTokens<T> s) {
  if (!has_instructions_of(90)) return;
  extern __shared__ uint4 dynamic[];
  unsigned char* const shared = reinterpret_cast<unsigned char*>(dynamic);
  __shared__ int cached[kMostTokens];
  constexpr int kLayersAhead = 2;
  const unsigned address = shared_address(shared);
  const Ring ring{address, s.slots}, aux{address + 16 * s.slots, kLayersAhead};
  if (threadIdx.x < s.batch) {
    const int64_t rows = !s.lengths         ? 0
                         : s.lengths_are_wide ? static_cast<const int64_t*>(s.lengths)[threadIdx.x]
                                              : static_cast<const int32_t*>(s.lengths)[threadIdx.x];
    cached[threadIdx.x] = static_cast<int>(rows < 0 ? 0 : rows < s.room ? rows : s.room);
  }
  if (threadIdx.x == 0) {
    ring.init(kWarps);
    aux.init(kWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x / 32 == kWarps) {
    Filler<T>{s, ring, aux, address + s.at_ring, address + s.at_aux, cached, static_cast<int>(threadIdx.x % 32)}.run();
  } else {
    Worker<T, kWarps> worker{s, shared, cached, ring, aux, Watch(s.failed)};
    compute_layers(worker);
  }
}

}  // namespace msops::decoder_stack
