// cp.async.bulk in the emulator copies at once.
#pragma once

#include "instructions.h"
#include "mbarrier.h"

namespace msops {

inline void cp_async_bulk_load(unsigned to, const void* from, int bytes, unsigned barrier) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
    emulator::fail("cp.async.bulk with unaligned addresses or bytes");
  std::memcpy(emulator::shared_memory(to), from, bytes);
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  emulator::mbarrier_at(barrier)->complete(0, bytes);
}
inline void cp_async_bulk_prefetch_L2(const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
    emulator::fail("cp.async.bulk.prefetch with an unaligned address or bytes");
}
inline void cp_async_bulk(float* to, unsigned from, int bytes) {
  if (from % 16 || reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("cp.async.bulk with unaligned addresses");
  std::memcpy(to, emulator::shared_memory(from), bytes);
}
inline void cp_reduce_async_bulk_add(float* to, unsigned from, int bytes) {
  if (from % 16 || reinterpret_cast<uintptr_t>(to) % 16)
    emulator::fail("cp.reduce.async.bulk with unaligned addresses");
  const float* const values = reinterpret_cast<const float*>(emulator::shared_memory(from));
  for (int i = 0; i < bytes / 4; ++i) to[i] += values[i];
}
inline void cp_async_bulk_commit_group() {}
template <int kGroups>
void cp_async_bulk_wait_group_read() {}
template <int kGroups>
void cp_async_bulk_wait_group() {}
inline void fence_proxy_async_global() {}

}  // namespace msops
