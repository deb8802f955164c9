// On the GPU, the gradient of lists that have many points or terms. The terms of each list are sorted by ranges of
// points, once for all channels (bins_gpu.h). Then rows of `dout` are transposed into scratch (packs_gpu.h), some items
// at a time, which bounds the scratch, and a block adds up the terms of a range: each is a read of whole sectors. The
// block also has the features of the range, whose products with the terms are terms of the gradient of the weights.
#pragma once

#include "../../common/gpu/unrolled.h"
#include "../../common/sum.h"
#include "bins_gpu.h"
#include "packs_gpu.h"

namespace msops::gather {

constexpr int kSumChannels = 8;  // of a lane
constexpr int kLongSum = 64;     // terms of a point; a block adds up more than that together

template <typename T>
struct SumTask {
  GatherSizes all;
  PackedRows<T> packed;  // of dout
  BinnedTerms<T> binned;
  const T* features;  // null if there is one tap
  T* out;
  Compute<T>* partial;    // (slots, lists, terms as they are binned); null if there is one tap
  int64_t ranges, slots;  // of a list; for groups of channels, which take turns
};

// RangeTerms has up to kMost terms of a range in shared memory, sorted by their points.
template <int kTaps, int kPoints, int kMost, typename T>
struct RangeTerms {
  using C = Compute<T>;
  static constexpr int kWarps = kSumThreads / 32, kRounds = kMost / kSumThreads, kCounts = kPoints * kWarps;
  // A term is `weight` times the row of a place.
  struct Term {
    int place;
    C weight;
  };
  Term terms[kMost];
  alignas(16) int of_warps[kWarps];        // whole packs, so that no thread reads counts beside them
  int counts[kCounts + 1];                 // (points, warps): where a warp's terms of a point begin
  C products[kTaps > 1 ? kMost : 1];       // of features and terms, in the order before they were sorted
  uint16_t binned[kTaps > 1 ? kMost : 1];  // where the terms were then
  int points[kPoints];  // in the order of how many terms they have, so that the teams of a warp have equally many

  __device__ int begin(int point) const { return counts[point * kWarps]; }
  __device__ int size(int point) const { return begin(point + 1) - begin(point); }

  // Sorts `count` terms from `first` on; those of other ranges, which a bin may have, are left out.
  __device__ void sort(const BinnedTerms<T>& from, int64_t first, int count, int64_t first_point) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < kCounts; i += kSumThreads) counts[i] = 0;
    int place[kRounds], point[kRounds], rank[kRounds];
    C weight[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int i = (warp * kRounds + r) * 32 + lane;
      const int64_t n = i < count ? from.point_of[first + i] - first_point : -1;
      point[r] = 0 <= n && n < kPoints ? static_cast<int>(n) : -1;
      place[r] = i < count ? from.order[first + i] / kTaps : 0;
      weight[r] = kTaps > 1 && i < count ? C(from.weight_of[first + i]) : C(1);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const unsigned same = __match_any_sync(~0u, point[r]);
      int* const counter = counts + point[r] * kWarps + warp;
      rank[r] = point[r] < 0 ? 0 : *counter + __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (point[r] >= 0 && lane == __ffs(static_cast<int>(same)) - 1) *counter += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    sum_counts(lane, warp);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (point[r] < 0) continue;
      const int to = counts[point[r] * kWarps + warp] + rank[r];
      terms[to] = {place[r], weight[r]};
      if constexpr (kTaps > 1) binned[to] = static_cast<uint16_t>((warp * kRounds + r) * 32 + lane);
    }
    if (threadIdx.x < kPoints) {
      const int own = size(threadIdx.x);
      int before = 0;
      for (int n = 0; n < kPoints; ++n) {
        const int other = size(n);
        before += other > own || (other == own && n < static_cast<int>(threadIdx.x));
      }
      points[before] = threadIdx.x;
    }
    __syncthreads();
  }

 private:
  // Replaces the counts by the sums of those before.
  __device__ void sum_counts(int lane, int warp) {
    constexpr int kEach = kCounts / kSumThreads;
    static_assert(kCounts % kSumThreads == 0, "threads have equally many counts");
    int own[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own[i] = counts[threadIdx.x * kEach + i], sum += own[i];
    const int end = warp_prefix_sum(sum);
    if (lane == 31) of_warps[warp] = end;
    __syncthreads();
    int before = end - sum;
    for (int w = 0; w < warp; ++w) before += of_warps[w];
#pragma unroll
    for (int i = 0; i < kEach; ++i) counts[threadIdx.x * kEach + i] = before, before += own[i];
    if (threadIdx.x == kSumThreads - 1) counts[kCounts] = before;
  }
};

// Adds up each of kCount values over a team. Then lane l has value l kCount / kLanes, or kCount / kLanes of them from
// l kCount / kLanes on.
template <int kLanes, int kCount, typename C>
__device__ __forceinline__ void share_sums(C (&values)[kCount], int lane) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kLanes > 1 && kCount > 1) {
    const bool upper = lane & (kLanes / 2);
    C kept[kHalf];
#pragma unroll
    for (int b = 0; b < kHalf; ++b) {
      const C sent = upper ? values[b] : values[b + kHalf];
      kept[b] = (upper ? values[b + kHalf] : values[b]) + __shfl_xor_sync(~0u, sent, kLanes / 2);
    }
    share_sums<kLanes / 2>(kept, lane);
#pragma unroll
    for (int b = 0; b < kHalf; ++b) values[b] = kept[b];
  } else if constexpr (kLanes > 1) {
    values[0] = team_sum<kLanes>(values[0]);
  }
}

// TileOfPoints has packs of the points of a range in shared memory, so that rows of features and of the gradient are
// read and written along points. Packs of a point are swapped, so that few banks conflict.
template <int kPoints, int kPacks, typename T>
struct TileOfPoints {
  static constexpr int N = kPackWidth<T>, kSwapped = kPacks < 8 ? kPacks : 8;
  Pack<T, N> packs[kPoints][kPacks];

  __device__ Pack<T, N>& at(int point, int pack) { return packs[point][pack ^ (point % kSwapped)]; }

  // Calls f(element, offset in the rows, whether there is such a channel) for a thread's elements; its neighbours have
  // neighbouring points.
  template <typename F>
  __device__ void for_elements(int64_t stride, int channels, int points, const F& f) {
#pragma unroll
    for (int i = 0; i < kPoints * kPacks / kSumThreads; ++i) {
      const int place = i * kSumThreads + static_cast<int>(threadIdx.x), n = place % kPoints, p = place / kPoints;
      if (n >= points) continue;
      Pack<T, N> pack = at(n, p);
#pragma unroll
      for (int c = 0; c < N; ++c) f(pack.values[c], (p * N + c) * stride + n, p * N + c < channels);
      at(n, p) = pack;
    }
  }
};

template <int kTaps, int kLanes, typename T>
__global__ void __launch_bounds__(kSumThreads, sizeof(T) == 8 ? 2 : 4) sum_kernel(SumTask<T> task) {
  using C = Compute<T>;
  constexpr int N = kPackWidth<T>, kOfLane = kSumChannels / N, kTeams = kSumThreads / kLanes, kWarps = kSumThreads / 32;
  constexpr int kPoints = SumSizes::points_of_range(kLanes * kSumChannels, sizeof(T)), kPacks = kLanes * kOfLane;
  constexpr int kMost = std::min(sizeof(T) == 8 ? 256 : 1024, 16 * kPoints);  // terms that a block sorts at once
  constexpr int kBatch = sizeof(T) == 2 ? 4 : 2;                              // terms of a team at once
  using Numbers = C[kOfLane][N];
  __shared__ __align__(16) Numbers totals[kPoints][kLanes];
  __shared__ TileOfPoints<kPoints, kPacks, T> tile;
  __shared__ RangeTerms<kTaps, kPoints, kMost, T> range;
  __shared__ Numbers shares[kWarps][kLanes];
  __shared__ int longs, long_points[kPoints];
  const GatherSizes& all = task.all;
  const BinnedTerms<T>& binned = task.binned;
  const int64_t item = task.packed.first + blockIdx.x / task.ranges;
  const int64_t first = blockIdx.x % task.ranges * kPoints;
  const int64_t list = item / task.packed.groups(), group = item % task.packed.groups();
  const int64_t channel = group * task.packed.group_channels;
  const int channels = static_cast<int>(min(all.channels - channel, int64_t{task.packed.group_channels}));
  const int points = static_cast<int>(min(all.points - first, int64_t{kPoints})), width = task.packed.width(group);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, team = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t at = (list * all.channels + channel) * all.points + first, bin = first / binned.bin_points;
  const T* const from = task.packed.item(item);
  // Pack k of a lane is number k kLanes + lane of a place. Lanes beyond the item's width read nothing.
  const auto pack_of = [&](int k) { return k * kLanes + lane; };

  // Adds kBatch terms, from i on and `step` apart, as far as they are below last, or all if kAll.
  const auto add_batch = [&](auto all_there, Numbers& sums, const Numbers& own, int i, int last, int step) {
    constexpr bool kAll = all_there;
    Pack<T, N> taken[kBatch][kOfLane];
    C weights[kBatch], of_term[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool inside = kAll || i + b * step < last;
      const auto term = range.terms[inside ? i + b * step : 0];
      weights[b] = term.weight;
      const T* const row = from + int64_t{term.place} * width + lane * N;
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        taken[b][k] = {};
        if (inside && pack_of(k) * N < width) taken[b][k] = load<N>(row + k * kLanes * N);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      of_term[b] = 0;
      unrolled<kOfLane, N>([&](int k, int c) {
        const C d = C(taken[b][k].values[c]);
        sums[k][c] += kTaps > 1 ? weights[b] * d : d;
        if (kTaps > 1) of_term[b] += own[k][c] * d;
      });
    }
    if constexpr (kTaps > 1) {
      constexpr int kEach = kBatch > kLanes ? kBatch / kLanes : 1, kSame = kLanes > kBatch ? kLanes / kBatch : 1;
      share_sums<kLanes>(of_term, lane);
#pragma unroll
      for (int b = 0; b < kEach; ++b) {
        const int at_term = i + (lane / kSame * kEach + b) * step;
        if (lane % kSame == 0 && (kAll || at_term < last)) range.products[range.binned[at_term]] = of_term[b];
      }
    }
  };
  // Adds terms i, i + step, ... below last, of the sorted ones. All lanes of a warp call this.
  const auto add = [&](Numbers& sums, int n, int i, int last, int step) {
    Numbers own = {};
    if constexpr (kTaps > 1)
      unrolled<kOfLane, N>([&](int k, int c) { own[k][c] = C(tile.at(n, pack_of(k)).values[c]); });
    for (; __all_sync(~0u, i + (kBatch - 1) * step < last); i += kBatch * step)
      add_batch(Constant<1>{}, sums, own, i, last, step);
    for (; __any_sync(~0u, i < last); i += kBatch * step) add_batch(Constant<0>{}, sums, own, i, last, step);
  };

  if constexpr (kTaps > 1)
    tile.for_elements(all.points, channels, points,
                      [&](T& x, int64_t i, bool inside) { x = inside ? task.features[at + i] : T(0.0f); });
  for (int i = threadIdx.x; i < kPoints * kLanes; i += kSumThreads)
    unrolled<kOfLane, N>([&](int k, int c) { totals[i / kLanes][i % kLanes][k][c] = 0; });
  const int64_t of_list = list * binned.terms, end = of_list + binned.begin(list, bin + 1);
#pragma unroll 1
  for (int64_t begin = of_list + binned.begin(list, bin); begin < end; begin += kMost) {
    const int count = static_cast<int>(min(end - begin, int64_t{kMost}));
    if (threadIdx.x == 0) longs = 0;
    range.sort(binned, begin, count, first);
#pragma unroll 1
    for (int k = team; k < kPoints; k += kTeams) {
      const int n = range.points[k], i = range.begin(n), size = range.size(n);
      const bool is_long = size > kLongSum;
      if (is_long && lane == 0) long_points[atomicAdd(&longs, 1)] = n;
      Numbers of_point;
      memcpy(of_point, totals[n][lane], sizeof of_point);
      add(of_point, n, i, i + (is_long ? 0 : size), 1);
      memcpy(totals[n][lane], of_point, sizeof of_point);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < longs; ++i) {
      const int n = long_points[i];
      Numbers sums = {};
      add(sums, n, range.begin(n) + team, range.begin(n + 1), kTeams);
      unrolled<kOfLane, N>([&](int k, int c) {
        sums[k][c] = team_sum<32, kLanes>(sums[k][c]);
        if (threadIdx.x % 32 < kLanes) shares[threadIdx.x / 32][lane][k][c] = sums[k][c];
      });
      __syncthreads();
      if (threadIdx.x < kLanes)
        for (int w = 0; w < kWarps; ++w)
          unrolled<kOfLane, N>([&](int k, int c) { totals[n][lane][k][c] += shares[w][lane][k][c]; });
      __syncthreads();
    }
    // Terms of other ranges are those of other blocks. A group that is not the first one of its slot adds to it.
    if constexpr (kTaps > 1) {
      C* const products = task.partial + group % task.slots * all.lists * binned.terms + begin;
      for (int i = threadIdx.x; i < count; i += kSumThreads) {
        const int64_t n = binned.point_of[begin + i] - first;
        if (0 <= n && n < kPoints) products[i] = (group < task.slots ? C(0) : products[i]) + range.products[i];
      }
    }
    __syncthreads();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kPoints * kLanes; i += kSumThreads) {
    const int n = i / kLanes;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) tile.at(n, k * kLanes + i % kLanes) = rounded_pack<T>(totals[n][i % kLanes][k]);
  }
  __syncthreads();
  tile.for_elements(all.points, channels, points, [&](const T& x, int64_t i, bool inside) {
    if (inside) task.out[at + i] = x;
  });
}

// Adds up an element of the weights' gradient over the slots. Index i is that of a binned term.
template <typename T>
struct WeightTotals {
  BinnedTerms<T> binned;
  int64_t slots;
  const Compute<T>* partial;
  T* dweight;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const I terms = static_cast<I>(binned.terms), list = i / terms;
    if (static_cast<int64_t>(i - list * terms) >= binned.begin(list, binned.bins)) return;  // out of range
    Sum<T> sum;
    for (int64_t s = 0; s < slots; ++s) sum += partial[s * binned.lists * binned.terms + static_cast<int64_t>(i)];
    assign(dweight[int64_t{list} * terms + binned.order[i]], sum.total());
  }
};

// Computes the gradient of the features and, if there are several taps, that of the weights. `scratch` begins at a
// pack.
template <int kTaps, typename T>
void sum_sorted(Call& call, const GatherSizes& all, const SumSizes& sizes, const T* dout, Indices index,
                const T* weight, void* scratch, T* out, const WeightGradient<T>& weights) {
  const int64_t items = all.lists * sizes.groups, terms = all.lists * all.places * kTaps;
  T* const packs = static_cast<T*>(scratch);
  SumTask<T> task{all,
                  {packs, all.channels, all.places, static_cast<int>(sizes.group_channels)},
                  bin_terms<kTaps>(call, all, sizes, index, weight, packs + sizes.packed_elements()),
                  weights.features,
                  out,
                  weights.partial,
                  (all.points + sizes.range_points - 1) / sizes.range_points,
                  sizes.slots};
  for (int64_t& first = task.packed.first; first < items; first += sizes.items) {
    const int64_t count = std::min(sizes.items, items - first);
    pack_rows(call, task.packed, dout, count);
    const auto kernel = sizes.group_channels == kFewChannels ? sum_kernel<kTaps, 2, T> : sum_kernel<kTaps, 8, T>;
    launch(call, kernel, count * task.ranges, kSumThreads, 0, task);
  }
  if constexpr (kTaps > 1) {
    cudaMemsetAsync(weights.dweight, 0, terms * sizeof(T), call.stream());  // for indices that are out of range
    on_gpu(call, terms, terms, WeightTotals<T>{task.binned, sizes.slots, weights.partial, weights.dweight});
  }
}

}  // namespace msops::gather
