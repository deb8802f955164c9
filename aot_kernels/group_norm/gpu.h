// The phases on the GPU. A block works on a slab: the channels of some whole groups, or some channels of one group, at
// a range of positions. Its threads keep the slab in shared memory, where it fits, each thread its own packs.
//
//   groups                          launches              why
//   that fit a block                one                   the slab is read once
//   that fit a cluster, from sm_90  one                   so is it, and a few groups occupy all multiprocessors
//   longer, or a few before sm_90   one for each phase    any number of blocks shares a group
//
// A phase ends at a barrier of the block or of the cluster, or with its launch. What blocks tell each other is in
// `partial`, which has the order of the parts: no sum depends on which block comes first.
#pragma once

#include "../common/launch.h"
#include "../common/pack.h"
#include "../common/rows.h"
#include "problem.h"
#ifdef __CUDACC__
#include "../common/gpu/cluster.h"
#include "../common/gpu/cp_async.h"

namespace msops::group_norm {

constexpr int kMostThreads = 512;

// Layout says how slabs tile a tensor, and how threads share a slab. An item is a channel or, with the channels last, a
// pack of them. The lanes of an item are the threads that share it: `neighbours` of them, up to a warp, have neighbours
// in memory and add up by shuffles; there are `lanes / neighbours` such teams.
struct Layout {
  int64_t together;                      // groups of a slab; 1 if a group is cut into chunks
  int64_t bundles;                       // of such groups, in a sample
  int64_t chunks;                        // of the channels of a group
  int64_t width;                         // channels of the largest slab
  int64_t steps;                         // of all positions: packs of neighbours or, with the channels last, positions
  int64_t cuts;                          // ranges of steps
  int lanes, neighbours, threads, held;  // held: packs that a thread keeps, or 0

  MSOPS_BOTH int64_t parts() const { return chunks * cuts; }
};

template <typename T, int N, bool kLast, bool kBackward>
struct Slab {
  using C = Compute<T>;
  static constexpr int kSums = kLast ? N : 1;  // channels of an item
  const Problem<T>& p;
  const Layout& layout;
  int64_t sample, first_group, first, part, cut, begin;  // first: channel, begin: step
  int groups, channels, of_group, items, steps;          // of_group: channels of a group that are in the slab

  __device__ Slab(const Problem<T>& problem, const Layout& of, int64_t number) : p(problem), layout(of) {
    const int64_t parts = of.chunks * of.cuts, bundle = number / parts % of.bundles;
    part = number % parts, cut = part % of.cuts, sample = number / parts / of.bundles;
    const int64_t chunk = part / of.cuts;
    first_group = bundle * of.together;
    groups = static_cast<int>(p.groups - first_group < of.together ? p.groups - first_group : of.together);
    const int64_t packs = p.of_group / kSums;  // a chunk is of whole packs
    const int64_t from = of.chunks > 1 ? part_begin(packs, chunk, of.chunks) * kSums : 0;
    const int64_t to = of.chunks > 1 ? part_begin(packs, chunk + 1, of.chunks) * kSums : p.of_group;
    of_group = static_cast<int>(to - from);
    first = first_group * p.of_group + from;
    channels = groups * of_group, items = channels / kSums;
    begin = part_begin(of.steps, cut, of.cuts);
    steps = static_cast<int>(part_begin(of.steps, cut + 1, of.cuts) - begin);
  }

  // Returns the number of elements of each group in the slab.
  __device__ C count() const { return C(of_group) * C(steps) * C(kLast ? 1 : N); }

  // Calls f(item, lane) for the items that this thread shares.
  template <typename F>
  __device__ void each_item(const F& f) const {
    for (int i = static_cast<int>(threadIdx.x); i < items * layout.lanes; i += static_cast<int>(blockDim.x))
      kLast ? f(i % items, i / items) : f(i / layout.lanes, i % layout.lanes);
  }
  // Calls f(offset) for the packs of an item that are this lane's.
  template <typename F>
  __device__ void each_pack(int item, int lane, const F& f) const {
    const int64_t channel = first + item * kSums;
    for (int j = lane; j < steps; j += layout.lanes) {
      const int64_t step = begin + j;
      f(kLast ? (sample * p.positions + step) * p.channels + channel
              : (sample * p.channels + channel) * p.positions + step * N);
    }
  }
};

// Numbers that one block wrote and another reads pass the L1 cache.
template <typename C>
__device__ C read_shared_number(const C* from) {
  return *static_cast<const volatile C*>(from);
}

template <typename C>
__device__ Statistics<C> shuffled_down(const Statistics<C>& s, int distance) {
  const auto of = [=](C number) { return __shfl_down_sync(~0u, number, distance); };
  return {of(s.count), of(s.pivot), of(s.rest), of(s.squares)};
}

// Room is a block's shared memory: the packs that the threads keep, then two sums for each channel of each team, then
// the Groups.
template <typename T, int N>
struct Room {
  using C = Compute<T>;
  Pack<T, N>* packs;
  C* sums;
  Group<C>* groups;

  __device__ Room(unsigned char* bytes, const Layout& layout) {
    groups = reinterpret_cast<Group<C>*>(bytes);
    sums = reinterpret_cast<C*>(bytes + of_groups(layout));
    packs = reinterpret_cast<Pack<T, N>*>(bytes + of_groups(layout) + of_sums(layout));
  }
  static __host__ __device__ int of_groups(const Layout& layout) {
    return static_cast<int>((layout.together * static_cast<int64_t>(sizeof(Group<C>)) + 15) / 16 * 16);
  }
  static __host__ __device__ int of_sums(const Layout& layout) {
    return static_cast<int>((2 * sizeof(C) * layout.width * (layout.lanes / layout.neighbours) + 15) / 16 * 16);
  }
};

template <typename T, int N, bool kLast, bool kBackward>
struct Block {
  using C = Compute<T>;
  using S = Slab<T, N, kLast, kBackward>;
  static constexpr int kSums = S::kSums;
  const Problem<T>& p;
  const Layout& layout;
  const S slab;
  const Room<T, N> room;

  // Loads the slab for all phases, or nothing if the threads do not keep it.
  __device__ void load() const {
    if (layout.held == 0) return;
    int i = static_cast<int>(threadIdx.x);
    slab.each_item([&](int item, int lane) {
      slab.each_pack(item, lane, [&](int64_t at) {
        copy(room.packs + i, p.x + at);
        if constexpr (kBackward) copy(room.packs + i + layout.held * blockDim.x, p.dy + at);
        i += static_cast<int>(blockDim.x);
      });
    });
    cp_async_commit();
    cp_async_wait_all();
  }
  static __device__ void copy(Pack<T, N>* to, const T* from) {
    if constexpr (sizeof(Pack<T, N>) == 16) {
      cp_async<16>(to, from);
    } else {
      *to = msops::load<N>(from);
    }
  }

  // Calls f(item, offset, pack of x, pack of dy) for this thread's packs, before(item) and after(item, lane) each item.
  template <typename Before, typename F, typename After>
  __device__ void each_pack(const Before& before, const F& f, const After& after) const {
    int i = static_cast<int>(threadIdx.x);
    slab.each_item([&](int item, int lane) {
      before(item);
      slab.each_pack(item, lane, [&](int64_t at) {
        Pack<T, N> packs[2] = {};
        if (layout.held) {
          packs[0] = room.packs[i];
          if constexpr (kBackward) packs[1] = room.packs[i + layout.held * blockDim.x];
        } else {
          packs[0] = msops::load<N>(p.x + at);
          if constexpr (kBackward) packs[1] = msops::load<N>(p.dy + at);
        }
        i += static_cast<int>(blockDim.x);
        f(at, packs[0], packs[1]);
      });
      after(item, lane);
    });
  }

  // Leaves two sums for each channel of the slab in room.sums: those of f(channel of the item, x, dy, sums).
  template <typename Before, typename F>
  __device__ void sum(const Before& before, const F& f) const {
    C sums[kSums][2];
    __syncthreads();  // before the sums are written again
    each_pack(
        [&](int item) {
          for (auto& of : sums) of[0] = of[1] = 0;
          before(item);
        },
        [&](int64_t, const Pack<T, N>& x, const Pack<T, N>& dy) {
          for (int k = 0; k < N; ++k) f(kLast ? k : 0, C(x.values[k]), C(dy.values[k]), sums[kLast ? k : 0]);
        },
        [&](int item, int lane) {
          const int team = lane / layout.neighbours;
          if constexpr (!kLast) {
            const unsigned rest = threadIdx.x % 32 & ~(layout.neighbours - 1u);
            const unsigned mask = (~0u >> (32 - layout.neighbours)) << rest;
            for (int distance = layout.neighbours / 2; distance > 0; distance /= 2)
              for (C& sum : sums[0]) sum += __shfl_xor_sync(mask, sum, distance);
            if (lane % layout.neighbours != 0) return;
          }
          for (int k = 0; k < kSums; ++k)
            for (int s = 0; s < 2; ++s) room.sums[2 * (team * slab.channels + item * kSums + k) + s] = sums[k][s];
        });
    __syncthreads();
    const int teams = layout.lanes / layout.neighbours;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * slab.channels; i += static_cast<int>(blockDim.x)) {
      C total = room.sums[i];
      for (int t = 1; t < teams; ++t) total += room.sums[t * 2 * slab.channels + i];
      room.sums[i] = total;
    }
    __syncthreads();
  }

  // Calls f(group of the slab, lane) by a warp for each group.
  template <typename F>
  __device__ void each_group(const F& f) const {
    const int warps = static_cast<int>(blockDim.x) / 32;
    for (int g = static_cast<int>(threadIdx.x) / 32; g < slab.groups; g += warps)
      f(g, static_cast<int>(threadIdx.x) % 32);
  }
  // Returns the two sums of a group over the slab's channels, to all lanes of a warp.
  __device__ void sums_of_group(int g, int lane, C (&totals)[2]) const {
    totals[0] = totals[1] = 0;
    for (int c = lane; c < slab.of_group; c += 32)
      for (int s = 0; s < 2; ++s) totals[s] += room.sums[2 * (g * slab.of_group + c) + s];
    add_lanes(totals);
  }
  static __device__ void add_lanes(C (&totals)[2]) {
    for (int distance = 16; distance > 0; distance /= 2)
      for (C& total : totals) total += __shfl_xor_sync(~0u, total, distance);
  }
  __device__ int64_t group_of(int g) const { return slab.sample * p.groups + slab.first_group + g; }

  // Phase 1: writes the Statistics of the slab's part of each group.
  __device__ void take_statistics() const {
    sum([](int) {}, [](int, C x, C, C(&sums)[2]) { sums[0] += x; });
    each_group([&](int g, int lane) {
      C totals[2];
      sums_of_group(g, lane, totals);
      if (lane == 0) room.groups[g].pivot = totals[0] / slab.count();
    });
    __syncthreads();
    C pivots[kSums];
    sum(
        [&](int item) {
          for (int k = 0; k < kSums; ++k) pivots[k] = room.groups[group_in_slab(item, k)].pivot;
        },
        [&](int k, C x, C, C(&sums)[2]) {
          const C d = x - pivots[k];
          sums[0] += d, sums[1] += d * d;
        });
    each_group([&](int g, int lane) {
      C totals[2];
      sums_of_group(g, lane, totals);
      if (lane != 0) return;
      const auto part = Statistics<C>::of(slab.count(), room.groups[g].pivot, totals[0], totals[1]);
      C* const to = p.record(slab.part, group_of(g));
      to[0] = part.count, to[1] = part.pivot, to[2] = part.rest, to[3] = part.squares;
    });
  }
  __device__ int group_in_slab(int item, int k) const { return (item * kSums + k) / slab.of_group; }

  // Makes the Groups of the slab out of the Statistics of all parts.
  __device__ void combine_statistics() const {
    __syncthreads();
    each_group([&](int g, int lane) {
      Statistics<C> all{};
      for (int64_t part = lane; part < layout.parts(); part += 32) {
        const C* const from = p.record(part, group_of(g));
        const auto number = [&](int k) { return read_shared_number(from + k); };
        all = Statistics<C>::combine(all, {number(0), number(1), number(2), number(3)});
      }
      for (int distance = 16; distance > 0; distance /= 2)
        all = Statistics<C>::combine(all, shuffled_down(all, distance));
      if (lane == 0) room.groups[g] = Group<C>::of(all, p.eps);
    });
    __syncthreads();
  }

  __device__ Channel<T> channel_of(int item, int k) const {
    const int64_t c = slab.first + item * kSums + k;
    return {room.groups[group_in_slab(item, k)], p.weight[c], p.bias[c]};
  }
  __device__ void take_channels(int item, Channel<T> (&channels)[kSums]) const {
    for (int k = 0; k < kSums; ++k) channels[k] = channel_of(item, k);
  }

  // Phase 2: writes the sums of dz xhat and of dz of each channel.
  template <bool kSilu>
  __device__ void take_sums() const {
    Channel<T> channels[kSums];
    sum([&](int item) { take_channels(item, channels); },
        [&](int k, C x, C dy, C(&sums)[2]) {
          const C xhat = channels[k].normal(x), dz = channels[k].template dz<kSilu>(xhat, dy);
          sums[0] += dz * xhat, sums[1] += dz;
        });
    C* const to = p.sums(slab.cut, slab.sample) + slab.first;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * slab.channels; i += static_cast<int>(blockDim.x))
      to[i % 2 * p.channels + i / 2] = room.sums[i];
  }

  // Adds mean(g) and mean(g xhat) to the Groups of the slab.
  __device__ void combine_sums() const {
    __syncthreads();
    each_group([&](int g, int lane) {
      const int64_t first = (slab.first_group + g) * p.of_group;
      C totals[2] = {};
      for (int64_t i = lane; i < layout.cuts * p.of_group; i += 32) {
        const int64_t c = first + i % p.of_group;
        const C* const from = p.sums(i / p.of_group, slab.sample) + c;
        const C weight = p.weight[c];
        totals[0] += weight * read_shared_number(from), totals[1] += weight * read_shared_number(from + p.channels);
      }
      add_lanes(totals);
      const C n = C(p.of_all());
      if (lane == 0) room.groups[g].along = totals[0] / n, room.groups[g].mean = totals[1] / n;
    });
    __syncthreads();
  }

  // Phase 3: writes y or dx.
  template <bool kSilu>
  __device__ void map() const {
    Channel<T> channels[kSums];
    each_pack([&](int item) { take_channels(item, channels); },
              [&](int64_t at, const Pack<T, N>& x, const Pack<T, N>& dy) {
                Pack<T, N> out;
                for (int k = 0; k < N; ++k) {
                  const Channel<T>& channel = channels[kLast ? k : 0];
                  const C v = C(x.values[k]);
                  if constexpr (kBackward) {
                    out.values[k] = T(channel.template dx<kSilu>(v, C(dy.values[k])));
                  } else {
                    out.values[k] = T(channel.template y<kSilu>(v));
                  }
                }
                store_at_once(p.out + at, out);
              },
              [](int, int) {});
  }
};

// Runs the phases from `first` on, before `last`.
template <typename T, int N, bool kLast, bool kBackward>
__global__ void __launch_bounds__(kMostThreads)
    group_norm_kernel(Problem<T> p, Layout layout, int64_t slabs, int first, int last) {
  extern __shared__ __align__(16) unsigned char bytes[];
  for (int64_t number = blockIdx.x; number < slabs; number += gridDim.x) {
    const Block<T, N, kLast, kBackward> block{p, layout, {p, layout, number}, {bytes, layout}};
    const auto barrier = [&] { layout.parts() > 1 ? cluster_arrive_wait() : __syncthreads(); };
    __syncthreads();
    block.load();
    if (first <= 1) block.take_statistics();
    if (last == 2) continue;
    if (first <= 1) barrier();
    block.combine_statistics();
    if constexpr (kBackward) {
      if (first <= 2) p.silu ? block.template take_sums<true>() : block.template take_sums<false>();
      if (last == 3) continue;
      if (first <= 2) barrier();
      block.combine_sums();
    }
    p.silu ? block.template map<true>() : block.template map<false>();
  }
}

template <typename T, int N, bool kLast, bool kBackward>
class Launcher {
 public:
  Launcher(Call& call, const Problem<T>& p) : call_(call), p_(p) {}

  // Returns how many cuts of the positions have sums.
  int64_t launch() {
    const int64_t slabs = tile(), most = std::max<int64_t>(1, std::min(p_.parts / layout_.chunks, layout_.steps));
    const int64_t elements = layout_.width * p_.positions, enough = (elements + kFew - 1) / kFew;
    if (const int blocks = layout_.chunks > 1 ? 0 : blocks_of_group(slabs, std::min(most, enough))) {
      const int bytes = share(blocks);
      run(slabs, bytes, 1, 4, blocks > 1);
      return blocks;
    }
    int64_t cuts = std::min({most, enough, (4 * gpu_.multiprocessors + slabs - 1) / slabs});
    while (share(cuts) > kShared && cuts < most) cuts = std::min(most, 2 * cuts);
    int bytes = share(cuts);
    if (bytes > kShared) layout_.held = 0, bytes = own_bytes();
    for (int phase = 1; phase <= 3; ++phase)
      if (kBackward || phase != 2) run(slabs, bytes, phase, phase + 1, false);
    return layout_.cuts;
  }

 private:
  static constexpr int kSums = kLast ? N : 1;
  static constexpr int64_t kFew = 4096;      // elements, for which another block does not pay
  static constexpr int kShared = 72 * 1024;  // bytes of a block, with which three of them share a multiprocessor
  static constexpr int64_t kLine = 64;       // bytes of neighbours that a slab has at least
  static constexpr int kWanted = 256;        // threads

  // Chooses the channels of a slab, and returns how many slabs there are if positions are not cut.
  int64_t tile() {
    const int64_t unit = unit_of(p_), whole = kMostChannels / p_.of_group / unit * unit;
    int64_t together = std::max(unit, (kFew - 1) / (p_.of_group * p_.positions) + 1);
    if (kLast) together = std::max(together, (kLine / static_cast<int64_t>(sizeof(T)) - 1) / p_.of_group + 1);
    together = std::max<int64_t>(1, std::min((together + unit - 1) / unit * unit, whole));
    layout_.together = std::min(together, p_.groups);
    layout_.bundles = (p_.groups - 1) / layout_.together + 1;
    layout_.chunks = chunks_of(p_);
    layout_.width = (layout_.together * p_.of_group / kSums - 1) / layout_.chunks * kSums + kSums;
    layout_.steps = kLast ? p_.positions : p_.positions / N;
    return p_.samples * layout_.bundles * layout_.chunks;
  }

  // Cuts the positions, and shares a slab among threads. Returns the bytes of a block that keeps the slab.
  int share(int64_t cuts) {
    const int64_t items = layout_.width / kSums, steps = (layout_.steps - 1) / cuts + 1;
    layout_.cuts = cuts, layout_.neighbours = 1;
    while (!kLast && layout_.neighbours < std::min<int64_t>(32, steps)) layout_.neighbours *= 2;
    const int64_t most = (steps - 1) / layout_.neighbours + 1, fit = kWanted / (items * layout_.neighbours);
    layout_.lanes = layout_.neighbours * static_cast<int>(std::max<int64_t>(1, std::min(most, fit)));
    const int64_t busy = (items * layout_.lanes + 31) / 32 * 32;
    layout_.threads = static_cast<int>(std::min<int64_t>(kMostThreads, busy));
    const int64_t held = ((busy - 1) / layout_.threads + 1) * ((steps - 1) / layout_.lanes + 1);
    const int64_t bytes = held * layout_.threads * static_cast<int64_t>(sizeof(Pack<T, N>)) * (kBackward ? 2 : 1);
    layout_.held = static_cast<int>(std::min<int64_t>(held, INT32_MAX));
    return static_cast<int>(std::min<int64_t>(bytes + own_bytes(), INT32_MAX));
  }
  int own_bytes() const { return Room<T, N>::of_groups(layout_) + Room<T, N>::of_sums(layout_); }

  // Returns how many blocks share a group for all phases, or 0 if the phases need launches of their own.
  int blocks_of_group(int64_t slabs, int64_t most) {
    int found = 0;
    for (int blocks = 1; blocks <= 16; blocks *= 2) {
      if (blocks > 1 && (blocks > most || blocks > most_in_cluster())) break;
      const int bytes = share(blocks);
      if (bytes > gpu_.dynamic_bytes()) continue;
      found = blocks;
      if (bytes <= kShared && slabs * blocks >= gpu_.multiprocessors) break;
    }
    return found > 0 && slabs * found * 2 < gpu_.multiprocessors && most > found ? 0 : found;
  }
  int most_in_cluster() {
    const auto kernel = group_norm_kernel<T, N, kLast, kBackward>;
    [[maybe_unused]] static FactOfGpu<> fact;
    return fact.get([&] {
      if (!is_compiled_for(90, kernel)) return 1;
      for (const int blocks : {16, 8})
        if (clusters_at_once(kernel, Grid(blocks).in_clusters(blocks), kMostThreads, gpu_.dynamic_bytes()) > 0)
          return blocks;
      return 1;
    });
  }

  void run(int64_t slabs, int bytes, int first, int last, bool in_cluster) {
    const int64_t all = slabs * layout_.cuts, most = (int64_t{1} << 30) / layout_.cuts * layout_.cuts;
    const Grid grid(std::min(all, most));
    msops::launch(call_, group_norm_kernel<T, N, kLast, kBackward>,
                  in_cluster ? grid.in_clusters(static_cast<unsigned>(layout_.cuts)) : grid, layout_.threads, bytes, p_,
                  layout_, all, first, last);
  }

 public:
  // Returns how many groups have whole packs.
  static int64_t unit_of(const Problem<T>& p) {
    int64_t unit = 1;
    while (unit * p.of_group % kSums != 0) ++unit;
    return unit;
  }
  static int64_t chunks_of(const Problem<T>& p) { return (p.of_group - 1) / kMostChannels + 1; }

  // Returns whether packs of N tile the tensors' neighbours, and the slabs.
  static bool fits(const Problem<T>& p) {
    const T* const arrays[] = {p.x, p.dy, p.out};
    for (const T* array : arrays)
      if (!is_aligned<N>(array)) return false;
    if (!kLast) return p.positions % N == 0;
    return p.channels % N == 0 && (p.of_group % N == 0 || unit_of(p) * p.of_group <= kMostChannels);
  }

 private:
  Call& call_;
  const Problem<T>& p_;
  const Gpu gpu_;
  Layout layout_{};
};

template <typename T, bool kLast, bool kBackward>
int64_t launch_phases(Call& call, const Problem<T>& p) {
  if constexpr (kMovesPacks<T>) {
    using Wide = Launcher<T, kPackWidth<T>, kLast, kBackward>;
    if (Wide::fits(p)) return Wide(call, p).launch();
  }
  return Launcher<T, 1, kLast, kBackward>(call, p).launch();
}

}  // namespace msops::group_norm
#endif
