// The threads of the CPU, which go through the same phases of work.
#pragma once

#include <pthread.h>

#include <mutex>

#include "../shared/product/cpu.h"

namespace msops::decoder_stack::cpu {

using product::Shares;

// Lets threads wait for each other. They sleep: a thread that is woken gets its core at once, also where a thread of
// MindSpore's that waits in a loop has it, and one that yields does not. All calls are the C library's: with nvcc, some
// are linked to the versions of an older glibc, and a wait of one version does not see libstdc++'s notify of another.
class Barrier {
 public:
  // All of `threads` threads must call this.
  void wait(int64_t threads) {
    if (threads == 1) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    if (++arrived_ == threads) {
      arrived_ = 0;
      ++turn_;
      lock.unlock();
      pthread_cond_broadcast(&changed_);
      return;
    }
    while (turn_ == turn) pthread_cond_wait(&changed_, mutex_.native_handle());
  }

 private:
  std::mutex mutex_;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
  int64_t arrived_ = 0, turn_ = 0;
};

// Team is a thread's view of the threads, which go through the same phases.
struct Team {
  Barrier& barrier;
  Shares& shares;
  int64_t thread, threads, phase = 0;

  // A phase is a loop over the items that the thread takes, and its end:
  //   for (int64_t i; team.take(n, i);) { ... }
  //   team.end();
  // The body is no lambda, since nvcc drops MSOPS_CPU from a lambda, which then need not be inlined.
  MSOPS_CPU bool take(int64_t n, int64_t& i) { return shares.take(phase, thread, threads, n, i); }
  void end() {
    ++phase;
    barrier.wait(threads);
  }
};

}  // namespace msops::decoder_stack::cpu
