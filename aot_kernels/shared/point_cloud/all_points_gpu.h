// The search of nearest points among all points of a cloud, which a block has in shared memory: a team of lanes takes a
// query. A lane holds the distances of its points in registers. The k-th of the lanes' least distances bounds that of
// the k-th point, and few points pass this bound.
#pragma once

#include "nearest.h"

namespace msops::points {

constexpr int kAllThreads = 256;  // of a block
template <typename C>
constexpr int kAllBlocks = sizeof(C) > 4 ? 2 : 4;  // of a multiprocessor, for which registers suffice
constexpr int kHeld = 32;                          // distances of a lane at once
constexpr int kHeldBatch = 8;                      // of these, for which a lane asks together whether there are points
constexpr int kEntries = 1024;                     // points in shared memory

// Entry is a point in shared memory.
template <typename C>
struct alignas(sizeof(C) * 4) Entry {
  C x, y, z;
  int32_t index;

  __device__ __forceinline__ Point<C> point() const { return {x, y, z}; }
  __device__ __forceinline__ Neighbour<C> from(const Point<C>& query) const {
    return {or_infinite(squared_distance(point(), query)), index};
  }
};

// Copies points at(first), at(first + 1), ... to shared memory, and infinitely far ones after them.
template <typename C, typename At>
__device__ __forceinline__ void fill_entries(Entry<C> (&entries)[kEntries], int64_t first, int count, const At& at) {
  constexpr int kEach = kEntries / kAllThreads;
  Point<C> points[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    points[k] = at(first + min(k * kAllThreads + static_cast<int>(threadIdx.x), count - 1));
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int n = k * kAllThreads + static_cast<int>(threadIdx.x);
    const C x = n < count ? points[k].x : kInfinity<C>;
    entries[n] = {x, points[k].y, points[k].z, static_cast<int32_t>(first + n)};
  }
}

// What sort_team sorts: numbers, or neighbours.
template <typename C>
__device__ __forceinline__ bool is_before(C a, C b) {
  return a < b;
}
template <typename C>
__device__ __forceinline__ bool is_before(const Neighbour<C>& a, const Neighbour<C>& b) {
  return (a.distance < b.distance) | ((a.distance == b.distance) & (a.index < b.index));  // without a branch
}
template <typename C>
__device__ __forceinline__ C from_partner(C mine, int distance) {
  return __shfl_xor_sync(~0u, mine, distance);
}
template <typename C>
__device__ __forceinline__ Neighbour<C> from_partner(const Neighbour<C>& mine, int distance) {
  return {from_partner(mine.distance, distance), from_partner(mine.index, distance)};
}

// Compares a lane's value with that of lane ^ distance. The lane without the bit `upper` keeps the first of the two.
template <typename V>
__device__ __forceinline__ V exchange(const V& mine, int distance, int upper) {
  const V other = from_partner(mine, distance);
  return is_before(other, mine) != ((threadIdx.x & upper) != 0) ? other : mine;
}

// Sorts one value of each lane of a team if its first half is sorted up and its second half down, or the reverse.
template <int kLanes, typename V>
__device__ __forceinline__ V merge_halves(V mine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) mine = exchange(mine, distance, distance);
  return mine;
}

// Sorts one value of each lane of a team: lane 0 has the first one.
template <int kLanes, typename V>
__device__ __forceinline__ V sort_team(V mine) {
  if constexpr (kLanes > 1) {
    mine = sort_team<kLanes / 2>(mine);
    mine = exchange(mine, kLanes - 1, kLanes / 2);
    mine = merge_halves<kLanes / 2>(mine);
  }
  return mine;
}

// Returns which of a lane's points, n = s kLanes + lane of `count`, may be among the `wanted` nearest, as bits s: those
// not beyond the bound. distance_of(n) is their squared distance, infinite from `count` on, and for a point that must
// not count for the bound. `least` is the lane's least one, also of the calls before.
template <int kLanes, typename C, typename DistanceOf>
__device__ __forceinline__ uint32_t near_points(int count, int wanted, C& least, const DistanceOf& distance_of) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  C distances[kHeld];
#pragma unroll
  for (int s = 0; s < kHeld; ++s) {
    if (s % kHeldBatch == 0 && s * kLanes >= count) break;
    distances[s] = distance_of(s * kLanes + lane);
    least = fmin(distances[s], least);  // which is not NaN
  }
  const C bound = __shfl_sync(~0u, sort_team<kLanes>(least), wanted - 1, kLanes);
  uint32_t near = 0;
#pragma unroll
  for (int s = 0; s < kHeld; ++s) {
    if (s % kHeldBatch == 0 && s * kLanes >= count) break;
    if (!(distances[s] > bound)) near |= uint32_t{1} << s;
  }
  const int mine = (count - lane + kLanes - 1) / kLanes;
  return mine < kHeld ? near & ((uint32_t{1} << mine) - 1) : near;
}

}  // namespace msops::points
