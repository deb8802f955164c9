// mbarriers in the emulator.
#pragma once

#include "instructions.h"

namespace emulator {

// Mbarrier is what the 8 bytes of an mbarrier hold.
struct Mbarrier {
  int16_t arrivals, missing;  // of a phase; not arrived yet in this one
  int32_t bytes_and_phase;    // twice the bytes that are expected in this phase, plus the phase's parity

  // Counts arrivals and bytes that have come. The phase ends when none of either is missing.
  void complete(int arrived, int bytes) {
    missing = static_cast<int16_t>(missing - arrived), bytes_and_phase -= 2 * bytes;
    if (missing < 0) fail("an mbarrier has more arrivals than it was initialized for");
    if (missing == 0 && bytes_and_phase >> 1 == 0) missing = arrivals, bytes_and_phase ^= 1;
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
  *emulator::mbarrier_at(barrier) = {n, n, 0};
}
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}

inline void mbarrier_arrive(unsigned barrier) {
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  emulator::mbarrier_at(barrier)->complete(1, 0);
}
inline void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  const std::lock_guard<std::mutex> guard(emulator::mbarriers());
  emulator::mbarrier_at(barrier)->bytes_and_phase += 2 * bytes;
  emulator::mbarrier_at(barrier)->complete(1, 0);
}
inline void mbarrier_wait(unsigned barrier, int phase) {
  const auto ended = [&] {
    const std::lock_guard<std::mutex> guard(emulator::mbarriers());
    return (emulator::mbarrier_at(barrier)->bytes_and_phase & 1) != phase % 2;
  };
  while (!ended()) emulator::give_way();
}

}  // namespace msops
