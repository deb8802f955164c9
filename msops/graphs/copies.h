// What MindSpore does beside kernels while a graph is recorded: copies from and to the host, waits, and what no replay
// can repeat.
#pragma once

#include <cstring>
#include <utility>

#include "state.h"

namespace graphs {

inline int copy_from_host(State& s, void* to, const void* from, size_t bytes) {
  const Driver& driver = *s.driver;
  const auto target = reinterpret_cast<Address>(to);
  if (char* image = s.current->constants.write(to, from, bytes, driver.last_node(s.stream))) {
    if (int error = driver.to_device(target, from, bytes, s.side)) return error;
    if (int error = driver.to_device(reinterpret_cast<Address>(image), from, bytes, s.side)) return error;
    return driver.synchronize(s.side);
  }
  char* image = s.current->memory->kept.allocate(bytes);
  if (image == nullptr) return kOutOfMemory;
  s.current->images.push_back(image);
  if (int error = driver.to_device(reinterpret_cast<Address>(image), from, bytes, s.side)) return error;
  if (int error = driver.synchronize(s.side)) return error;
  return driver.within_device(target, reinterpret_cast<Address>(image), bytes, s.stream);
}

// Operators read their settings back from the device.
inline int copy_to_host(State& s, void* to, const void* from, size_t bytes) {
  std::string before;
  const bool has_before = !s.reads.empty() && s.reads.front().size() == bytes;
  if (has_before) {
    before = s.reads.front();
    s.reads.pop_front();
  }
  if (s.current->constants.read(from, to, bytes)) return 0;
  const auto at = reinterpret_cast<Address>(from);
  bool changes = s.current->constants.has(from) || s.current->memory->work.block_of(from) != nullptr;
  for (const auto& [begin, end] : s.current->variables) changes = changes || (begin <= at && at < end);
  if (!changes) {  // earlier calls have left it there
    if (int error = s.driver->to_host(to, at, bytes, s.side)) return error;
    return s.driver->synchronize(s.side);
  }
  if (!has_before || bytes > Checks::kBytes) {
    s.fail("a value of the GPU is read while the work that computes it is recorded");
    return kNotWhileRecording;
  }
  std::memcpy(to, before.data(), bytes);
  return s.current->checks.add(*s.driver, at, before, s.stream);
}

// Copies between the host and the device, or within the host's memory. Returns -1 for other copies. MindSpore names a
// wrong direction for some copies; where the memory lies is what counts.
inline int copy(void* to, const void* from, size_t bytes) {
  State& s = state();
  if (!s.recording || bytes == 0) return -1;
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  if (!s.current) return -1;
  const Context context;  // a thread of MindSpore's may have none
  const bool from_device = s.driver->is_device_memory(from), to_device = s.driver->is_device_memory(to);
  if (!from_device && !to_device) {
    std::memcpy(to, from, bytes);
    return 0;
  }
  if (!from_device) return copy_from_host(s, to, from, bytes);
  return to_device ? -1 : copy_to_host(s, to, from, bytes);
}

inline int (*original_memcpy)(void*, const void*, size_t, int);
inline int (*original_memcpy_async)(void*, const void*, size_t, int, Handle);
inline int (*original_memset)(void*, int, size_t);

inline int memcpy_async(void* to, const void* from, size_t bytes, int kind, Handle stream) {
  const int done = copy(to, from, bytes);
  return done >= 0 ? done : original_memcpy_async(to, from, bytes, kind, stream);
}

inline int memcpy_now(void* to, const void* from, size_t bytes, int kind) {
  const int done = copy(to, from, bytes);
  if (done >= 0) return done;
  constexpr int kWithinDevice = 3;
  State& s = state();
  if (s.recording) return original_memcpy_async(to, from, bytes, kWithinDevice, s.stream);
  return original_memcpy(to, from, bytes, kind);
}

inline int memset_now(void* to, int value, size_t bytes) {
  State& s = state();
  if (!s.recording) return original_memset(to, value, bytes);
  const Context context;
  return s.driver->fill(reinterpret_cast<Address>(to), static_cast<unsigned char>(value), bytes, s.stream);
}

inline int wait() { return 0; }  // for the device, a stream or an event

// Notes a copy to the host that has been done.
inline void note_read(State& s, const void* to, const void* from, size_t bytes) {
  if (s.driver->is_device_memory(to) || !s.driver->is_device_memory(from)) return;
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  s.reads.emplace_back(static_cast<const char*>(to), bytes);
}

inline int memcpy_async_noted(void* to, const void* from, size_t bytes, int kind, Handle stream) {
  State& s = state();
  const int error = original_memcpy_async(to, from, bytes, kind, stream);
  if (error == 0 && s.driver->synchronize(stream) == 0) note_read(s, to, from, bytes);
  return error;
}

inline int memcpy_now_noted(void* to, const void* from, size_t bytes, int kind) {
  const int error = original_memcpy(to, from, bytes, kind);
  if (error == 0) note_read(state(), to, from, bytes);
  return error;
}

// Functions that launch kernels which no graph can repeat, by a part of their symbol. The first part fits templates and
// other functions of any name that keep random numbers' state.
struct Refused {
  const char* symbol;
  const char* words;
};
constexpr const char* kRandom =
    "an operator of MindSpore draws random numbers, whose state it keeps on the host: each replay would draw equal "
    "ones";
constexpr Refused kRefused[] = {
    {"curandState", kRandom},
    {"curandGenerate", kRandom},
    {"CalUniform", kRandom},
    {"BernoulliForward", kRandom},
    {"BiasDropoutAdd", kRandom},
    {"FusedDropoutForward", kRandom},
    {"DropoutNDForward", kRandom},
    {"CalRandomChoiceWithMask", kRandom},
    {"RandomCategoricalKernel", kRandom},
    {"LaunchNonDeterministicInts", kRandom},
    {"TruncatedNormal", kRandom},
    {"CalLogNormalReverse", kRandom},
    {"7NonZeroI", "the data decides how many elements the result of nonzero has"},
    {"12MaskedSelectI", "the data decides how many elements the result of masked_select has"},
    {"CalUnique", "the data decides how many elements the result of unique has"},
    {"CalListDiff", "the data decides how many elements the result of ListDiff has"},
    {"8CoalesceI", "the data decides how many elements the result of Coalesce has"},
    {"CalCTCGreedyDecoder", "the data decides how many elements the result of CTCGreedyDecoder has"},
    {"SparseFillEmptyRows", "the data decides how many elements the result of SparseFillEmptyRows has"},
};

template <size_t kIndex>
int refuse() {
  State& s = state();
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  s.fail(kRefused[kIndex].words);
  return kNotWhileRecording;
}

// Returns a function for each place in kRefused.
template <size_t... kIndex>
void* refusing(size_t i, std::index_sequence<kIndex...>) {
  static int (*const functions[])() = {&refuse<kIndex>...};
  return reinterpret_cast<void*>(functions[i]);
}

}  // namespace graphs
