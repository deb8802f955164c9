// Paged attention of long chunks by flash attention's kernel for sm_90a (flash_attention/wgmma_forward.h): sequences
// with more than kFewTokens tokens, of float16, without mask, bias and ALiBi.
//
// An item is a tile of tokens of one head, and no sequence is split. The boxes that TMA copies are rows of one block:
// the largest power of 2 that divides its rows, at least 8, so that a box begins where the swizzle does. Each lane of a
// warp has one box of a tile. Rows that no query of the item sees are not copied but become 0, like those of blocks
// outside of the caches, whose keys are lost.
#pragma once

#include "../common/gpu/divisor.h"
#include "../flash_attention/wgmma_forward.h"
#include "plan.h"

#ifdef __CUDACC__
#if CUDART_VERSION >= 12000

namespace msops::paged {

constexpr int64_t kFewTokens = 64;

// PagedTensors are the queries and the caches, for wgmma_forward.
struct PagedTensors {
  flash_attention::Attention<Half> a;  // of which the strides are those of q, out and lse
  Paged<Half, Half> p;
  TensorMap q, k, v;
  Plan plan;
  unsigned* tickets;  // how many items were taken
  Divisor block_size{1};
  int box;                         // rows
  flash_attention::MaskBits mask;  // none

  __device__ __forceinline__ int64_t items() const { return plan.first[p.batch]; }
  template <typename S>
  __device__ __forceinline__ flash_attention::QueryItem find(int64_t number) const {
    const int b = plan.find_by_warp(number, static_cast<int>(p.batch));
    const Sequence s = p.sequence(b);
    const auto heads = static_cast<unsigned>(p.heads), tiles = static_cast<unsigned>(parts_of(s.tokens, S::kQueries));
    const float bytes = 2 * static_cast<float>(s.keys) * (p.width + p.value_width) / p.group;
    const auto order = flash_attention::order_of(heads, tiles, bytes, a.right >= 0);
    const auto at = order.find(static_cast<unsigned>(number - plan.first[b]), heads);
    auto item = flash_attention::QueryItem::of(a, {s.first, 0, s.tokens, s.keys}, b, at.h,
                                               at.h / static_cast<int>(p.group), at.tile * S::kQueries, S::kQueries);
    item.begin &= -box;
    return item;
  }

  // Tiles copies an item's tiles of keys, or of values. A warp calls this. Entries of the block table are loaded one
  // tile before.
  template <typename S>
  struct Tiles {
    static constexpr int kGroups = S::kKeys / 8, kBoxes = S::kWidth / 64;  // 8 rows and 64 columns a lane
    static_assert(kGroups * kBoxes <= 32, "a warp has a tile's boxes");
    const PagedTensors& from;
    const flash_attention::ForwardRings<S>& rings;
    const int32_t* const table;
    const int kv_head, end, group, first_key;  // the lane's first key of the first tile
    const bool copies;
    int block = 0, rest = 0;  // of the next tile's key
    bool is_seen = false;

    __device__ __forceinline__ Tiles(const PagedTensors& tensors, const flash_attention::ForwardRings<S>& forward_rings,
                                     const flash_attention::QueryItem& item)
        : from(tensors),
          rings(forward_rings),
          table(from.p.block_tables + item.b * from.p.columns),
          kv_head(item.kv_head),
          end(item.end),
          group(threadIdx.x % kGroups),
          first_key(item.begin + 8 * group),
          copies(threadIdx.x % 32 < kGroups * kBoxes && 8 * group % from.box == 0) {
      look(0);
    }
    // Looks up the block that has the lane's rows of a tile.
    __device__ __forceinline__ void look(int t) {
      const int j = first_key + t * S::kKeys;
      is_seen = j < end;
      if (is_seen) block = table[from.block_size.divide(j, &rest)];
    }
    __device__ __forceinline__ bool is_there() const { return 0 <= block && block < from.p.blocks; }
    __device__ __forceinline__ void load_keys(int copy, int t) {
      const unsigned lost = __ballot_sync(~0u, is_seen && !is_there() && threadIdx.x % 32 < kGroups);
      rings.keys.wait_for_room(copy);
      if (threadIdx.x % 32 == 0) *rings.lost_keys(copy) = lost;
      load(rings.keys, copy, from.k, t);
    }
    __device__ __forceinline__ void load_values(int copy, int t) {
      rings.values.wait_for_room(copy);
      load(rings.values, copy, from.v, t);
    }

   private:
    template <typename Ring>
    __device__ __forceinline__ void load(const Ring& ring, int copy, const TensorMap& map, int t) {
      const auto tile = ring.tile(copy);
      if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(ring.full(copy), tile.kBytes);
      __syncwarp();
      const int rows = from.block_size.value(), outside = static_cast<int>(from.p.blocks) * rows;
      const int row = is_seen && is_there() ? block * rows + rest : outside, number = threadIdx.x % 32 / kGroups;
      if (copies)
        tma_load_5d(tile.box(number).rows(8 * group).address, ring.full(copy), map, 64 * number, row, kv_head, 0, 0);
      look(t + 1);
    }
  };
};

// Chunks are the sequences that the kernel computes.
template <int kWidth>
struct Chunks {
  using S = flash_attention::WgmmaShape<kWidth, false, true>;
  PagedTensors tensors{};
  int64_t blocks = 0;  // to launch

  // Describes them, with room for a plan and a counter. There are none if TMA cannot read the tensors, or the GPU lacks
  // the instructions.
  Chunks(const Paged<Half, Half>& p, int64_t* first) {
    using flash_attention::encode_rows;
    if (!p.has_starts || p.tokens <= kFewTokens || p.has_terms()) return;
    auto& t = tensors;
    t.box = static_cast<int>(least(p.block_size & -p.block_size, S::kKeys));
    const int64_t rows = p.blocks * p.block_size, most_items = p.heads * (parts_of(p.tokens, S::kQueries) + p.batch);
    if (t.box < 8 || most_items > INT32_MAX) return;
    auto& a = t.a;
    a.batch = p.batch, a.heads = p.heads, a.kv_heads = p.kv_heads, a.width = p.width, a.value_width = p.value_width;
    a.q = p.q, a.out = p.out, a.lse = p.lse, a.scale = p.scale, a.softcap = p.softcap, a.left = p.left;
    a.right = p.right, a.kv_lengths = p.lengths, a.cu_seqlens_q = p.cu_seqlens;
    a.of_q = {0, p.width, p.heads * p.width}, a.of_out = {0, p.value_width, p.heads * p.value_width};
    a.of_lse = {0, p.tokens, 1};
    if (!encode_rows(&t.q, p.q, a.of_q, p.width, p.tokens, p.heads, 1, S::kQueries) ||
        !encode_rows(&t.k, p.k, {0, p.width, p.kv_heads * p.width}, p.width, rows, p.kv_heads, 1, t.box) ||
        !encode_rows(&t.v, p.v, {0, p.v_width, p.kv_heads * p.v_width}, p.value_width, rows, p.kv_heads, 1, t.box) ||
        !flash_attention::rows_are_aligned(p.out, a.of_out, p.value_width))
      return;
    t.tickets = reinterpret_cast<unsigned*>(first + p.batch + 1);
    t.p = p, t.block_size = Divisor(p.block_size);
    t.plan = {first, S::kQueries, kFewTokens + 1, INT64_MAX, p.heads, 1, t.tickets};
    blocks = flash_attention::wgmma_blocks<S>(flash_attention::wgmma_forward<S, PagedTensors>, most_items);
  }

  // Computes what is planned.
  void launch(Call& call) const {
    msops::launch(call, flash_attention::wgmma_forward<S, PagedTensors>, blocks, S::kThreads, S::kBytes, tensors);
  }
};

}  // namespace msops::paged

#endif
#endif
