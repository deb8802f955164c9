// The gradient of a table on the GPU. A block adds up a slice of a level's entries in shared memory, and so needs what
// the points add to this slice. Corners on the near and the far side of the first axis are neighbours nearly always, so
// that a record is of both. A task is a level and kFeatures of the features. Two launches for some tasks at once, after
// one that finds the largest gradients:
//
//   sort_kernel    a block, the sorter, writes the records of its points, which it sorts by slices
//   slice_kernel   a block reads all records of its slice and adds them up, as integers, since these come in any order.
//                  It stores the sums; those of a coarse level, whose slices several blocks share, it adds to `totals`.
//
// At the end, total_kernel turns these into numbers.
#pragma once

#include "../common/sum.h"
#include "records.h"

namespace msops::hash_encoding {

#ifdef __CUDACC__
// Keeps the largest double in memory. Numbers that are not negative compare as their bits do.
__device__ __forceinline__ void keep_largest(uint32_t* maxima, int i, double value) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(value));
  if (value > 0) atomicMax(reinterpret_cast<unsigned long long*>(maxima) + i, bits);
}

// Finds the largest finite numbers of columns that have `features` each. A thread has N neighbouring columns. The
// blocks collect their own maxima first, since atomics on few addresses are slow.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const T* dout, int64_t size, int64_t width, int64_t features, int64_t stride, uint32_t* maxima) {
  using C = Compute<T>;
  using Bits = typename std::conditional<sizeof(C) == 8, unsigned long long, uint32_t>::type;
  __shared__ Bits of_block[kMostLevels];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = (blockIdx.x * int64_t{kThreads} + thread) * N;
  if (thread < kMostLevels) of_block[thread] = 0;
  __syncthreads();
  C largest[N] = {};
#pragma unroll 4
  for (int64_t i = first < stride ? first : size; i < size; i += stride) {
    const Pack<T, N> pack = load<N>(dout + i);
    for (int k = 0; k < N; ++k) {
      const C value = fabs(C(pack.values[k]));
      if (value - value == 0 && value > largest[k]) largest[k] = value;
    }
  }
  for (int k = 0; k < N; ++k) {
    Bits bits;
    memcpy(&bits, largest + k, sizeof bits);
    if (bits > 0) atomicMax(of_block + (first + k) % width / features, bits);
  }
  __syncthreads();
  if (thread >= kMostLevels) return;
  C of_level;
  memcpy(&of_level, of_block + thread, sizeof of_level);
  keep_largest(maxima, thread, static_cast<double>(of_level));
}

// Finds the largest sum of the magnitudes of a direction.
template <int D>
__global__ void __launch_bounds__(kThreads)
    largest_direction_kernel(Coordinates along, int64_t count, uint32_t* maxima) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  double sum = 0;
  for (int d = 0; d < D && n < count; ++d) {
    const double value = fabs(along.get<double>(n * D + d));
    if (value - value == 0) sum += value;
  }
  keep_largest(maxima, kMostLevels, sum);
}

// Returns whether one record has both sides: they are in the same slice, and differ in some of the lowest bits alone.
__device__ __forceinline__ bool is_joined(uint32_t near, uint32_t far, int slice_bits) {
  const uint32_t difference = near ^ far;
  return difference >> slice_bits == 0 && (difference & (difference + 1)) == 0;
}

// Blocks are (sorters, tasks). Pairs are sorted by their near sides. Far sides that have records of their own follow
// those of their bin.
template <int D, bool kAlong, typename T>
__global__ void __launch_bounds__(kSortThreads, kBlocksAtOnce<T, kSortThreads>) sort_kernel(const SliceProblem<T> p) {
  using C = Compute<T>;
  constexpr int kCorners = 1 << (D - 1), kPoints = kPairs / kCorners, kEach = kPoints / kSortThreads;
  extern __shared__ float4 sorter_memory[];
  auto* const staged = reinterpret_cast<typename Record<C>::Words*>(sorter_memory);
  __shared__ uint32_t near_ends[kBins], far_ends[kBins];
  __shared__ Steps<C> steps;
  const int task = p.first_task + static_cast<int>(blockIdx.y), l = task / p.groups;
  const int64_t feature = task % p.groups * kFeatures;
  const int own = p.features_from(feature);
  const Level& level = p.all.grids.level[l];
  const int thread = static_cast<int>(threadIdx.x), bits = p.range_bits(level);
  const int64_t first = blockIdx.x * int64_t{kPoints};

  // Locate.
  Cell<D> cells[kEach];
  Axis<C> axes[kEach][D];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int64_t n = first + thread + e * kSortThreads;
    if (n < p.all.count)
      Point<D, kAlong, C>(p.all.grids, p.all.points, p.all.along, n).locate(level, cells[e], axes[e]);
  }
  if (thread == 0) steps = p.template steps<kAlong>(l);
  if (thread < kBins) near_ends[thread] = far_ends[thread] = 0;
  __syncthreads();

  // Count.
  const int lane_bits = p.lane_bits(level);
  const uint32_t of_lane = static_cast<uint32_t>(thread) & ((1u << lane_bits) - 1);
  const auto bin_of = [&](uint32_t entry) { return entry >> bits << lane_bits | of_lane; };
  const auto for_pairs = [&](const auto& f) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (first + thread + e * kSortThreads >= p.all.count) continue;
      uint32_t near[kCorners], far[kCorners];
      cells[e].entries(level, cells[e].near[0], near);
      cells[e].entries(level, cells[e].far[0], far);
#pragma unroll
      for (int c = 0; c < kCorners; ++c) f(e, c, near[c], far[c], !kAlong && is_joined(near[c], far[c], p.slice_bits));
    }
  };
  uint32_t ranks[kEach][kCorners / 2] = {};  // of two pairs each in their bins
  for_pairs([&](int e, int c, uint32_t near, uint32_t far, bool joined) {
    ranks[e][c / 2] |= atomicAdd(near_ends + bin_of(near), 1u) << c % 2 * 16;
    if (!joined) atomicAdd(far_ends + bin_of(far), 1u);
  });
  C gradients[kEach][kFeatures] = {};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int64_t n = first + thread + e * kSortThreads;
    if (n >= p.all.count) continue;
    const T* const from = p.dout + n * p.all.width() + l * p.all.features + feature;
    if (p.are_packs) {
      const Pack<T, kFeatures> pack = load<kFeatures>(from);
      for (int f = 0; f < kFeatures; ++f) gradients[e][f] = C(pack.values[f]);
    } else {
      for (int f = 0; f < own; ++f) gradients[e][f] = C(from[f]);
    }
  }
  __syncthreads();
  if (thread < 32) {  // a lane has some neighbouring bins
    constexpr int kOfLane = kBins / 32;
    uint32_t sum = 0;
    for (int bin = thread * kOfLane; bin < (thread + 1) * kOfLane; ++bin) sum += near_ends[bin] + far_ends[bin];
    uint32_t begin = warp_prefix_sum(sum) - sum;
    Pack<uint16_t, 2>* const ends = p.ends + int64_t{blockIdx.y} * kBins * p.sorters + blockIdx.x;
    for (int bin = thread * kOfLane; bin < (thread + 1) * kOfLane; ++bin) {
      const uint32_t end_of_near = begin + near_ends[bin], end = end_of_near + far_ends[bin];
      ends[bin * p.sorters] = {{static_cast<uint16_t>(begin), static_cast<uint16_t>(end)}};
      near_ends[bin] = begin, far_ends[bin] = end_of_near;
      begin = end;
    }
  }
  __syncthreads();

  // Sort. What shared memory has no room for is written as it comes.
  auto* const to = p.records + (blockIdx.y * p.sorters + blockIdx.x) * Layout::kRoom;
  const auto write = [&](uint32_t at, const Record<C>& record) {
    if (at < static_cast<uint32_t>(p.staged)) {
      staged[at] = record.words();
    } else {
      to[at] = record.words();
    }
  };
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    for (int f = 0; f < kFeatures; ++f) gradients[e][f] = steps.in_steps(gradients[e][f]);
  const uint32_t in_range = (1u << bits) - 1;
  for_pairs([&](int e, int c, uint32_t near, uint32_t far, bool joined) {
    const C(&gradient)[kFeatures] = gradients[e];
    const uint32_t at = near_ends[bin_of(near)] + (ranks[e][c / 2] >> c % 2 * 16 & 0xffff);
    constexpr int kBits = Record<C>::kBits;
    if (joined) {
      const C weight = share<D, false, -1, 1>(axes[e], 2 * c);
      const uint32_t entries = (near & in_range) << kBits | static_cast<uint32_t>(__popc(near ^ far));
      return write(at, {{weight * gradient[0], weight * gradient[1]}, axes[e][0].far, entries});
    }
    const C weights[2] = {share<D, kAlong>(axes[e], 2 * c), share<D, kAlong>(axes[e], 2 * c + 1)};
    write(at, {{weights[0] * gradient[0], weights[0] * gradient[1]}, C(0), (near & in_range) << kBits});
    write(atomicAdd(far_ends + bin_of(far), 1u),
          {{weights[1] * gradient[0], weights[1] * gradient[1]}, C(0), (far & in_range) << kBits});
  });
  __syncthreads();

  // Store.
  const int size = min(static_cast<int>(far_ends[kBins - 1]), p.staged);
  for (int i = thread; i < size; i += kSortThreads) to[i] = staged[i];
}

// Adds a record of a range to a slice of the range, if it is in this.
template <typename C>
__device__ __forceinline__ void add_record(const Record<C>& record, uint32_t slice_of_range, int slice_bits,
                                           const FixedSums<C>& sums) {
  constexpr int kTerms = 2 * kFeatures;  // of both sides
  const uint32_t near = record.entries >> Record<C>::kBits, bits = record.entries & ((1u << Record<C>::kBits) - 1);
  if (near >> slice_bits != slice_of_range) return;
  const uint32_t entry = near & ((1u << slice_bits) - 1), entries[2] = {entry, entry ^ ((1u << bits) - 1)};
  uint32_t at[kTerms];
  C terms[kTerms];
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    const int f = i % kFeatures, side = i / kFeatures;
    at[i] = static_cast<uint32_t>(f) << slice_bits | entries[side];
    terms[i] = record.gradient[f] * (side ? record.far : 1 - record.far);
  }
  const C some = (record.gradient[0] + record.gradient[1]) * record.far;  // the numbers are far below the largest
  if (some - some == 0) {
    uint32_t words[kTerms][FixedSums<C>::kWords];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) Steps<C>::words_of(terms[i], words[i]);
    sums.add(at, words);
  } else {
#pragma unroll
    for (int i = 0; i < kTerms; ++i)
      if (i < kFeatures || bits > 0) sums.add(at[i], terms[i]);
  }
}

// Blocks are (parts of slices, tasks), as many for each task as for that which has the most.
template <bool kAlong, typename T>
__global__ void __launch_bounds__(kSliceThreads, kBlocksAtOnce<T, kSliceThreads>)
    slice_kernel(const SliceProblem<T> p) {
  using C = Compute<T>;
  extern __shared__ uint32_t slice_words[];
  __shared__ Steps<C> steps;
  const int task = p.first_task + static_cast<int>(blockIdx.y), l = task / p.groups;
  const Level& level = p.all.grids.level[l];
  const int parts = p.parts(level), slice = static_cast<int>(blockIdx.x) / parts;
  if (slice >= p.slices(level)) return;
  const int part = static_cast<int>(blockIdx.x) % parts;
  const int64_t features = p.all.features, feature = task % p.groups * kFeatures;
  const int own = p.features_from(feature), bits = p.range_bits(level), lane_bits = p.lane_bits(level);
  const uint32_t begin = static_cast<uint32_t>(slice) << p.slice_bits, length = 1u << p.slice_bits;
  const uint32_t slice_of_range = (begin & ((1u << bits) - 1)) >> p.slice_bits;
  const int size = static_cast<int>(level.size - begin < length ? level.size - begin : length);
  const FixedSums<C> sums{slice_words, int64_t{kFeatures} << p.slice_bits};
  const int words = static_cast<int>(FixedLayout<C>::words(sums.count));
  for (int i = threadIdx.x; i < words; i += kSliceThreads) slice_words[i] = 0;
  if (threadIdx.x == 0) steps = p.template steps<kAlong>(l);
  __syncthreads();

  // Add up. Teams of warps take the records of 32 sorters each, whose bins a lane each looks up.
  constexpr int kWarps = kSliceThreads / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t first_sorter = parts == 1 ? 0 : part_begin<int64_t>(p.sorters, part, parts);
  const int64_t last = parts == 1 ? p.sorters : part_begin<int64_t>(p.sorters, part + 1, parts);
  const int groups = static_cast<int>(last - first_sorter < 32 * kWarps ? (last - first_sorter + 31) / 32 : kWarps);
  const int warps_of_team = kWarps / max(groups, 1), teams = kWarps / warps_of_team;
  const int64_t first_bin = int64_t{blockIdx.y} * kBins + (begin >> bits << lane_bits);
  const Pack<uint16_t, 2>* const begins = p.ends + first_bin * p.sorters;
  const Pack<uint16_t, 2>* const ends = begins + ((1 << lane_bits) - 1) * p.sorters;
  const auto* const of_task = p.records + int64_t{blockIdx.y} * p.sorters * Layout::kRoom;
  const int team = warp / warps_of_team, first_of_warp = warp % warps_of_team * 32;
  for (int64_t group = first_sorter + team * 32; team < teams && group < last; group += teams * 32) {
    int first = 0, records = 0;
    if (group + lane < last) {
      first = begins[group + lane].values[0];
      records = ends[group + lane].values[1] - first;
    }
    const int end = warp_prefix_sum(records), total = __shfl_sync(~0u, end, 31);
    const int offset = lane * static_cast<int>(Layout::kRoom) + first + records - end;
    const auto* const of_group = of_task + group * Layout::kRoom;
    for (int t = first_of_warp; t < total; t += warps_of_team * 32) {
      const int i = t + lane;
      int sorter = __popc(__ballot_sync(~0u, end <= t));  // the number of lanes whose records all come before the i-th
      for (unsigned ends_here = __ballot_sync(~0u, end > t && end < t + 32); ends_here; ends_here &= ends_here - 1)
        sorter += __shfl_sync(~0u, end, __ffs(static_cast<int>(ends_here)) - 1) <= i;
      const int at = i + __shfl_sync(~0u, offset, sorter);
      if (i < total) add_record(Record<C>::load(of_group + at), slice_of_range, p.slice_bits, sums);
    }
  }
  __syncthreads();

  // Store.
  const int64_t first_total = level.size <= kCoarse ? p.first_total(l) : 0;
  for (int i = threadIdx.x; i < size * kFeatures; i += kSliceThreads) {
    const int f = i % kFeatures, entry = i / kFeatures;
    if (f >= own) continue;
    const int64_t from = static_cast<int64_t>(f) << p.slice_bits | entry;
    if (level.size <= kCoarse) {
      p.totals.add((first_total + begin + entry) * features + feature + f, sums, from);
    } else {
      assign(p.dtable[(level.first + begin + entry) * features + feature + f], sums.total(from, steps));
    }
  }
}

// Index i is a number of the coarse levels' tables.
template <bool kAlong, typename T>
__global__ void __launch_bounds__(kThreads) total_kernel(const SliceProblem<T> p) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, features = p.all.features;
  if (i >= p.totals.count) return;
  int64_t rest = i / features;
  int l = 0;
  for (; p.all.grids.level[l].size > kCoarse || rest >= p.all.grids.level[l].size; ++l)
    rest -= p.all.grids.level[l].size > kCoarse ? 0 : p.all.grids.level[l].size;
  assign(p.dtable[(p.all.grids.level[l].first + rest) * features + i % features],
         p.totals.total(i, p.template steps<kAlong>(l)));
}

template <int D, bool kAlong, typename T>
void add_slices(Call& call, const Problem<T>& all, const T* dout, uint32_t* words, T* dtable) {
  using C = Compute<T>;
  const Layout layout(all.grids, D, all.count, all.features, static_cast<int>(sizeof(T)));
  words += -static_cast<unsigned>(reinterpret_cast<uintptr_t>(words) / 4) % 4;
  SliceProblem<T> p{all,
                    dout,
                    dtable,
                    words,
                    {words + layout.totals, layout.coarse * all.features},
                    reinterpret_cast<Pack<uint16_t, 2>*>(words + layout.ends),
                    reinterpret_cast<typename Record<C>::Words*>(words + layout.records),
                    layout.sorters,
                    static_cast<int>(layout.groups),
                    0,
                    6,
                    0,
                    all.features % kFeatures == 0 && is_aligned<kFeatures>(dout)};
  const int most = Gpu().dynamic_bytes();
  const auto bytes = [&] { return 4 * FixedLayout<C>::words(int64_t{kFeatures} << p.slice_bits); };
  constexpr int kWanted = (sizeof(C) == 8 ? 160 : 72) << 10;
  while (2 * bytes() <= std::min(kWanted, most)) ++p.slice_bits;
  constexpr int kOwnBytes = 2048;  // of the sorter's own arrays
  constexpr int kOfRecord = static_cast<int>(sizeof(Record<C>));
  p.staged = std::min(kPairs + 64, (most - kOwnBytes) / kOfRecord);
  cudaMemsetAsync(words, 0, layout.ends * sizeof(uint32_t), call.stream());
  const int64_t width = all.width(), size = all.count * width;
  with_width<T>(false, width, {dout}, [&](auto elements) {
    constexpr int kWidth = elements;
    const int64_t rows = std::clamp<int64_t>((int64_t{kWidth} << 17) / width, 1, all.count);
    launch(call, largest_kernel<kWidth, T>, (rows * width / kWidth + kThreads - 1) / kThreads, kThreads, 0, dout, size,
           width, all.features, rows * width, p.maxima);
  });
  if (kAlong)
    launch(call, largest_direction_kernel<D>, (all.count + kThreads - 1) / kThreads, kThreads, 0, all.along, all.count,
           p.maxima);
  const int tasks = all.grids.levels * p.groups, tasks_at_once = static_cast<int>(layout.tasks_at_once);
  for (; p.first_task < tasks; p.first_task += tasks_at_once) {
    const int end = std::min(tasks, p.first_task + tasks_at_once);
    int64_t blocks = 0;
    for (int task = p.first_task; task < end; ++task) {
      const Level& level = all.grids.level[task / p.groups];
      blocks = std::max(blocks, int64_t{p.slices(level)} * p.parts(level));
    }
    launch(call, sort_kernel<D, kAlong, T>, Grid(layout.sorters, end - p.first_task), kSortThreads,
           int64_t{p.staged} * kOfRecord, p);
    launch(call, slice_kernel<kAlong, T>, Grid(blocks, end - p.first_task), kSliceThreads, bytes(), p);
  }
  launch(call, total_kernel<kAlong, T>, (p.totals.count + kThreads - 1) / kThreads, kThreads, 0, p);
}
#endif

}  // namespace msops::hash_encoding
