// Clusters in the emulator.
#pragma once

#include "../pack.h"
#include "instructions.h"
#include "mbarrier.h"

namespace msops {

inline void cluster_arrive_wait() { emulator::cluster_barrier(); }
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() { emulator::cluster_barrier(); }
inline unsigned cluster_ctarank() { return emulator::block->rank % emulator::block->cluster->size; }
inline unsigned cluster_nctarank() { return emulator::block->cluster->size; }

inline Pack<float, 4> ld_shared_cluster(const float* from, int block) {
  return load<4>(emulator::in_block(from, static_cast<unsigned>(block)));
}

constexpr bool kHasStAsync = true;
inline void st_async(float number, const float* to, unsigned barrier, int block) {
  const unsigned rank = static_cast<unsigned>(block);
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  *const_cast<float*>(emulator::in_block(to, rank)) = number;
  emulator::mbarrier_at(emulator::in_block(emulator::shared_memory(barrier), rank))->complete(0, 4);
}

}  // namespace msops
