// The ring is a queue of slots in shared memory. One warp fills them by bulk copies with tiles of weights and rows of the
// cache, in the order of their use, as far ahead as there are slots: none of this depends on what the launch computes.
// The other warps wait for a slot's bytes, and release it when all of them have read it.
#pragma once

#include "../common/gpu/cp_async_bulk.h"
#include "../common/gpu/mbarrier.h"
#include "few_problem.h"

namespace msops::decoder_stack {

// Ring is a place in the queue. Each warp has its own.
struct Ring {
  unsigned barriers;  // shared_address of [slots] of full slots, then [slots] of empty ones
  int slots;
  int slot = 0, round = 0;

  __device__ unsigned full() const { return barriers + 8 * slot; }
  __device__ unsigned empty() const { return barriers + 8 * (slots + slot); }

  // The thread that calls this makes the barriers, for so many warps that release slots.
  __device__ void init(int warps) const {
    for (int i = 0; i < slots; ++i) {
      mbarrier_init(barriers + 8 * i, 1);
      mbarrier_init(barriers + 8 * (slots + i), warps);
    }
  }
  __device__ __forceinline__ void advance() {
    if (++slot == slots) slot = 0, ++round;
  }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), round); }
  __device__ __forceinline__ void wait_empty() const {
    if (round > 0) mbarrier_wait(empty(), round - 1);
  }
  // The warp has read the slot.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
    advance();
  }
};

// Filler is the warp that fills slots.
template <typename T>
struct Filler {
  const FewTokens<T>& s;
  Ring ring, aux;
  unsigned ring_address, aux_address;  // of shared memory
  const Work& work;
  int lane;

  // Copies what copy(expect, ...) asks for into the next slot: expects `bytes`, then calls copy().
  template <typename Copy>
  __device__ __forceinline__ void fill(Ring& to, int bytes, const Copy& copy) {
    to.wait_empty();
    if (lane == 0) mbarrier_arrive_expect_tx(to.full(), bytes);
    __syncwarp();
    copy();
    to.advance();
  }

  __device__ void fill_matrix(Step step, int layer) {
    const Matrix<T>& m = s.matrices[step];
    const Range mine = work.mine[step];
    for (int group = mine.begin; group < mine.end; ++group)
      for (int begin = 0; begin < m.row_bytes(); begin += m.chunk) {
        const int bytes = min(m.chunk, m.row_bytes() - begin);
        fill(ring, bytes * m.rows_in(group) * (m.is_pair ? 2 : 1), [&] {
          if (lane < kGroupRows && m.has(group, lane))
            cp_async_bulk_load(ring_address + ring.slot * s.slot_bytes + lane * m.stride,
                               reinterpret_cast<const char*>(m.row(layer, group, lane)) + begin, bytes, ring.full());
        });
      }
  }

  __device__ void fill_cache(int layer) {
    const int row_bytes = s.head_bytes(), most = s.cache_rows_of_slot();
    for (int i = 0; i < work.items; ++i) {
      const Item& item = work.of_item[i];
      for (int begin = item.rows.begin; begin < item.rows.end; begin += most) {
        const int rows = min(most, item.rows.end - begin);
        fill(ring, 2 * rows * row_bytes, [&] {
          const unsigned to = ring_address + ring.slot * s.slot_bytes;
          for (int r = lane; r < 2 * rows; r += 32) {
            const bool is_key = r < rows;
            const int64_t row = (int64_t{layer} * s.batch + item.text) * s.room + begin + (is_key ? r : r - rows);
            const T* const from = (is_key ? s.keys : s.values) + (row * s.kv_heads + item.kv_head) * s.head_size;
            cp_async_bulk_load(to + r * row_bytes, from, row_bytes, ring.full());
          }
        });
      }
    }
  }

  // Fills a slot with the factors of a layer's norms, and the bias of the block's rows of q, k and v.
  __device__ void fill_aux(int layer) {
    const Range mine = work.mine[kQkv];
    const int first = mine.begin * kGroupRows, rows = min(mine.end * kGroupRows, s.qkv_rows()) - first;
    const bool has_bias = s.qkv_bias && rows > 0;
    const int bias = has_bias ? rows * static_cast<int>(sizeof(T)) : 0;
    const int of_q = s.q_norm.data ? s.q_norm.bytes(s.head_size) : 0;
    const int of_k = s.k_norm.data ? s.k_norm.bytes(s.head_size) : 0;
    fill(aux, s.norm1.bytes(s.width) + s.norm2.bytes(s.width) + of_q + of_k + bias, [&] {
      if (lane != 0) return;
      unsigned to = aux_address + aux.slot * s.aux_bytes;
      const auto copy = [&](const void* from, int bytes, int room) {
        if (bytes > 0) cp_async_bulk_load(to, from, bytes, aux.full());
        to += room;
      };
      copy(s.norm1.at(int64_t{layer} * s.width), s.norm1.bytes(s.width), 4 * s.width);
      copy(s.norm2.at(int64_t{layer} * s.width), s.norm2.bytes(s.width), 4 * s.width);
      copy(s.q_norm.at(int64_t{layer} * s.head_size), of_q, 4 * s.head_size);
      copy(s.k_norm.at(int64_t{layer} * s.head_size), of_k, 4 * s.head_size);
      copy(s.qkv_bias + int64_t{layer} * s.qkv_rows() + first, bias, 0);
    });
  }

  __device__ void run() {
    for (int layer = 0; layer < s.layers; ++layer) {
      fill_aux(layer);
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        fill_matrix(static_cast<Step>(step), layer);
        if (step == kQkv) fill_cache(layer);
      }
    }
  }
};

}  // namespace msops::decoder_stack
