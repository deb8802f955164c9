// An emulator of a GPU: it runs the kernels of a .cu file on the CPU, as g++ compiles them after a translation by
// emulator.py. It is for tests of what kernels compute and how their threads wait for each other, not of their speed.
//
// A thread is a fiber with a stack of its own. A block's fibers take turns on one thread of the operating system, and
// each runs until it waits: for the block, its warp, or an mbarrier. A warp whose threads wait for each other alone
// goes on before the next one has its turn. So the first thread, and the first warp, are as far ahead of the others as
// the barriers allow, and a missing barrier shows as a wrong result. The blocks of a cluster, and all blocks of a
// cooperative launch, are threads of the operating system, which run at once; other blocks run one after the other.
// Shared memory is thread-local, and holds NaN when a block begins. cp.async copies when the thread waits for it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;

  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {

constexpr int kWarp = 32, kSharedBytes = 227 * 1024, kMultiprocessors = 4;
inline int gpu = 0;  // the current one; GPU 1 has twice as many multiprocessors
constexpr size_t kStackBytes = 256 * 1024;
// A warp has so many turns before the next one, since its threads may ask together for what another warp does.
constexpr int kTurns = 1000;
constexpr unsigned kSharedBase = 1024;  // the address of dynamic shared memory in the window of shared memory

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulator: %s\n", why);
  std::abort();
}

// switch_stacks saves the registers that a call preserves on the running stack, stores the stack pointer in `from`, and
// goes on with the stack `to`.
extern "C" void msops_emulator_switch_stacks(void** from, void* to);
asm(R"(
.text
.weak msops_emulator_switch_stacks
.type msops_emulator_switch_stacks, @function
msops_emulator_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// Copy is a copy by cp.async that has not been made yet.
struct Copy {
  char* to;
  const char* from;  // null stands for zeros
  int bytes;

  void run() const {
    if (from) std::memcpy(to, from, bytes);
    if (!from) std::memset(to, 0, bytes);
  }
};

struct Thread {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  uint3 index{};
  unsigned number = 0;  // in the block
  bool ended = false;
  const void* waits_for = nullptr;               // what the thread was waiting for when it last gave up its turn
  std::vector<std::vector<Copy>> copies = {{}};  // groups of cp.async; the last one is open

  unsigned lane() const { return number % kWarp; }
};

// Exchange is where the threads of a mask in a warp meet: each brings some bytes, and all get everybody's.
struct Exchange {
  unsigned arrived = 0;
  uint64_t generation = 0;
  std::array<std::array<unsigned char, 64>, kWarp> brought{}, given{};
};

// Meeting counts the threads that wait at one barrier of the block.
struct Meeting {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

// Cluster is what the blocks of a cluster share, all blocks of a cooperative launch, or blocks that run at once.
struct Cluster {
  unsigned blocks = 1, size = 1;  // size: what kernels see, which is 1 for blocks that merely run at once
  std::atomic<unsigned> started{0}, arrived{0};
  std::atomic<uint64_t> generation{0};
  std::vector<std::atomic<char*>> shared;  // the blocks' dynamic shared memory

  Cluster(unsigned n, unsigned seen) : blocks(n), size(seen), shared(n) {}
};

struct Block {
  std::vector<Thread> threads;
  std::vector<std::map<unsigned, Exchange>> warps;  // the exchanges of each warp, by mask
  std::map<int, Meeting> meetings;                  // by the number of the barrier
  uint3 index{};
  dim3 size, grid;
  size_t dynamic_bytes = 0;
  Cluster* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  unsigned alive = 0;
  void* scheduler = nullptr;  // its stack pointer
  const std::function<void()>* kernel = nullptr;

  // Returns how many exchanges a warp has had.
  uint64_t exchanges(unsigned warp) const {
    uint64_t count = 0;
    for (const auto& of_mask : warps[warp]) count += of_mask.second.generation;
    return count;
  }
};

inline thread_local Block* block = nullptr;
inline thread_local Thread* self = nullptr;
alignas(1024) inline thread_local unsigned char dynamic_shared[kSharedBytes];

// Lets the block's other threads run.
inline void give_way(const void* waits_for = nullptr) {
  self->waits_for = waits_for;
  msops_emulator_switch_stacks(&self->stack_pointer, block->scheduler);
}

// ---- Barriers ----

// Waits until `count` threads, or all that have not ended if it is 0, have arrived at a barrier of the block.
inline void barrier(int number, unsigned count = 0, bool waits = true) {
  Meeting& meeting = block->meetings[number];
  const uint64_t generation = meeting.generation;
  ++meeting.arrived;
  const auto ends = [&] {
    if (meeting.generation == generation && meeting.arrived >= (count ? count : block->alive))
      meeting.arrived = 0, ++meeting.generation;
    return meeting.generation != generation;
  };
  while (!ends() && waits) give_way(&meeting);
}

// Given is what the threads of a warp brought to an exchange, by lane.
template <typename T>
struct Given {
  const Exchange& all;

  T operator[](unsigned lane) const {
    T result;
    std::memcpy(&result, all.given[lane % kWarp].data(), sizeof result);
    return result;
  }
};

// Brings a value to the threads of a mask in the warp, and returns what all of them brought.
template <typename T>
Given<T> exchange(unsigned mask, const T& value) {
  static_assert(sizeof(T) <= 64, "too large to exchange");
  const unsigned warp = self->number / kWarp, first = warp * kWarp;
  if (!(mask >> self->lane() & 1)) fail("a thread is not in the mask that it gives");
  Exchange& all = block->warps[warp][mask];
  std::memcpy(all.brought[self->lane()].data(), &value, sizeof value);
  all.arrived |= 1u << self->lane();
  const uint64_t generation = all.generation;
  while (all.generation == generation) {
    unsigned expected = mask;
    for (unsigned lane = 0; lane < kWarp; ++lane)
      if (first + lane >= block->threads.size() || block->threads[first + lane].ended) expected &= ~(1u << lane);
    if ((all.arrived & expected) == expected) {
      all.given = all.brought, all.arrived = 0, ++all.generation;
    } else {
      give_way(&all);
    }
  }
  return {all};
}

// Waits until all threads of the cluster's blocks have arrived.
inline void cluster_barrier() {
  barrier(-1);
  if (self->number == 0) {
    Cluster& cluster = *block->cluster;
    const uint64_t generation = cluster.generation;
    if (++cluster.arrived == cluster.blocks) {
      cluster.arrived = 0, ++cluster.generation;
    } else {
      while (cluster.generation == generation) std::this_thread::yield();
    }
  }
  barrier(-1);
}

// ---- Shared memory ----

// Returns the address of shared memory as instructions take it, and the memory at such an address. An address has the
// number of the block in its cluster above its lower 24 bits.
inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - dynamic_shared + kSharedBase) +
         (block->rank % block->cluster->size << 24);
}
inline unsigned char* shared_memory(unsigned address) {
  return dynamic_shared + (static_cast<int>((address - kSharedBase) << 8) >> 8);
}

// Returns the place in a block's shared memory that `pointer` has in this block's. All variables of a module are
// thread-local, and lie equally in each thread's memory.
template <typename T>
T* in_block(T* pointer, unsigned rank) {
  return reinterpret_cast<T*>(block->cluster->shared[rank] +
                              (reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(dynamic_shared)));
}

// ---- Asynchronous copies ----

// Makes the thread's copies of all groups except the latest `groups` committed ones.
inline void wait_for_copies(size_t groups) {
  auto& copies = self->copies;
  while (copies.size() > groups + 1) {
    for (const Copy& copy : copies.front()) copy.run();
    copies.erase(copies.begin());
  }
}

// ---- Launches ----

inline void run_thread() {
  (*block->kernel)();
  for (auto& group : self->copies)
    for (const Copy& copy : group) copy.run();
  self->ended = true, --block->alive;
  give_way();
  fail("a thread went on after its end");
}

// The GPU's architecture, from the variable MSOPS_EMULATOR_ARCHITECTURE.
inline int architecture() {
  const char* latest = std::getenv("MSOPS_EMULATOR_ARCHITECTURE");
  return latest ? std::atoi(latest) : 90;
}

// The order in which a block's threads take turns: 0 ascending, 1 descending, from the variable MSOPS_EMULATOR_ORDER.
inline bool descends() {
  const char* order = std::getenv("MSOPS_EMULATOR_ORDER");
  return order && *order == '1';
}

inline void run_block(Block& all) {
  block = &all;
  std::memset(dynamic_shared, 0xff, sizeof dynamic_shared);
  all.cluster->shared[all.rank] = reinterpret_cast<char*>(dynamic_shared);
  const unsigned n = all.size.x * all.size.y * all.size.z;
  all.threads.resize(n), all.warps.resize((n - 1) / kWarp + 1), all.alive = n;
  static thread_local std::vector<std::unique_ptr<char[]>> stacks;
  for (unsigned i = 0; i < n; ++i) {
    Thread& thread = all.threads[i];
    thread.number = i, thread.index = {i % all.size.x, i / all.size.x % all.size.y, i / all.size.x / all.size.y};
    if (stacks.size() > i) {
      thread.stack = std::move(stacks[i]);
    } else {
      thread.stack.reset(new char[kStackBytes]);
    }
    void** top =
        reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(thread.stack.get() + kStackBytes) & ~uintptr_t{63});
    *--top = nullptr;  // run_thread begins with the alignment that a call gives
    *--top = reinterpret_cast<void*>(&run_thread);
    thread.stack_pointer = top - 6;
    std::fill_n(top - 6, 6, nullptr);
  }
  ++all.cluster->started;
  while (all.cluster->started < all.cluster->blocks) std::this_thread::yield();  // until each has its shared memory
  const bool backwards = descends();
  for (uint64_t rounds = 0; all.alive > 0; ++rounds) {
    for (unsigned w = 0; w < all.warps.size(); ++w) {
      const unsigned warp = backwards ? static_cast<unsigned>(all.warps.size()) - 1 - w : w;
      const unsigned first = warp * kWarp, end = std::min(n, first + kWarp);
      uint64_t before = ~uint64_t{0};
      for (int turns = 0; turns < kTurns && before != all.exchanges(warp); ++turns) {
        before = all.exchanges(warp);
        for (unsigned i = first; i < end; ++i) {
          Thread& thread = all.threads[backwards ? first + end - 1 - i : i];
          if (thread.ended) continue;
          self = &thread;
          msops_emulator_switch_stacks(&all.scheduler, thread.stack_pointer);
        }
      }
    }
    if (rounds > 100) std::this_thread::yield();
  }
  stacks.resize(n);
  for (unsigned i = 0; i < n; ++i) stacks[i] = std::move(all.threads[i].stack);
  block = nullptr, self = nullptr;
}

// Returns how many blocks run at once, from the variable MSOPS_EMULATOR_BLOCKS. It is for kernels whose blocks wait for
// each other, in an order in which each could run alone.
inline unsigned blocks_at_once() {
  const char* blocks = std::getenv("MSOPS_EMULATOR_BLOCKS");
  return blocks ? static_cast<unsigned>(std::atoi(blocks)) : 1;
}

// Runs a kernel on a grid whose groups of `together` blocks, if there are any, run at once.
inline void launch(dim3 grid, dim3 size, size_t dynamic_bytes, unsigned together, const std::function<void()>& kernel) {
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (size.x * size.y * size.z > 1024) fail("a block has more than 1024 threads");
  if (dynamic_bytes > kSharedBytes) fail("a block asks for more shared memory than there is");
  const unsigned of_cluster = together;
  if (together == 1) together = static_cast<unsigned>(std::min<uint64_t>(blocks, blocks_at_once()));
  for (uint64_t first = 0; first < blocks; first += together) {
    together = static_cast<unsigned>(std::min<uint64_t>(together, blocks - first));
    Cluster cluster(together, of_cluster);
    std::vector<Block> all(together);
    std::vector<std::thread> runners;
    for (unsigned rank = 0; rank < together; ++rank) {
      const uint64_t i = first + rank;
      all[rank].index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                         static_cast<unsigned>(i / grid.x / grid.y)};
      all[rank].size = size, all[rank].grid = grid, all[rank].dynamic_bytes = dynamic_bytes;
      all[rank].cluster = &cluster, all[rank].rank = rank, all[rank].kernel = &kernel;
      if (together > 1) runners.emplace_back([&all, rank] { run_block(all[rank]); });
    }
    if (together == 1) run_block(all[0]);
    for (std::thread& runner : runners) runner.join();
  }
}

}  // namespace emulator
