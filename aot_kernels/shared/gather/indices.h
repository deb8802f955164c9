// On the CPU, entries look at all indices before they read or write by them.
#pragma once

#include <algorithm>

#include "../../common/parallel.h"

namespace msops::gather {

// Sets `outside` to the first chunk that has an index outside [least, end).
template <typename Index>
struct FindOutside {
  static constexpr int64_t kChunk = 1 << 14;
  int64_t size, least, end;
  const Index* index;
  int64_t* outside;  // where that chunk begins

  int64_t chunks() const { return (size + kChunk - 1) / kChunk; }

  MSOPS_CPU void operator()(int64_t chunk) const {
    const int64_t from = chunk * kChunk, to = std::min(from + kChunk, size);
    Index smallest = index[from], largest = smallest;
#pragma omp simd reduction(min : smallest) reduction(max : largest)
    for (int64_t i = from; i < to; ++i) {
      smallest = index[i] < smallest ? index[i] : smallest;
      largest = index[i] > largest ? index[i] : largest;
    }
    if (static_cast<int64_t>(smallest) < least || static_cast<int64_t>(largest) >= end) lower(from);
  }

 private:
  MSOPS_CPU void lower(int64_t from) const {
    int64_t seen = __atomic_load_n(outside, __ATOMIC_RELAXED);
    while (from < seen &&
           !__atomic_compare_exchange_n(outside, &seen, from, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
};

// Outside is the first index outside [least, end), if there is one.
struct Outside {
  bool found = false;
  long long index = 0;
  char place[96] = "";  // such as "1, 3"

  template <typename Index>
  static Outside of(Call& call, const Tensor& idx, int64_t least, int64_t end) {
    Outside result;
    int64_t at = INT64_MAX;
    const Index* const index = idx.as<const Index>();
    const FindOutside<Index> find{idx.size, least, end, index, &at};
    on_cpu(call, find.chunks(), find, static_cast<double>(find.kChunk));
    if (at == INT64_MAX) return result;
    while (least <= static_cast<int64_t>(index[at]) && static_cast<int64_t>(index[at]) < end) ++at;
    result.found = true, result.index = static_cast<long long>(index[at]);
    int64_t rest = at, below = idx.size;
    for (int d = 0, used = 0; d < idx.rank && used < 80; ++d) {
      below /= idx.shape[d];
      used += std::snprintf(result.place + used, sizeof result.place - used, d ? ", %lld" : "%lld",
                            static_cast<long long>(rest / below));
      rest %= below;
    }
    return result;
  }
};

// Requires that each index is one of `count` things of another tensor, such as "points"; or -1 if `least` is that.
template <typename Index>
void require_indices(Call& call, const Tensor& idx, const Tensor& of, int64_t count, const char* things,
                     int64_t least = 0) {
  const Outside outside = Outside::of<Index>(call, idx, least, count);
  call.require(!outside.found, kBadValue, "%s[%s] is %lld, but %s has %lld %s", idx.name, outside.place, outside.index,
               of.name, static_cast<long long>(count), things);
}

}  // namespace msops::gather
