// MindSpore's memory while a graph is recorded: it comes from the graph's own pool.
#pragma once

#include "state.h"

namespace graphs {

template <int kBase>
bool is_on_device(State& s, void* pool) {
  const auto known = s.on_device.find(pool);
  if (known != s.on_device.end()) return known->second;
  const WithinPool within;
  void* trial = Originals<kBase>::allocate(pool, Pool::kUnit, false, false, 0);
  const bool found = trial != nullptr && s.driver->is_device_memory(trial);
  if (trial != nullptr) Originals<kBase>::free(pool, trial);
  if (found && s.source.pool == nullptr) s.source = {pool, Originals<kBase>::allocate, Originals<kBase>::free};
  return s.on_device[pool] = found;
}

inline char* allocate_own(State& s, size_t bytes) {
  if (bytes <= Banks::kBytes) return s.current->constants.allocate(s.driver->last_node(s.stream));
  return s.current->memory->work.allocate(bytes);
}

template <int kBase>
void* allocate(void* pool, size_t bytes, bool persistent, bool recycle, uint32_t stream) {
  State& s = state();
  if (s.recording) {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    if (s.current && is_on_device<kBase>(s, pool)) {
      return allocate_own(s, bytes);
    }
  }
  const WithinPool within;
  return Originals<kBase>::allocate(pool, bytes, persistent, recycle, stream);
}

template <int kBase>
std::vector<void*> allocate_several(void* pool, const std::vector<size_t>& sizes, uint32_t stream) {
  State& s = state();
  if (s.recording && !sizes.empty()) {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    if (s.current && is_on_device<kBase>(s, pool)) {
      size_t total = 0;
      for (const size_t size : sizes) total += size;
      char* whole = s.current->memory->work.allocate(total);
      if (whole == nullptr) return {};
      const auto parts = s.current->memory->work.divide(whole, sizes);
      return {parts.begin(), parts.end()};
    }
  }
  const WithinPool within;
  return Originals<kBase>::allocate_several(pool, sizes, stream);
}

// Frees the address if it is a graph's. Otherwise returns false.
inline bool free_own(State& s, void* address) {
  if (s.free_number(address)) return true;
  Pool* pool = s.pool_of(address);
  if (pool == nullptr) return false;
  auto* block = static_cast<char*>(address);
  if (s.recording && s.shared.count(block) != 0) {
    s.late.push_back(block);
  } else {
    pool->free(block);
  }
  return true;
}

// Frees memory of a graph, and while recording keeps other memory until the graph is gone. Else returns false.
inline bool free_or_keep(const Freed& freed) {
  State& s = state();
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  if (free_own(s, freed.address)) return true;
  if (!s.current || !s.recording) return false;
  s.current->freed.push_back(freed);
  return true;
}

template <int kBase>
void free_address(void* pool, void* const& address) {
  if (!free_or_keep({Originals<kBase>::free, pool, address})) Originals<kBase>::free(pool, address);
}

template <int kBase>
void free_parts(void* pool, const std::vector<void*>& free, const std::vector<void*>& keep,
                const std::vector<size_t>& sizes) {
  State& s = state();
  std::vector<void*> others;
  std::vector<std::pair<char*, size_t>> own_parts;
  std::vector<void*> other_parts;
  std::vector<size_t> other_sizes;
  {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    for (size_t i = 0; i < keep.size(); ++i) {
      if (s.block_of(keep[i]) != nullptr) {
        own_parts.emplace_back(static_cast<char*>(keep[i]), sizes[i]);
      } else {
        other_parts.push_back(keep[i]);
        other_sizes.push_back(sizes[i]);
      }
    }
    for (void* address : free) {
      Pool* owner = s.pool_of(address);
      if (owner != nullptr) {
        owner->keep_parts(static_cast<char*>(address), own_parts);
      } else if (!s.free_number(address)) {
        others.push_back(address);
      }
    }
  }
  if (!others.empty() || !other_parts.empty()) Originals<kBase>::free_parts(pool, others, other_parts, other_sizes);
}

template <int kBase>
bool record_event(void* pool, int64_t task, uint32_t stream, const std::vector<std::pair<uint32_t, void*>>& addresses,
                  const std::shared_ptr<void>& event) {
  State& s = state();
  {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    for (const auto& [memory_stream, address] : addresses) {
      if (char* block = s.block_of(address)) s.shared.insert(block);
    }
  }
  return Originals<kBase>::record_event(pool, task, stream, addresses, event);
}

inline int (*original_malloc)(void**, size_t);
inline int (*original_free)(void*);

// Some operators, such as Adam and Sort, take memory from CUDA, and give it back when they have launched their kernels.
inline int malloc_of_operator(void** found, size_t bytes) {
  State& s = state();
  if (s.recording && WithinPool::depth == 0) {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    if (s.current && s.source.pool != nullptr) {
      *found = allocate_own(s, bytes);
      return *found != nullptr ? 0 : kOutOfMemory;
    }
  }
  return original_malloc(found, bytes);
}

inline int free_of_operator(void* address) {
  const auto free = [](void*, void* const& each) { original_free(each); };
  if (WithinPool::depth == 0 && free_or_keep({free, nullptr, address})) return 0;
  return original_free(address);
}

}  // namespace graphs
