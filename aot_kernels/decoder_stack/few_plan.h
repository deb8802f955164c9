// The plan of the kernel for few tokens: what shared memory, scratch and blocks hold.
#pragma once

#include <cmath>

#include "../common/launch.h"
#include "few_kernel.h"

namespace msops::decoder_stack {

// FewTuning has what may be tuned: the most bytes of a row that a tile has, the most slots of the ring, and the most
// parts of a cache.
struct FewTuning {
  int chunk = 2048, most_slots = 56, most_splits = 1 << 20;
};

inline int rounded_up(int64_t n, int multiple) { return static_cast<int>((n + multiple - 1) / multiple * multiple); }

// Chooses what a tile has of a row: equal parts of at most `chunk` bytes. Rows in shared memory are an odd multiple of
// 64 bytes apart where packs of neighbouring rows would lie in the same banks.
template <typename T>
void choose_tile(Matrix<T>& m, int chunk) {
  const int bytes = m.row_bytes(), chunks = (bytes - 1) / chunk + 1;
  m.chunk = rounded_up((bytes + chunks - 1) / chunks, 64);
  m.stride = m.chunk % 128 == 0 ? m.chunk + 64 : m.chunk;
}

// Plans what blocks do, of `blocks` with so much shared memory. Returns the bytes of shared memory, or 0 if the stack
// does not fit.
template <typename T>
int64_t plan_few_tokens(FewTokens<T>& s, int blocks, int shared_bytes, const FewTuning& tuning = {}) {
  constexpr int kLeastSlots = 4, kAlign = 128;
  for (Matrix<T>& m : s.matrices) choose_tile(m, tuning.chunk);
  const int64_t tokens = s.tokens(), size = s.head_size, warps = s.warps();
  int64_t groups = 0, slot = 0;
  for (const Matrix<T>& m : s.matrices) {
    groups = std::max<int64_t>(groups, (m.groups() - 1) / blocks + 1);
    slot = std::max<int64_t>(slot, kGroupRows * m.stride);
  }
  s.slot_bytes = rounded_up(std::max<int64_t>(slot, 2 * s.head_bytes()), kAlign);
  s.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(size))), s.reciprocal_width = 1.f / s.width;
  s.by_group = Divisor(s.group()), s.by_head_size = Divisor(size);
  const int rows_of_warps = 16 * s.warps();  // that the warps take at once
  s.cache_rows = s.slot_bytes / (2 * s.head_bytes());
  if (s.cache_rows > rows_of_warps) s.cache_rows -= s.cache_rows % rows_of_warps;
  s.most_queries = sizeof(T) == 2 ? kMmaQueries : kStreamQueries;
  s.query_chunks = (s.queries() - 1) / s.most_queries + 1;
  const int64_t heads = int64_t{s.batch} * s.kv_heads * s.query_chunks;
  s.splits = static_cast<int>(std::clamp<int64_t>(blocks / heads, 1, tuning.most_splits));
  const int64_t of_group = warps * tokens * kGroupRows * sizeof(float);
  s.groups_at_once = static_cast<int>(std::clamp<int64_t>(16 * 1024 / of_group, 1, groups));
  const int bias_rows = ((s.matrices[kQkv].groups() - 1) / blocks + 1) * kGroupRows;
  const int of_factors[] = {s.norm1.bytes(s.width), s.norm2.bytes(s.width), s.q_norm.bytes(s.head_size),
                            s.k_norm.bytes(s.head_size), bias_rows * static_cast<int>(sizeof(T))};
  s.aux_bytes = 0;
  for (int i = 0; i < 5; ++i) s.at_factors[i] = s.aux_bytes, s.aux_bytes += rounded_up(of_factors[i], kAlign);
  const int columns = std::max({s.width, s.hidden, s.heads * s.head_size});
  s.work_stride = rounded_up(columns * sizeof(T), kAlign) + 64;
  const int64_t of_attention =
      (s.most_queries + 2 * s.length) * size * sizeof(T) + warps * s.most_queries * (size + 2) * sizeof(float);

  int64_t at = 1024;  // barriers
  const auto take = [&](int64_t bytes) {
    const int64_t begin = at;
    at = std::min<int64_t>(at + rounded_up(std::min<int64_t>(bytes, INT32_MAX / 2), kAlign), INT32_MAX / 2);
    return static_cast<int>(begin);
  };
  s.at_sums = take(kMostTokens * warps * sizeof(float));
  s.at_tables = take(s.rows_of_table() * size * sizeof(float));
  s.at_aux = take(2 * s.aux_bytes);
  s.at_residual = take(2 * tokens * s.width * sizeof(T));
  s.at_partial = take(s.groups_at_once * of_group);
  s.at_work = take(std::max<int64_t>(tokens * s.work_stride, of_attention));
  s.at_ring = take(0);
  s.slots = static_cast<int>(std::min<int64_t>((shared_bytes - at) / s.slot_bytes, std::min(tuning.most_slots, 56)));
  if (s.items() > kMostItems * blocks) return 0;
  return s.slots < kLeastSlots ? 0 : at + int64_t{s.slots} * s.slot_bytes;
}

// Deals out the scratch. Returns its bytes.
template <typename T>
size_t place_few_tokens(FewTokens<T>& s, void* scratch) {
  size_t at = 0;
  const auto take = [&](int64_t words) {
    uint2* const begin = reinterpret_cast<uint2*>(static_cast<char*>(scratch) + at);
    at += (words * sizeof(uint2) + 255) / 256 * 256;
    return begin;
  };
  const int64_t tokens = s.tokens(), word = kWordElements<T>;
  s.failed = reinterpret_cast<unsigned*>(take(1));
  for (int step = 0; step < kSteps; ++step) s.results[step] = take(tokens * s.matrices[step].rows / word);
  s.of_attention = take(tokens * s.heads * s.head_size / word);
  s.of_parts = take(tokens * s.heads * s.splits * (s.head_size + 2));
  if (s.columns > 0) {
    s.tables = reinterpret_cast<int32_t*>(take((s.batch * s.columns + 1) / 2));
    s.counts = reinterpret_cast<int32_t*>(take((s.batch + 1) / 2));
  }
  return at;
}

// Returns whether sizes are of whole packs, tokens are few, and the kernel's 32-bit offsets suffice.
template <typename T>
bool is_for_few_tokens(const FewTokens<T>& s) {
  constexpr int64_t kMost = 1 << 28;
  const auto whole = [](int64_t n) { return n > 0 && n <= kMost && n % kPackWidth<T> == 0; };
  const int64_t rows = (s.heads + 2 * int64_t{s.kv_heads}) * s.head_size;
  return s.tokens() > 0 && s.tokens() <= kMostTokens && whole(s.width) && whole(s.hidden) && whole(s.head_size) &&
         s.head_size <= kMostHeadSize && whole(rows) && s.room <= INT32_MAX / 2;
}

}  // namespace msops::decoder_stack
