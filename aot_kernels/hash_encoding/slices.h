// The gradient of a table on the GPU. A block adds up a slice of a level's entries in shared memory, and so needs the
// points that meet the slice. Three launches for some levels at once, after one that finds the largest gradients:
//
//   sort_kernel    a block, the sorter, lists which of its points meet which slice, by counting. Corners on the near
//                  and the far side of the first axis are neighbours nearly always: a reference is to both.
//   slice_kernel   a block goes over all references to its slice and adds them up, as integers, since these come in any
//                  order. It stores the sums; those of a coarse level, whose slices several blocks share, it adds to
//                  `totals`.
//   total_kernel   turns these into numbers
#pragma once

#include "fixed_point.h"
#include "interpolate.h"

namespace msops::hash_encoding {

constexpr int kBins = 128;                               // of references, each with the slices of a range of entries
constexpr int kCoarse = 1 << 17;                         // levels of at most so many entries have few slices
constexpr int kMaximaWords = 2 * (kMostLevels + 1) + 1;  // doubles, and a word to align them
template <int D>
constexpr int kSorted = D == 4 ? 1024 : 2048;  // points of a sorter

// Layout says where everything is in the scratch, in words of 4 bytes.
struct Layout {
  int64_t sorters, room, levels_at_once, coarse, totals, references, ends, words;  // room: references of a sorter

  Layout(const Grids& grids, int64_t axes, int64_t count, int64_t features, int words_of_sum) {
    constexpr int64_t kMostBytes = int64_t{1} << 28;  // of references at once
    const int64_t points = axes == 4 ? kSorted<4> : kSorted<3>;
    sorters = (count + points - 1) / points;
    room = points << axes;
    levels_at_once = std::clamp<int64_t>(kMostBytes / std::max<int64_t>(1, 2 * room * sorters), 1, grids.levels);
    coarse = 0;
    for (int l = 0; l < grids.levels; ++l) coarse += grids.level[l].size <= kCoarse ? grids.level[l].size : 0;
    totals = kMaximaWords;
    references = totals + size_of({coarse, features, words_of_sum + 1});
    ends = references + size_of({levels_at_once, sorters, room / 2});
    words = ends + size_of({levels_at_once, sorters, kBins});
  }
};

#ifdef __CUDACC__
template <typename T>
struct SliceProblem {
  using C = Compute<T>;
  Problem<T> all;
  const T* dout;
  T* dtable;
  uint32_t* maxima;  // of each level, and of the directions, as doubles
  FixedSums<C> totals;
  uint16_t* references;  // (levels at once, sorters, room)
  uint16_t* ends;        // (levels at once, sorters, kBins, 2): where a bin begins and ends
  int64_t sorters, room;
  int first_level, slice_bits;
  bool are_packs;  // the features of dout that a block adds up

  // Returns the bits of an entry below its bin's number.
  __device__ int bin_bits(const Level& level) const {
    const int bits = 32 - __clz(static_cast<int>(level.size - 1));
    return max(slice_bits, bits - 7);
  }
  __device__ int64_t slices(const Level& level) const {
    return (level.size + (int64_t{1} << slice_bits) - 1) >> slice_bits;
  }
  // Returns how many blocks share a slice.
  MSOPS_BOTH int64_t parts(const Level& level) const {
    const int64_t most = level.size > kCoarse ? 1 : 2 * int64_t{kCoarse} / level.size;
    const int64_t few = most < 64 ? most : 64;
    return few < sorters ? few : sorters;
  }
  // Returns the steps of a level's sums. All corners together count 1 at each point, or change by up to 3 scale |u|.
  template <bool kAlong>
  __device__ Steps<C> steps(int l) const {
    const double* const largest = reinterpret_cast<const double*>(maxima);
    const double of_shares = kAlong ? 3 * (all.grids.level[l].scale + 1) * largest[kMostLevels] : 1;
    int exponents[3] = {};
    frexp(largest[l], exponents);
    frexp(of_shares, exponents + 1);
    frexp(static_cast<double>(all.count), exponents + 2);
    return Steps<C>(exponents[0] + exponents[1] + exponents[2]);
  }
};

// Finds the largest finite numbers: of columns that have `features` each, or the largest sum of rows' magnitudes.
// Doubles that are not negative compare as their bits do.
__device__ __forceinline__ void keep_largest(uint32_t* maxima, int i, double value) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(value));
  if (value > 0) atomicMax(reinterpret_cast<unsigned long long*>(maxima) + i, bits);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const T* dout, int64_t size, int64_t width, int64_t features, int64_t stride, uint32_t* maxima) {
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (first >= stride) return;
  Compute<T> largest = 0;
  for (int64_t i = first; i < size; i += stride) {
    const Compute<T> value = fabs(Compute<T>(dout[i]));
    if (value - value == 0 && value > largest) largest = value;
  }
  keep_largest(maxima, static_cast<int>(first % width / features), largest);
}

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

// Returns the sum over the lanes before this one.
template <typename T>
__device__ __forceinline__ T warp_sum_before(T value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  return sum - value;
}

// Blocks are (sorters, levels).
template <int D, typename C, typename T>
__global__ void __launch_bounds__(kThreads) sort_kernel(const SliceProblem<T> p) {
  constexpr int kPoints = kSorted<D>, kPairs = 1 << (D - 1);
  __shared__ uint16_t sorted[kPoints << D];
  __shared__ uint32_t ends[kBins];
  const Level& level = p.all.grids.level[p.first_level + blockIdx.y];
  const int thread = static_cast<int>(threadIdx.x), bits = p.bin_bits(level);
  const int64_t first = blockIdx.x * int64_t{kPoints};
  const auto for_references = [&](const auto& f) {
    for (int i = thread; i < kPoints && first + i < p.all.count; i += kThreads) {
      Cell<D> cell;
      Axis<C> axes[D];
      Point<D, false, C>(p.all.grids, p.all.points, p.all.points, first + i).locate(level, cell, axes);
      uint32_t entries[2][kPairs];  // on the near and the far side of the first axis
      cell.entries(level, cell.near[0], entries[0]);
      cell.entries(level, cell.far[0], entries[1]);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint32_t near = entries[0][pair] >> bits, far = entries[1][pair] >> bits;
        f(near, i << (D - 1) | pair);
        if (far != near) f(far, i << (D - 1) | pair);
      }
    }
  };
  for (int bin = thread; bin < kBins; bin += kThreads) ends[bin] = 0;
  __syncthreads();
  for_references([&](uint32_t bin, int) { atomicAdd(ends + bin, 1u); });
  __syncthreads();
  if (thread < 32) {  // a lane has some neighbouring bins
    constexpr int kEach = kBins / 32;
    uint32_t sum = 0;
    for (int k = 0; k < kEach; ++k) sum += ends[thread * kEach + k];
    uint32_t before = warp_sum_before(sum);
    for (int k = 0; k < kEach; ++k) {
      const uint32_t size = ends[thread * kEach + k];
      ends[thread * kEach + k] = before;
      before += size;
    }
  }
  __syncthreads();
  uint16_t* const of_bins = p.ends + (blockIdx.y * p.sorters + blockIdx.x) * 2 * kBins;
  for (int bin = thread; bin < kBins; bin += kThreads) of_bins[2 * bin] = static_cast<uint16_t>(ends[bin]);
  __syncthreads();
  for_references(
      [&](uint32_t bin, int reference) { sorted[atomicAdd(ends + bin, 1u)] = static_cast<uint16_t>(reference); });
  __syncthreads();
  for (int bin = thread; bin < kBins; bin += kThreads) of_bins[2 * bin + 1] = static_cast<uint16_t>(ends[bin]);
  uint16_t* const to = p.references + (blockIdx.y * p.sorters + blockIdx.x) * p.room;
  for (int i = thread; i < static_cast<int>(ends[kBins - 1]); i += kThreads) to[i] = sorted[i];
}

constexpr int kSliceThreads = 512, kFeatures = 2;  // features that a block adds up

// Adds the gradient of a point to the two corners of a pair, as far as they are in the slice.
template <int D, bool kAlong, typename T, typename C = Compute<T>>
__device__ __forceinline__ void add_reference(const SliceProblem<T>& p, const Level& level, int l, int64_t n, int pair,
                                              uint32_t begin, int64_t feature, int own, const Steps<C>& steps,
                                              const FixedSums<C>& sums) {
  const T* const from = p.dout + n * p.all.width() + l * p.all.features + feature;
  C gradient[kFeatures] = {};
  if (p.are_packs) {
    const Pack<T, kFeatures> pack = load<kFeatures>(from);
    for (int f = 0; f < kFeatures; ++f) gradient[f] = C(pack.values[f]);
  } else {
    for (int f = 0; f < own; ++f) gradient[f] = C(from[f]);
  }
  Cell<D> cell;
  Axis<C> axes[D];
  Point<D, kAlong, C>(p.all.grids, p.all.points, p.all.along, n).locate(level, cell, axes);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    uint32_t entries[1 << (D - 1)];
    cell.entries(level, side ? cell.far[0] : cell.near[0], entries);
    const uint32_t entry = entries[pair] - begin;
    if (entry >> p.slice_bits) continue;
    const C weight = share<D, kAlong>(axes, 2 * pair + side);
#pragma unroll
    for (int f = 0; f < kFeatures; ++f)
      if (f < own) sums.add(entry * kFeatures + f, weight * gradient[f], steps);
  }
}

// Blocks are (parts of slices of levels, groups of features).
template <int D, bool kAlong, typename T>
__global__ void __launch_bounds__(kSliceThreads) slice_kernel(const SliceProblem<T> p) {
  using C = Compute<T>;
  extern __shared__ uint32_t slice_words[];
  // Find the block's part.
  int64_t rest = blockIdx.x, first_total = 0;
  int l = p.first_level;
  for (int i = 0; i < l; ++i) first_total += p.all.grids.level[i].size <= kCoarse ? p.all.grids.level[i].size : 0;
  while (rest >= p.slices(p.all.grids.level[l]) * p.parts(p.all.grids.level[l])) {
    rest -= p.slices(p.all.grids.level[l]) * p.parts(p.all.grids.level[l]);
    first_total += p.all.grids.level[l].size <= kCoarse ? p.all.grids.level[l].size : 0;
    ++l;
  }
  const Level& level = p.all.grids.level[l];
  const int64_t parts = p.parts(level), slice = rest / parts, part = rest % parts;
  const int64_t features = p.all.features, feature = int64_t{blockIdx.y} * kFeatures;
  const int own = static_cast<int>(features - feature < kFeatures ? features - feature : kFeatures);
  const uint32_t begin = static_cast<uint32_t>(slice << p.slice_bits), length = 1u << p.slice_bits;
  const int size = static_cast<int>(level.size - begin < length ? level.size - begin : length);
  const int bin = static_cast<int>(begin >> p.bin_bits(level));
  const FixedSums<C> sums{slice_words, int64_t{kFeatures} << p.slice_bits};
  const Steps<C> steps = p.template steps<kAlong>(l);

  // Add up. The threads share the references of 32 sorters, whose bins a lane each looks up.
  for (int i = threadIdx.x; i < FixedSums<C>::kAll * sums.count; i += kSliceThreads) slice_words[i] = 0;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t last = part_begin(p.sorters, part + 1, parts), of_level = (l - p.first_level) * p.sorters;
  for (int64_t group = part_begin(p.sorters, part, parts); group < last; group += 32) {
    int first = 0, references = 0;
    if (group + lane < last) {
      const Pack<uint16_t, 2> of_bin = load<2>(p.ends + ((of_level + group + lane) * kBins + bin) * 2);
      first = of_bin.values[0], references = of_bin.values[1] - first;
    }
    const int before = warp_sum_before(references), total = __shfl_sync(~0u, before + references, 31);
    for (int t = static_cast<int>(threadIdx.x) - lane; t < total; t += kSliceThreads) {
      const int i = t + lane;
      int sorter = 0;  // the number of lanes whose references all come before the i-th
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(~0u, before + references, sorter + step - 1) <= i) sorter += step;
      const int at = i - __shfl_sync(~0u, before, sorter & 31) + __shfl_sync(~0u, first, sorter & 31);
      if (i >= total) continue;
      const int reference = p.references[(of_level + group + sorter) * p.room + at];
      const int64_t n = (group + sorter) * kSorted<D> + (reference >> (D - 1));
      add_reference<D, kAlong>(p, level, l, n, reference & ((1 << (D - 1)) - 1), begin, feature, own, steps, sums);
    }
  }
  __syncthreads();

  // Store.
  for (int i = threadIdx.x; i < size * kFeatures; i += kSliceThreads) {
    const int f = i % kFeatures, entry = i / kFeatures;
    if (f >= own) continue;
    if (level.size <= kCoarse) {
      p.totals.add((first_total + begin + entry) * features + feature + f, sums, i);
    } else {
      assign(p.dtable[(level.first + begin + entry) * features + feature + f], sums.total(i, steps));
    }
  }
}

// Index i is a number of a level's table.
template <bool kAlong, typename T>
__global__ void __launch_bounds__(kThreads) total_kernel(const SliceProblem<T> p, int l, int64_t first_total) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, features = p.all.features;
  const Level& level = p.all.grids.level[l];
  if (i >= level.size * features) return;
  assign(p.dtable[level.first * features + i], p.totals.total(first_total * features + i, p.template steps<kAlong>(l)));
}

template <int D, bool kAlong, typename T>
void add_slices(Call& call, const Problem<T>& all, const T* dout, uint32_t* words, T* dtable) {
  using C = Compute<T>;
  constexpr int kAll = FixedSums<C>::kAll;
  const Layout layout(all.grids, D, all.count, all.features, Steps<C>::kWords);
  SliceProblem<T> p{all,
                    dout,
                    dtable,
                    words + reinterpret_cast<uintptr_t>(words) / 4 % 2,
                    {words + layout.totals, layout.coarse * all.features},
                    reinterpret_cast<uint16_t*>(words + layout.references),
                    reinterpret_cast<uint16_t*>(words + layout.ends),
                    layout.sorters,
                    layout.room,
                    0,
                    6,
                    all.features % kFeatures == 0 && is_aligned<kFeatures>(dout)};
  const auto bytes = [&] { return kAll * 4 * (int64_t{kFeatures} << p.slice_bits); };
  constexpr int64_t kWanted = (sizeof(C) == 8 ? 160 : 96) << 10;
  const int64_t most = std::min<int64_t>(kWanted, Gpu().dynamic_bytes());
  while (2 * bytes() <= most) ++p.slice_bits;
  cudaMemsetAsync(words, 0, layout.references * sizeof(uint32_t), call.stream());
  const int64_t width = all.width(), size = all.count * width;
  const int64_t stride = width * std::max<int64_t>(1, std::min<int64_t>(all.count, (1 << 18) / width));
  launch(call, largest_kernel<T>, size == 0 ? 0 : (stride + kThreads - 1) / kThreads, kThreads, 0, dout, size, width,
         all.features, stride, p.maxima);
  if (kAlong)
    launch(call, largest_direction_kernel<D>, (all.count + kThreads - 1) / kThreads, kThreads, 0, all.along, all.count,
           p.maxima);
  for (int l = 0; l < all.grids.levels; l += static_cast<int>(layout.levels_at_once)) {
    p.first_level = l;
    const int end = std::min(all.grids.levels, l + static_cast<int>(layout.levels_at_once));
    int64_t blocks = 0;
    for (int i = l; i < end; ++i) {
      const int64_t slices = (all.grids.level[i].size + (int64_t{1} << p.slice_bits) - 1) >> p.slice_bits;
      blocks += slices * std::max<int64_t>(1, p.parts(all.grids.level[i]));
    }
    launch(call, sort_kernel<D, C, T>, Grid(layout.sorters, end - l), kThreads, 0, p);
    launch(call, slice_kernel<D, kAlong, T>, Grid(blocks, (all.features + kFeatures - 1) / kFeatures), kSliceThreads,
           bytes(), p);
  }
  int64_t first_total = 0;
  for (int l = 0; l < all.grids.levels; ++l) {
    const int64_t entries = all.grids.level[l].size;
    if (entries > kCoarse) continue;
    const int64_t blocks = (entries * all.features + kThreads - 1) / kThreads;
    launch(call, total_kernel<kAlong, T>, blocks, kThreads, 0, p, l, first_total);
    first_total += entries;
  }
}
#endif

}  // namespace msops::hash_encoding
