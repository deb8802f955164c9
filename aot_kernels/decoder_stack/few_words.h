// Blocks tell each other numbers in words with tags. A word and its tag are written and read at once, so that whoever
// waits for a word reads until it has the tag of its layer: there is neither a counter nor a fence, and no more than
// one way through the L2 cache from a block to another. The tags begin as 0, and layers count from 1.
#pragma once

#include <cstring>

#include "../common/gpu/relaxed.h"
#include "few_problem.h"

namespace msops::decoder_stack {

// Watch ends waits that are in vain. After a second without the words, the wait yields NaN, which goes on to the
// results, and no wait of the launch is long any more.
class Watch {
 public:
  __device__ explicit Watch(unsigned* failed) : failed_(failed) {}

  __device__ __forceinline__ void begin() { polls_ = 0; }

  // Returns whether to go on waiting.
  __device__ __forceinline__ bool goes_on() {
    if (since_ == kOver) return false;
    if (++polls_ % kPolls == 0) since_ = look(failed_, polls_ == kPolls ? 0 : since_);
    return since_ != kOver;
  }

 private:
  static constexpr unsigned kPolls = 4096;
  static constexpr unsigned long long kOver = ~0ull, kMost = 1000000000;

  // Returns since when the wait lasts, or kOver.
  static __device__ __forceinline__ unsigned long long look(unsigned* failed, unsigned long long since) {
    const unsigned long long now = globaltimer();
    if (since == 0) since = now;
    if (now - since < kMost && ld_relaxed_b64(failed).x == 0) return since;
    st_relaxed_b64(failed, {1, 1});
    return kOver;
  }

  unsigned* failed_;
  unsigned polls_ = 0;
  unsigned long long since_ = 0;
};

constexpr unsigned kNanWord = 0xffffffff;

// Reads units first, first + step, ... below `end`, kAhead at once, and calls put(unit, its two words).
template <int kAhead, typename Put>
__device__ __forceinline__ void read_units(const uint2* from, unsigned tag, int first, int end, int step, Watch& watch,
                                           const Put& put) {
  for (; first < end; first += kAhead * step) {
    uint4 units[kAhead];
    bool waits;
    watch.begin();
    do {
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (first + j * step < end) units[j] = ld_relaxed_v2_b64(from + 2 * (first + j * step));
      waits = false;
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (first + j * step < end) waits |= units[j].y != tag || units[j].w != tag;
    } while (waits && watch.goes_on());
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (first + j * step < end)
        put(first + j * step, waits ? uint2{kNanWord, kNanWord} : uint2{units[j].x, units[j].z});
  }
}

// Returns an element of a word.
template <typename T>
__device__ __forceinline__ float element_of(unsigned word, int e) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word);
  } else {
    T value;
    value.bits = static_cast<uint16_t>(word >> 16 * e);
    return float(value);
  }
}

// Reads two neighbouring numbers, one word or two. Returns whether they have the tag.
template <typename T>
__device__ __forceinline__ bool read_two(const uint2* from, unsigned tag, float& a, float& b) {
  if constexpr (kWordElements<T> == 2) {
    const uint2 word = ld_relaxed_b64(from);
    a = element_of<T>(word.x, 0), b = element_of<T>(word.x, 1);
    return word.y == tag;
  } else {
    const uint4 words = ld_relaxed_v2_b64(from);
    a = __uint_as_float(words.x), b = __uint_as_float(words.z);
    return words.y == tag && words.w == tag;
  }
}

__device__ __forceinline__ void publish(uint2* to, unsigned word, unsigned tag) { st_relaxed_b64(to, {word, tag}); }

// Rounds the numbers of a word.
template <typename T>
__device__ __forceinline__ unsigned word_of(const float (&numbers)[kWordElements<T>]) {
  T values[kWordElements<T>];
  for (int e = 0; e < kWordElements<T>; ++e) values[e] = T(numbers[e]);
  unsigned word;
  memcpy(&word, values, sizeof word);
  return word;
}

}  // namespace msops::decoder_stack
