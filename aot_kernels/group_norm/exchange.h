// How threads, warps and blocks exchange their statistics and sums: by shuffles, and through records in shared memory.
#pragma once

#include "../common/pack.h"
#include "layout.h"
#ifdef __CUDACC__
#include "../common/gpu/cluster.h"

namespace msops::group_norm {

// Sums of dz xhat and dz; those of a group are weighted.
template <typename C>
struct Sums {
  C weighted[2], plain[2];
};

// A team is `size` lanes of a warp, `stride` apart; `number` is that of a lane in its team. Unlike a Team of team.h, it
// has any size, which the number of channels in a group decides.
struct WarpTeam {
  int size, stride, number;

  // Leaves the sums of each value in the first lane.
  template <int kValues, typename C>
  __device__ void add_up(C (&values)[kValues]) const {
    for (int n = size; n > 1;) {
      const int half = (n + 1) / 2;
      for (C& value : values) {
        const C other = __shfl_down_sync(~0u, value, half * stride);
        if (number + half < n) value += other;
      }
      n = half;
    }
  }
  template <typename C>
  __device__ C of_first(C value) const {
    return __shfl_sync(~0u, value, static_cast<int>(threadIdx.x) % 32 - number * stride);
  }

  // Combines from(i) for all i below n, and leaves the result in the first lane. `result` is of its type. Statistics
  // are read twice, since a chain of Statistics::combine divides for each.
  template <typename C, typename From>
  __device__ void combine(int n, const From& from, Sums<C>& result) const {
    result = {};
#pragma unroll 1
    for (int i = number; i < n; i += size) {
      const Sums<C> own = from(i);
      result.weighted[0] += own.weighted[0], result.weighted[1] += own.weighted[1];
    }
    add_up(result.weighted);
  }
  template <typename C, typename From>
  __device__ void combine(int n, const From& from, Statistics<C>& result) const {
    C total[2] = {}, sums[2] = {};
#pragma unroll 1
    for (int i = number; i < n; i += size) {
      const Statistics<C> own = from(i);
      total[0] += own.count, total[1] += own.count * own.pivot;
    }
    add_up(total);
    const C count = of_first(total[0]), pivot = of_first(count > 0 ? total[1] / total[0] : C(0));
#pragma unroll 1
    for (int i = number; i < n; i += size) {
      const Statistics<C> own = from(i);
      const C distance = own.pivot - pivot + own.rest;
      sums[0] += own.count * distance, sums[1] += own.squares + own.count * distance * distance;
    }
    add_up(sums);
    result = Statistics<C>::of(count, pivot, sums[0], sums[1]);
  }
};

// Room is a block's shared memory: a record for each team and channel or pack, two for each group that the cluster's
// other blocks read, the Groups, and the stages.
template <typename T, int N>
struct Room {
  using C = Compute<T>;
  using Record = Pack<C, 4>;  // Statistics or Sums
  Record *records, *exchanged;
  Group<C>* groups;
  Pack<T, N>* packs;

  __device__ Room(unsigned char* bytes, const Layout& layout)
      : records(reinterpret_cast<Record*>(bytes)),
        exchanged(records + layout.records),
        groups(reinterpret_cast<Group<C>*>(exchanged + 2 * layout.together)),
        packs(reinterpret_cast<Pack<T, N>*>(bytes + bytes_of(layout))) {}

  // Returns the bytes that lie before the stages.
  static __host__ __device__ int64_t bytes_of(const Layout& layout) {
    const int64_t bytes = (layout.records + 2 * layout.together) * static_cast<int64_t>(sizeof(Record)) +
                          layout.together * static_cast<int64_t>(sizeof(Group<C>));
    return (bytes + 31) / 32 * 32;
  }
};

// Converts a record to what it holds, and back.
template <typename To, typename From>
__device__ To value_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a record holds four numbers");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Reads what another block of the cluster has at the same place.
template <typename Record>
__device__ Record read_shared(const Record* from, int block) {
  Pack<float, 4> words[sizeof(Record) / 16];
  for (size_t i = 0; i < sizeof(Record) / 16; ++i)
    words[i] = ld_shared_cluster(reinterpret_cast<const float*>(from) + 4 * i, block);
  Record record;
  memcpy(&record, words, sizeof record);
  return record;
}

}  // namespace msops::group_norm
#endif
