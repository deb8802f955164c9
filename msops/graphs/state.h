// What is recorded, and what there is to record: the graphs, their memory, and MindSpore's functions.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../core/relocations.h"
#include "banks.h"
#include "checks.h"
#include "driver.h"
#include "pool.h"

namespace graphs {

constexpr int kNotWhileRecording = 900;  // cudaErrorStreamCaptureUnsupported

struct Copy {
  Address at;
  size_t bytes;
};

// Memory that is not a graph's, and that MindSpore freed while recording: the graph may read it.
struct Freed {
  void (*free)(void* pool, void* const& address);
  void* pool;
  void* address;
};

// The memory of the graphs of one function: what recorded work reuses, and what must keep its content.
struct Memory {
  Pool work, kept;
};

struct Graph {
  explicit Graph(Memory* memory) : memory(memory), constants(&memory->kept), checks(&memory->kept) {}
  Memory* memory;
  Banks constants;
  Checks checks;
  std::vector<char*> images;                           // of larger constants, in memory->kept
  std::vector<std::pair<Address, Address>> variables;  // begin and end of tensors whose values may change
  std::vector<Freed> freed;
  std::vector<Copy> inputs, outputs;
  Handle executable = nullptr;
  std::atomic<bool> differs{false};  // a replay computed another value where an operator had read one
};

// Functions of MindSpore's pool. It has two of each: one for the class, and one for its virtual base, whose pointer to
// the pool is another.
template <int kBase>
struct Originals {
  static inline void* (*allocate)(void*, size_t, bool, bool, uint32_t) = nullptr;
  static inline std::vector<void*> (*allocate_several)(void*, const std::vector<size_t>&, uint32_t) = nullptr;
  static inline void (*free)(void*, void* const&) = nullptr;
  static inline void (*free_parts)(void*, const std::vector<void*>&, const std::vector<void*>&,
                                   const std::vector<size_t>&) = nullptr;
  static inline bool (*record_event)(void*, int64_t, uint32_t, const std::vector<std::pair<uint32_t, void*>>&,
                                     const std::shared_ptr<void>&) = nullptr;
};

struct Source {  // of a pool's segments: MindSpore's pool of the device's memory
  void* pool = nullptr;
  void* (*allocate)(void*, size_t, bool, bool, uint32_t) = nullptr;
  void (*free)(void*, void* const&) = nullptr;
};

struct State {
  std::recursive_mutex lock;  // MindSpore's pool may free memory while it allocates a segment
  std::unique_ptr<Driver> driver;
  msops::Relocations always, recording_only, noting_only;
  Handle stream = nullptr, context = nullptr, side = nullptr;
  Source source;
  std::unordered_map<void*, bool> on_device;  // MindSpore's pools: of the device, or of pinned memory of the host
  std::unordered_map<int64_t, std::unique_ptr<Memory>> memories;
  std::unordered_map<int64_t, std::unique_ptr<Graph>> graphs;
  std::vector<std::unique_ptr<Banks>> orphans;  // of graphs that are gone, where MindSpore still uses a number
  int64_t next = 1;
  std::atomic<bool> recording{false};
  std::unique_ptr<Graph> current;
  std::unordered_set<char*> shared;  // blocks that another stream uses, too
  std::vector<char*> late;           // of these, the ones that are freed when the recording ends
  std::deque<std::string> reads;     // of the call that is noted, or what is left of the notes while recording
  std::unordered_map<int64_t, std::deque<std::string>> notes;
  std::string failure, error;

  void fail(const std::string& words) {
    if (failure.empty()) failure = words;
  }

  // Returns the graph of a number, or null if it is gone.
  Graph* graph_of(int64_t number) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    const auto found = graphs.find(number);
    return found != graphs.end() ? found->second.get() : nullptr;
  }

  Pool* pool_of(const void* address) {
    for (const auto& [number, memory] : memories) {
      if (memory->work.owns(address)) return &memory->work;
    }
    return nullptr;
  }

  // Returns the beginning of the block of a graph's memory that has the address in it, or null.
  char* block_of(const void* address) const {
    for (const auto& [number, memory] : memories) {
      if (char* block = memory->work.block_of(address)) return block;
    }
    return nullptr;
  }

  // Returns whether the address is a number of a graph, which is freed with the graph.
  bool free_number(const void* address) {
    if (current && current->constants.free(address)) return true;
    for (const auto& [number, graph] : graphs) {
      if (graph->constants.free(address)) return true;
    }
    for (auto orphan = orphans.begin(); orphan != orphans.end(); ++orphan) {
      if (!(*orphan)->free(address)) continue;
      if ((*orphan)->used() == 0) {
        (*orphan)->give_back();
        orphans.erase(orphan);
      }
      return true;
    }
    return false;
  }
};

inline State& state() {
  static State* only = new State;  // it outlives what MindSpore frees when the process ends
  return *only;
}

class Context {  // MindSpore's context of the device, in a thread that may have none
 public:
  Context() { state().driver->push_context(state().context); }
  ~Context() {
    Handle popped = nullptr;
    state().driver->pop_context(&popped);
  }
};

// While it lives, this thread calls cudaMalloc and cudaFree for MindSpore's pool, and not for an operator.
class WithinPool {
 public:
  WithinPool() { ++depth; }
  ~WithinPool() { --depth; }
  static inline thread_local int depth = 0;
};

inline char* take_segment(size_t bytes) {
  const Source& source = state().source;
  const WithinPool within;
  return static_cast<char*>(source.allocate(source.pool, bytes, false, false, 0));
}

inline void give_segment(char* base) {
  const Source& source = state().source;
  source.free(source.pool, base);
}

}  // namespace graphs
