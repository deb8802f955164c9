// The kernel on the GPU. A slab is some whole groups, or some channels of one long group. It has parts: chunks of its
// channels and cuts of its positions. A block takes one part of slab after slab; layout.h says which.
//
//   statistics   each thread adds up its packs, teams add up by shuffles, a warp combines the teams of a group
//   sums         so are those of dz xhat and dz added up, for each channel and, weighted, for each group
//   map          each thread writes y or dx of its packs
//
// Where one launch has all phases, a block keeps its parts of several slabs in shared memory, in as many stages. Each
// thread copies what it reads itself, and begins to copy a pack of a later slab as soon as it has read the last of a
// stage's pack. The blocks of a cluster tell each other their statistics and sums through shared memory. None waits
// idly, if there are two stages: a block adds up the next slab's statistics while the others' sums of this slab arrive,
// and maps this slab while the others' statistics of the next arrive. So memory is busy in all phases.
//
// Otherwise each phase is a launch, which reads the tensors again, and blocks tell each other through `partial`. No sum
// depends on which block comes first.
#pragma once

#include "../common/pack.h"
#include "../common/sum.h"
#include "layout.h"
#ifdef __CUDACC__
#include "../common/gpu/cluster.h"
#include "../common/gpu/cp_async.h"
#include "../common/gpu/griddepcontrol.h"

namespace msops::group_norm {

// Sums of dz xhat and dz; those of a group are weighted.
template <typename C>
struct Sums {
  C weighted[2], plain[2];

  static __device__ Sums combine(const Sums& a, const Sums& b) {
    return {{a.weighted[0] + b.weighted[0], a.weighted[1] + b.weighted[1]}, {0, 0}};
  }
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

  // Return what they combine to the first lane.
  template <typename C>
  __device__ Sums<C> combine(Sums<C> own) const {
    add_up(own.weighted);
    return own;
  }
  template <typename C>
  __device__ Statistics<C> combine(const Statistics<C>& own) const {
    if (size == 1) return own;
    C total[2] = {own.count, own.count * own.pivot};
    add_up(total);
    const C count = of_first(total[0]), pivot = of_first(count > 0 ? total[1] / total[0] : C(0));
    const C distance = own.pivot - pivot + own.rest;
    C sums[2] = {own.count * distance, own.squares + own.count * distance * distance};
    add_up(sums);
    return Statistics<C>::of(count, pivot, sums[0], sums[1]);
  }
};

// Room is a block's shared memory: a record for each team and channel or pack, of statistics and of sums, two for each
// group that the cluster's other blocks read, the Groups of two slabs, the stages, and room for half of each dz.
template <typename T, int N>
struct Room {
  using C = Compute<T>;
  using Record = Pack<C, 4>;  // Statistics or Sums
  Record *records, *exchanged;
  Group<C>* groups;
  Pack<T, N>* packs;

  __device__ Room(unsigned char* bytes, const Layout& layout)
      : records(reinterpret_cast<Record*>(bytes)),
        exchanged(records + 2 * layout.records),
        groups(reinterpret_cast<Group<C>*>(exchanged + 2 * layout.together)),
        packs(reinterpret_cast<Pack<T, N>*>(bytes + bytes_of(layout))) {}

  // Returns the bytes that lie before the stages.
  static __host__ __device__ int64_t bytes_of(const Layout& layout) {
    const int64_t bytes = 2 * ((layout.records + layout.together) * int64_t{sizeof(Record)} +
                               layout.together * int64_t{sizeof(Group<C>)});
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

template <typename T, int N, bool kLast, bool kBackward>
class Block {
 public:
  __device__ Block(const Problem<T>& problem, const Layout& of, unsigned char* bytes, int first, int last)
      : p(problem), layout(of), room(bytes, of), first_(first), last_(last) {
    const int thread = static_cast<int>(threadIdx.x), items = layout.width / kSums;
    part_ = static_cast<int>(blockIdx.x % layout.parts());
    const int chunk = part_ / layout.cuts, cut = part_ % layout.cuts;
    const int64_t packs = p.of_group / kSums;  // a chunk is of whole packs
    from_ = layout.chunks > 1 ? part_begin<int64_t>(packs, chunk, layout.chunks) * kSums : 0;
    of_group_ = static_cast<int>(
        layout.chunks > 1 ? part_begin<int64_t>(packs, chunk + 1, layout.chunks) * kSums - from_ : p.of_group);
    begin_ = part_begin<int64_t>(layout.steps, cut, layout.cuts);
    const int64_t steps = part_begin<int64_t>(layout.steps, cut + 1, layout.cuts) - begin_;
    whole_ = !kLast || p.of_group % N == 0;
    if (kLast && items <= 32) {
      const int in_warp = thread % 32;
      team_ = {layout.neighbours, items, in_warp / items};
      item_ = in_warp % items, lane_ = thread / 32 * layout.neighbours + team_.number;
    } else if (kLast) {
      team_ = {1, 1, 0};
      item_ = thread % items, lane_ = thread / items;
    } else {
      item_ = thread / layout.lanes, lane_ = thread % layout.lanes;
      team_ = {layout.neighbours, 1, lane_ % layout.neighbours};
    }
    const bool works = item_ < items && lane_ < layout.lanes && team_.number < layout.neighbours;
    if (!works) item_ = items;  // which no slab has
    packs_ = static_cast<int>(lane_ < steps ? (steps - lane_ - 1) / layout.lanes + 1 : 0);
  }

  // Runs the phases from `first` on, before `last`, for every slab of this block.
  __device__ void run() {
    griddepcontrol_launch_dependents();
    p.silu ? normalize<true>() : normalize<false>();
    if (in_cluster()) cluster_arrive_wait();  // before the block ends, whose shared memory others read
  }

 private:
  using C = Compute<T>;
  using Record = typename Room<T, N>::Record;
  static constexpr int kSums = kLast ? N : 1;  // channels of an item
  static constexpr int kRun = 64;              // packs that share a pivot

  // Slab is this thread's share of a slab; groups count through all samples, as channels do.
  struct Slab {
    int64_t group, channel, sample, at;  // channel: that of this thread's item, `at`: where its packs begin
    int groups, packs;
    Pack<T, N>* stage;     // this thread's packs
    Group<C>* normalized;  // of the slab
  };

  // The block's slabs take turns at the stages.
  __device__ Slab slab(int64_t number, int turn) const {
    const int64_t batch = kLast ? number / layout.bundles : 0, bundle = number - batch * layout.bundles;
    const int64_t all = kLast ? p.groups : p.samples * p.groups, first = bundle * layout.together;
    Slab s;
    s.group = batch * all + first;
    s.groups = static_cast<int>(all - first < layout.together ? all - first : layout.together);
    s.channel = s.group * p.of_group + from_ + (has_item(s) ? item_ * kSums : 0);
    s.packs = has_item(s) && number < layout.slabs ? packs_ : 0;
    s.sample = kLast ? batch : s.channel / p.channels;
    s.at = kLast ? (batch * p.positions + begin_ + lane_) * p.channels + s.channel - batch * p.channels
                 : s.channel * p.positions + (begin_ + lane_) * N;
    const int stage = layout.stages > 0 ? turn % layout.stages : 0;
    s.stage = room.packs + stage * packs_of_stage() + threadIdx.x;
    s.normalized = room.groups + turn % 2 * layout.together;
    return s;
  }
  __device__ int packs_of_tensor() const { return layout.held * layout.threads; }
  __device__ int packs_of_stage() const { return packs_of_tensor() * (kBackward ? 2 : 1); }
  __device__ bool in_cluster() const { return layout.stages > 0 && layout.cuts > 1; }
  __device__ bool has_item(const Slab& s) const { return item_ * kSums < s.groups * of_group_; }
  __device__ int64_t step() const { return layout.lanes * (kLast ? p.channels : N); }  // between a thread's packs
  __device__ Group<C>& group_of(const Slab& s, int k) const {
    return s.normalized[has_item(s) ? (item_ * kSums + k) / of_group_ : 0];
  }

  // Begins to copy this thread's packs of a slab from `begin` on, and ends the slab's group of copies.
  __device__ void load(const Slab& s, int begin) const {
    if (layout.stages == 0) return;
    for (int i = begin; i < s.packs; ++i) load_pack(s, i);
    cp_async_commit();
  }
  __device__ void load_pack(const Slab& s, int i) const {
    Pack<T, N>* const to = s.stage + i * layout.threads;
    copy(to, p.x + s.at + i * step());
    if constexpr (kBackward) copy(to + packs_of_tensor(), p.dy + s.at + i * step());
  }
  static __device__ void copy(Pack<T, N>* to, const T* from) {
    if constexpr (sizeof(Pack<T, N>) >= 4) {
      cp_async<sizeof(Pack<T, N>)>(to, from);
    } else {
      *to = msops::load<N>(from);
    }
  }
  // Waits until the slabs that this thread began to copy have come, except the latest ones.
  static __device__ void wait_for_loads(int except) {
    if (except >= 2) {
      cp_async_wait<2>();
    } else if (except == 1) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
  }

  // Calls f(i, offset, pack of x, pack of dy) for this thread's packs i from `begin` on, before `end`.
  template <typename F>
  __device__ void each_pack(const Slab& s, int begin, int end, const F& f) const {
    int64_t at = s.at + begin * step();
    if (layout.stages > 0) {
      const Pack<T, N>* from = s.stage + begin * layout.threads;
      for (int i = begin; i < end; ++i, at += step(), from += layout.threads)
        f(i, at, from[0], from[kBackward ? packs_of_tensor() : 0]);
    } else {
      for (int i = begin; i < end; ++i, at += step())
        f(i, at, msops::load<N>(p.x + at), msops::load<N>((kBackward ? p.dy : p.x) + at));
    }
  }

  template <bool kSilu>
  __device__ void normalize() {
    const int64_t stride = gridDim.x / layout.parts();
    const bool ahead = layout.stages > 1;  // the next slab's statistics are taken before this one is mapped
    int64_t number = blockIdx.x / layout.parts();
    for (int turn = 0; turn < layout.stages; ++turn) load(slab(number + turn * stride, turn), 0);
    Slab next{};
    for (int turn = 0; number < layout.slabs; ++turn, number += stride) {
      if (turn == 0 || !ahead) {
        next = slab(number, turn);
        add_up_statistics(next, ahead ? layout.stages - 1 : 0);
        share_statistics(next);
        take<Statistics<C>>(next);
      }
      const Slab now = next;
      if (last_ == 2) continue;
      C weights[kSums], biases[kSums];
      for (int k = 0; k < kSums; ++k) {
        const int64_t c = now.channel - now.sample * p.channels + k;
        weights[k] = p.weight[c], biases[k] = p.bias[c];
      }
      const bool has_next = ahead && number + stride < layout.slabs;
      if constexpr (kBackward) add_up_sums<kSilu>(now, weights, biases);
      if (has_next) {
        next = slab(number + stride, turn + 1);
        add_up_statistics(next, layout.stages - 2);
      }
      if constexpr (kBackward) take<Sums<C>>(now);
      if (last_ == 3) continue;
      if (has_next) share_statistics(next);
      map<kSilu>(now, slab(number + layout.stages * stride, turn), weights, biases);
      if (has_next) take<Statistics<C>>(next);
    }
  }

  // Combines n values of each group of the slab, from(group, i), by a warp, and calls to(group, result).
  template <typename V, typename From, typename To>
  __device__ void combine(const Slab& s, int n, const From& from, const To& to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const WarpTeam warp{32, 1, lane};
    for (int g = static_cast<int>(threadIdx.x) / 32; g < s.groups; g += layout.threads / 32) {
      V all{};
#pragma unroll 1
      for (int i = lane; i < n; i += 32) all = V::combine(all, from(g, i));
      all = warp.combine(all);
      if (lane == 0) to(g, all);
    }
  }

  // Combines the n records that this block has of each group. They are for the cluster's other blocks, for `finish`, or
  // for the next launch.
  template <typename V>
  __device__ void share(const Slab& s, int n) {
    const Record* const records = records_of<V>();
    const auto of_team = [&](int g, int i) { return value_of<V>(records[g * n + i]); };
    __syncthreads();
    if (in_cluster()) {
      shared_ = room.exchanged + turn_ * layout.together;
      turn_ ^= 1;
      combine<V>(s, n, of_team, [&](int g, const V& all) { shared_[g] = value_of<Record>(all); });
      __syncwarp();
      cluster_arrive();
    } else if (layout.stages > 0) {
      combine<V>(s, n, of_team, [&](int g, const V& all) { finish(s, g, all); });
    } else {
      combine<V>(s, n, of_team, [&](int g, const V& all) {
        const auto record = value_of<Record>(all);
        C* const to = p.record(part_, s.group + g) + kPlace<V>;
        for (int k = 0; k < kNumbers<V>; ++k) to[k] = record.values[k];
      });
    }
  }
  // Ends what share() began: combines what the cluster's blocks have, or what the launch before left in `partial`.
  template <typename V>
  __device__ void take(const Slab& s) const {
    const auto to = [&](int g, const V& all) { finish(s, g, all); };
    if (is_given<V>()) {
      __syncthreads();
      combine<V>(
          s, layout.parts(),
          [&](int g, int part) {
            const C* const from = p.record(part, s.group + g) + kPlace<V>;
            Record record = {};
            for (int k = 0; k < kNumbers<V>; ++k) record.values[k] = from[k];
            return value_of<V>(record);
          },
          to);
    } else if (in_cluster()) {
      cluster_wait();
      combine<V>(s, layout.cuts, [&](int g, int block) { return value_of<V>(read_shared(shared_ + g, block)); }, to);
    }
    __syncthreads();
  }
  template <typename V>
  static constexpr bool kOfSums = std::is_same<V, Sums<C>>::value;
  template <typename V>
  static constexpr int kPlace = kOfSums<V> ? 4 : 0;  // in a row of `partial`
  template <typename V>
  static constexpr int kNumbers = kOfSums<V> ? 2 : 4;
  template <typename V>
  __device__ Record* records_of() const {
    return room.records + (kOfSums<V> ? layout.records : 0);
  }
  // Returns whether the launch before this one left what is to be combined.
  template <typename V>
  __device__ bool is_given() const {
    return first_ > (kOfSums<V> ? 2 : 1);
  }
  __device__ void finish(const Slab& s, int g, const Statistics<C>& all) const {
    s.normalized[g] = Group<C>::of(all, p.eps);
  }
  __device__ void finish(const Slab& s, int g, const Sums<C>& all) const {
    const C n = C(p.of_all());
    s.normalized[g].along = all.weighted[0] / n, s.normalized[g].mean = all.weighted[1] / n;
  }

  // Makes the teams' statistics of the slab, when its copies have come; `except` later slabs' need not.
  __device__ void add_up_statistics(const Slab& s, int except) const {
    wait_for_loads(except);
    if (is_given<Statistics<C>>()) return;
    Statistics<C> own[kSums] = {};
#pragma unroll 1
    for (int begin = 0; begin < s.packs; begin += kRun) {
      const int end = s.packs - begin < kRun ? s.packs : begin + kRun;
      C pivots[kSums] = {}, sums[kSums][2] = {};
      each_pack(s, begin, begin + 1, [&](int, int64_t, const Pack<T, N>& x, const Pack<T, N>&) {
        C all = 0;
        for (int k = 0; k < N; ++k) all += C(x.values[k]);
        for (int k = 0; k < kSums; ++k) pivots[k] = whole_ ? all / N : C(x.values[k]);
      });
      each_pack(s, begin, end, [&](int, int64_t, const Pack<T, N>& x, const Pack<T, N>&) {
        for (int k = 0; k < N; ++k) {
          const int sum = kLast ? k : 0;
          const C d = C(x.values[k]) - pivots[sum];
          sums[sum][0] += d, sums[sum][1] += d * d;
        }
      });
      if (kLast && whole_)
        for (int k = 1; k < kSums; ++k) sums[0][0] += sums[k][0], sums[0][1] += sums[k][1];
      each_unit([&](int k) {
        const C count = C(end - begin) * C(whole_ ? N : 1);
        own[k] = Statistics<C>::combine(own[k], Statistics<C>::of(count, pivots[k], sums[k][0], sums[k][1]));
      });
    }
    each_unit([&](int k) { put_record(s, item_ * units() + k, team_.combine(own[k])); });
  }
  __device__ void share_statistics(const Slab& s) {
    if (!is_given<Statistics<C>>()) share<Statistics<C>>(s, of_group_ * units() / kSums * layout.teams());
  }
  __device__ int units() const { return whole_ ? 1 : kSums; }  // of an item that have statistics of their own
  // Calls f(k) for the first channel of an item, or for each if they may be of several groups.
  template <typename F>
  __device__ void each_unit(const F& f) const {
#pragma unroll
    for (int k = 0; k < kSums; ++k)
      if (k == 0 || !whole_) f(k);
  }
  // Takes a team's record from its first lane.
  template <typename V>
  __device__ void put_record(const Slab& s, int unit, const V& value) const {
    if (has_item(s) && team_.number == 0)
      records_of<V>()[unit * layout.teams() + lane_ / layout.neighbours] = value_of<Record>(value);
  }

  // Adds up dz xhat and dz of each channel, and begins to share the sums of g.
  template <bool kSilu>
  __device__ void add_up_sums(const Slab& s, const C (&weights)[kSums], const C (&biases)[kSums]) {
    if (is_given<Sums<C>>()) return;
    Channel<T> channels[kSums];
    for (int k = 0; k < kSums; ++k) channels[k] = Channel<T>(group_of(s, k), weights[k], biases[k]);
    C sums[kSums][2] = {};
    each_pack(s, 0, s.packs, [&](int i, int64_t, const Pack<T, N>& x, const Pack<T, N>& dy) {
      C dz[N];
      for (int k = 0; k < N; ++k) {
        const int sum = kLast ? k : 0;
        const C d = C(x.values[k]) - channels[sum].pivot;
        dz[k] = channels[sum].template dz<kSilu>(d, C(dy.values[k]));
        sums[sum][0] += dz[k] * d, sums[sum][1] += dz[k];
      }
      if (kSilu && layout.stages > 0) {
        Pack<T, N> halves[kHalves];
        memcpy(halves, dz, sizeof dz);
        for (int half = 0; half < kHalves; ++half) *half_of_dz(s, i, half) = halves[half];
      }
    });
    for (int k = 0; k < kSums; ++k) {
      team_.add_up(sums[k]);
      const C along = channels[k].sum_along(sums[k][0], sums[k][1]), w = weights[k];
      put_record(s, item_ * kSums + k, Sums<C>{{w * along, w * sums[k][1]}, {along, sums[k][1]}});
    }
    share<Sums<C>>(s, of_group_ * layout.teams());
    if (!p.weight.data && !p.bias.data) return;
    const int all = s.groups * of_group_;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += layout.threads) {
      C totals[2] = {};
      for (int team = 0; team < layout.teams(); ++team) {
        const auto part = value_of<Sums<C>>(records_of<Sums<C>>()[i * layout.teams() + team]);
        totals[0] += part.plain[0], totals[1] += part.plain[1];
      }
      const int64_t channel = s.group * p.of_group + from_ + i, sample = channel / p.channels;
      C* const to = p.sums(part_ % layout.cuts, sample) + channel - sample * p.channels;
      to[0] = totals[0], to[p.channels] = totals[1];
    }
  }
  // With silu, dz is kept, since it takes long to compute: instead of dy and, as Compute<T> may be twice as long as T,
  // in the room for the other half.
  static constexpr int kHalves = sizeof(C) / sizeof(T);
  __device__ Pack<T, N>* half_of_dz(const Slab& s, int i, int half) const {
    Pack<T, N>* const others = room.packs + layout.stages * packs_of_stage() + threadIdx.x;
    return (half == 0 ? s.stage + packs_of_tensor() : others) + i * layout.threads;
  }

  // Writes y or dx, and begins to copy a later slab to where this one was.
  template <bool kSilu>
  __device__ void map(const Slab& s, const Slab& later, const C (&weights)[kSums], const C (&biases)[kSums]) const {
    Channel<T> channels[kSums];
    for (int k = 0; k < kSums; ++k) channels[k] = Channel<T>(group_of(s, k), weights[k], biases[k]);
    each_pack(s, 0, s.packs, [&](int i, int64_t at, const Pack<T, N>& of_x, const Pack<T, N>& of_dy) {
      const Pack<T, N> x = of_x, dy = of_dy;
      [[maybe_unused]] C dz[N];
      if (kBackward && kSilu && layout.stages > 0) {
        Pack<T, N> halves[kHalves] = {dy};
        for (int half = 1; half < kHalves; ++half) halves[half] = *half_of_dz(s, i, half);
        memcpy(dz, halves, sizeof dz);
      } else if (kBackward) {
        for (int k = 0; k < N; ++k) {
          const Channel<T>& channel = channels[kLast ? k : 0];
          dz[k] = channel.template dz<kSilu>(C(x.values[k]) - channel.pivot, C(dy.values[k]));
        }
      }
      if (layout.stages > 0 && i < later.packs) load_pack(later, i);
      C out[N];
      for (int k = 0; k < N; ++k) {
        const Channel<T>& channel = channels[kLast ? k : 0];
        if constexpr (kBackward) {
          out[k] = channel.template dx<false>(C(x.values[k]), dz[k]);
        } else {
          out[k] = channel.template y<kSilu>(C(x.values[k]));
        }
      }
      store_at_once(p.out + at, rounded_pack<T>(out));
    });
    load(later, s.packs);
  }

  const Problem<T>& p;
  const Layout& layout;
  const Room<T, N> room;
  const int first_, last_;
  WarpTeam team_;
  int part_, of_group_, item_, lane_, packs_, turn_ = 0;  // of_group_: channels of a group in this part
  int64_t from_, begin_;                                  // the part's first channel of a group, and step
  bool whole_;                                            // a pack is within one group
  Record* shared_ = nullptr;                              // what share() shares
};

template <typename T, int N, bool kLast, bool kBackward>
__global__ void __launch_bounds__(kMostThreads<T>, 1)
    group_norm_kernel(Problem<T> p, Layout layout, int first, int last) {
  extern __shared__ __align__(32) unsigned char bytes[];
  Block<T, N, kLast, kBackward>(p, layout, bytes, first, last).run();
}

// Gradient is that of the weight or the bias, if there is one; it may be of float where T is not.
template <typename T>
struct Gradient {
  T* data = nullptr;
  float* floats = nullptr;

  explicit Gradient(const Tensor& tensor) {
    if (!tensor.dtype) return;
    with_type<T, float>(tensor, [&](auto type) {
      using Type = typename decltype(type)::type;
      if constexpr (std::is_same<Type, T>::value) {
        data = tensor.as<T>();
      } else {
        floats = tensor.as<float>();
      }
    });
  }
  __device__ void put(int64_t i, Compute<T> value) const {
    if (data) data[i] = T(value);
    if (floats) floats[i] = static_cast<float>(value);
  }
};

// Adds up the sums of each channel over samples and parts: those of dz xhat, and those of dz. A warp's lanes have
// neighbouring columns of `partial`.
template <typename T>
__global__ void __launch_bounds__(256)
    group_norm_sums_kernel(Problem<T> p, int64_t parts, Gradient<T> dweight, Gradient<T> dbias) {
  using C = Compute<T>;
  __shared__ C totals[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  griddepcontrol_wait();
  Sum<C> sum;
  if (column < 2 * p.channels) {
#pragma unroll 4
    for (int64_t i = warp; i < parts * p.samples; i += 8) sum += p.sums(i % parts, i / parts)[column];
  }
  totals[warp][lane] = sum.total();
  __syncthreads();
  if (warp > 0 || column >= 2 * p.channels) return;
  sum = {};
  for (int i = 0; i < 8; ++i) sum += totals[i][lane];
  if (column < p.channels) {
    dweight.put(column, sum.total());
  } else {
    dbias.put(column - p.channels, sum.total());
  }
}

}  // namespace msops::group_norm
#endif
