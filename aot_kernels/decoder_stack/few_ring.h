// The ring is a queue of slots in shared memory. One warp fills them with tiles of weights and rows of the cache, in
// the order of their use, as far ahead as there are slots: none of this depends on what the launch computes. Weights
// come by bulk copies, or cp.async before sm_90, and the cache by cp.async, since its rows are short. The other warps
// wait for a slot, and release it when all of them have read it.
#pragma once

#include "../common/gpu/cp_async.h"
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

  // The thread that calls this makes the barriers, for the lanes of the warp that fills slots, and so many warps that
  // release them.
  __device__ void init(int warps) const {
    for (int i = 0; i < slots; ++i) {
      mbarrier_init(barriers + 8 * i, 32);
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
  unsigned char* shared;
  const Work& work;
  int lane;

  // Fills the next slot with rows of whole packs: row(i, to, from, bytes) tells where the i-th comes and comes from,
  // and has 0 bytes if there is none. `to` begins as the slot's first byte; `bytes` are those of all rows.
  template <typename Row>
  __device__ __forceinline__ void fill(Ring& to, unsigned address, int rows, int bytes, const Row& row) {
    to.wait_empty();
    if constexpr (kHasSm90) {
      for (int i = lane; i < rows; i += 32) {
        int offset = 0, of_row = 0;
        const void* const from = row(i, offset, of_row);
        if (of_row > 0) cp_async_bulk_load(address + offset, from, of_row, to.full());
      }
      lane == 0 ? mbarrier_arrive_expect_tx(to.full(), bytes) : mbarrier_arrive(to.full());
    } else {
      unsigned char* const slot = pointer(address);
      for (int i = 0; i < rows; ++i) {
        int offset = 0, of_row = 0;
        const void* const from = row(i, offset, of_row);
        for (int at = 16 * lane; at < of_row; at += 16 * 32)
          cp_async<16>(slot + offset + at, static_cast<const unsigned char*>(from) + at);
      }
      cp_async_mbarrier_arrive_noinc(to.full());
    }
    to.advance();
  }
  __device__ unsigned char* pointer(unsigned address) const { return shared + (address - shared_address(shared)); }
  __device__ unsigned slot() const { return shared_address(shared) + s.at_ring + ring.slot * s.slot_bytes; }

  __device__ void fill_matrix(Step step, int layer) {
    const Matrix<T>& m = s.matrices[step];
    const Range mine = work.mine[step];
    for (int group = mine.begin; group < mine.end; ++group)
      for (int begin = 0; begin < m.row_bytes(); begin += m.chunk) {
        const int bytes = min(m.chunk, m.row_bytes() - begin);
        fill(ring, slot(), kGroupRows, bytes * m.rows_in(group) * (m.is_pair ? 2 : 1),
             [&](int i, int& to, int& of_row) {
               to = i * m.stride, of_row = m.has(group, i) ? bytes : 0;
               return m.row(layer, group, i) + begin;
             });
      }
  }

  __device__ void fill_cache(int layer) {
    const int packs = s.head_size / kPackWidth<T>, most = s.cache_rows;
    for (int i = 0; i < work.items; ++i) {
      const Item& item = work.of_item[i];
      for (int first = item.rows.begin; first < item.rows.end; first += most) {
        ring.wait_empty();
        const int rows = min(most, item.rows.end - first), all = rows * packs;
        const int64_t row_of_all = s.tables ? layer * s.rows_of_layer  // the first one of the layer, or of the tile
                                            : (int64_t{layer} * s.batch + item.text) * s.room + first;
        const int64_t at_first = (row_of_all * s.kv_heads + item.kv_head) * s.head_size;
        unsigned char* const to = pointer(slot());
        int row = lane / packs, pack = lane % packs;
        for (int at = lane; at < all; at += 32) {
          const int64_t of_row = s.tables ? s.row_in_blocks(item.text, first + row) : row;
          const int64_t from = at_first + of_row * s.kv_heads * s.head_size + pack * kPackWidth<T>;
          cp_async<16>(to + 16 * at, s.keys + from);
          cp_async<16>(to + 16 * (all + at), s.values + from);
          row += 32 / packs, pack += 32 % packs;
          if (pack >= packs) pack -= packs, ++row;
        }
        cp_async_mbarrier_arrive_noinc(ring.full());
        ring.advance();
      }
    }
  }

  // Fills a slot with the factors of a layer's norms, and the bias of the block's rows of q, k and v.
  __device__ void fill_aux(int layer) {
    const Range mine = work.mine[kQkv];
    const int first = mine.begin * kGroupRows, rows = min(mine.end * kGroupRows, s.qkv_rows()) - first;
    const int of_bias = s.qkv_bias && rows > 0 ? rows * static_cast<int>(sizeof(T)) : 0;
    const int of_q = s.q_norm.data ? s.q_norm.bytes(s.head_size) : 0;
    const int of_k = s.k_norm.data ? s.k_norm.bytes(s.head_size) : 0;
    const int64_t at = int64_t{layer} * s.width, of_head = int64_t{layer} * s.head_size;
    const unsigned address = shared_address(shared) + s.at_aux + aux.slot * s.aux_bytes;
    const int all = s.norm1.bytes(s.width) + s.norm2.bytes(s.width) + of_q + of_k + of_bias;
    fill(aux, address, 5, all, [&](int i, int& to, int& of_row) -> const void* {
      to = s.at_factors[i];
      if (i == 0) return of_row = s.norm1.bytes(s.width), s.norm1.at(at);
      if (i == 1) return of_row = s.norm2.bytes(s.width), s.norm2.at(at);
      if (i == 2) return of_row = of_q, s.q_norm.at(of_head);
      if (i == 3) return of_row = of_k, s.k_norm.at(of_head);
      return of_row = of_bias, s.qkv_bias + int64_t{layer} * s.qkv_rows() + first;
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
