// A Table tells at which place of a list each number occurs last. It is a hash table with open addressing, which the
// threads of a launch fill at once by atomics on whole numbers, so that its answers do not depend on their order.
#pragma once

#include <algorithm>

#include "../common/dtype.h"

namespace msops::write_cache {

struct Table {
  using Word = unsigned long long;  // the type that atomicCAS takes
  static constexpr Word kNone = ~Word{0};

  int64_t entries;  // a power of 2
  int shift;        // 64 less the bits of an entry's number
  Word* slots;      // (entries): a number, or kNone
  Word* last;       // (entries): kNone - 1 - place, which is the smaller the later the place

  // Returns how many words of scratch a list of so many numbers needs.
  static int64_t scratch(int64_t count) { return 2 * entries_for(count); }
  static Table at(Word* words, int64_t count) {
    const int64_t entries = entries_for(count);
    return {entries, __builtin_clzll(static_cast<Word>(entries)) + 1, words, words + entries};
  }
  int64_t bytes() const { return 2 * entries * static_cast<int64_t>(sizeof(Word)); }

  // Adds a number of a place. Before the first one, all bytes are 0xff.
  MSOPS_BOTH void add(int64_t number, int64_t place) const {
    const Word key = static_cast<Word>(number);
    for (Word at = first(key);; at = (at + 1) & (entries - 1)) {
#ifdef __CUDA_ARCH__
      const Word before = atomicCAS(slots + at, kNone, key);
#else
      const Word before = slots[at];
      if (before == kNone) slots[at] = key;
#endif
      if (before != kNone && before != key) continue;
      const Word order = kNone - 1 - static_cast<Word>(place);
#ifdef __CUDA_ARCH__
      atomicMin(last + at, order);
#else
      last[at] = std::min(last[at], order);
#endif
      return;
    }
  }

  // Returns the last place of a number that was added.
  MSOPS_BOTH int64_t find(int64_t number) const {
    Word at = first(static_cast<Word>(number));
    while (slots[at] != static_cast<Word>(number)) at = (at + 1) & (entries - 1);
    return static_cast<int64_t>(kNone - 1 - last[at]);
  }

 private:
  static int64_t entries_for(int64_t count) {
    int64_t entries = 2;
    while (entries < 2 * count) entries *= 2;
    return entries;
  }
  // Multiplies by 2^64 / 1.618..., which spreads numbers at any distance from each other (Fibonacci hashing).
  MSOPS_BOTH Word first(Word key) const { return key * 0x9e3779b97f4a7c15 >> shift; }
};

}  // namespace msops::write_cache
