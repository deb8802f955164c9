// mbarriers in the emulator.
#pragma once

#include "instructions.h"

namespace emulator {

// Mbarrier is what the 8 bytes of an mbarrier hold.
struct Mbarrier {
  int16_t arrivals, missing;  // of a phase; not arrived yet in this one
  int32_t bytes : 20;         // that are expected in this phase
  uint32_t phases : 12;       // that have ended, modulo 2^12

  // Counts arrivals and bytes that have come. The phase ends when none of either is missing.
  void complete(int arrived, int came) {
    missing = static_cast<int16_t>(missing - arrived), bytes -= came;
    if (missing < 0) fail("an mbarrier has more arrivals than it was initialized for");
    if (missing == 0 && bytes == 0) missing = arrivals, ++phases;
  }

  // Returns whether a phase has ended. A GPU knows the phase's parity alone.
  bool ended(int phase) const {
    const uint32_t since = (phases - static_cast<uint32_t>(phase)) % 4096;
    if (since > 1) fail("a thread waits for a phase of an mbarrier that is neither the current nor the last one");
    return since == 1;
  }
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier takes 8 bytes");

inline std::mutex& mbarriers() {  // blocks of a cluster count on each other's mbarriers
  static std::mutex mutex;
  return mutex;
}
inline Mbarrier* mbarrier_at(void* memory) { return static_cast<Mbarrier*>(memory); }
inline Mbarrier* mbarrier_at(unsigned address) { return mbarrier_at(static_cast<void*>(shared_memory(address))); }

}  // namespace emulator

namespace msops {

inline void mbarrier_init(unsigned barrier, int arrivals) {
  const int16_t n = static_cast<int16_t>(arrivals);
  *emulator::mbarrier_at(barrier) = {n, n, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}

inline void mbarrier_arrive(unsigned barrier) {
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  emulator::mbarrier_at(barrier)->complete(1, 0);
}
inline void mbarrier_arrive_cluster(unsigned barrier, int block) {
  void* const there = emulator::in_block(emulator::shared_memory(barrier), static_cast<unsigned>(block));
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  emulator::mbarrier_at(there)->complete(1, 0);
}
inline void cp_async_mbarrier_arrive_noinc(unsigned barrier) {
  emulator::self->copies.emplace_back(), emulator::wait_for_copies(0);
  mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  emulator::mbarrier_at(barrier)->bytes += bytes;
  emulator::mbarrier_at(barrier)->complete(1, 0);
}
inline void mbarrier_wait(unsigned barrier, int phase) {
  const auto ended = [&] {
    const std::lock_guard<std::mutex> guard(emulator::mbarriers());
    return emulator::mbarrier_at(barrier)->ended(phase);
  };
  while (!ended()) emulator::give_way();
}

}  // namespace msops
