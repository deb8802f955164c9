// What a block computes of its parts (see gpu.h).
#pragma once

#include "exchange.h"
#ifdef __CUDACC__
#include "../common/gpu/cluster.h"
#include "../common/gpu/cp_async.h"
#include "../common/gpu/griddepcontrol.h"

namespace msops::group_norm {

// kStaged tells whether one launch has all phases.
template <typename T, int N, bool kLast, bool kBackward, bool kStaged>
class Block {
 public:
  __device__ Block(const Problem<T>& problem, const Layout& of, unsigned char* bytes, int part)
      : p(problem), layout(of), room(bytes, of), part_(part) {
    const int thread = static_cast<int>(threadIdx.x), items = layout.width / kSums;
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

  // Runs all phases for every slab of this block.
  __device__ void run() {
    const int64_t stride = gridDim.x / layout.cuts;
    int64_t number = blockIdx.x / layout.cuts;
    for (int stage = 0; stage < layout.stages; ++stage) load(number + stage * stride, stage);
    for (int stage = 0; number < layout.slabs; number += stride) {
      if (layout.stages >= 3) {
        cp_async_wait<2>();
      } else if (layout.stages == 2) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      slab_ = slab(number), stage_ = room.packs + stage * packs_of_stage() + threadIdx.x;
      p.silu ? normalize<true>(3) : normalize<false>(3);
      load(number + layout.stages * stride, stage);
      stage = stage + 1 < layout.stages ? stage + 1 : 0;
    }
    if (layout.cuts > 1) cluster_arrive_wait();  // before the block ends, whose shared memory others read
  }

  // Runs one phase for a slab. Phases 2 and 3 wait for the launch before this one, and load meanwhile.
  __device__ void run(int64_t number, int phase) {
    slab_ = slab(number);
    if (phase == 1) return take_statistics();
    if (slab_.packs > 0) load_batch(ahead_, slab_.at, slab_.packs);
    griddepcontrol_wait();  // in every block, so that phase 3 also sees what phase 1 wrote
    p.silu ? normalize<true>(phase) : normalize<false>(phase);
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
  };

  __device__ Slab slab(int64_t number) const {
    const int64_t batch = kLast ? number / layout.bundles : 0, bundle = number - batch * layout.bundles;
    const int64_t all = kLast ? p.groups : p.samples * p.groups, first = bundle * layout.together;
    Slab s;
    s.group = batch * all + first;
    s.groups = static_cast<int>(all - first < layout.together ? all - first : layout.together);
    const bool has = item_ * kSums < s.groups * of_group_;
    s.packs = has ? packs_ : 0;
    s.channel = s.group * p.of_group + from_ + (has ? item_ * kSums : 0);
    s.sample = kLast ? batch : s.channel / p.channels;
    s.at = kLast ? (batch * p.positions + begin_ + lane_) * p.channels + s.channel - batch * p.channels
                 : s.channel * p.positions + (begin_ + lane_) * N;
    return s;
  }
  __device__ int packs_of_stage() const { return layout.held * layout.threads * (kBackward ? 2 : 1); }
  __device__ bool has_item() const { return item_ * kSums < slab_.groups * of_group_; }
  __device__ int64_t step() const { return layout.lanes * (kLast ? p.channels : N); }  // between a thread's packs
  __device__ int group_of(int k) const { return has_item() ? (item_ * kSums + k) / of_group_ : 0; }

  // Begins to copy this thread's packs of a slab to a stage.
  __device__ void load(int64_t number, int stage) const {
    if (number < layout.slabs) {
      const Slab s = slab(number);
      Pack<T, N>* to = room.packs + stage * packs_of_stage() + threadIdx.x;
      int64_t at = s.at;
      for (int i = 0; i < s.packs; ++i, at += step(), to += layout.threads) {
        copy(to, p.x + at);
        if constexpr (kBackward) copy(to + layout.held * layout.threads, p.dy + at);
      }
    }
    cp_async_commit();
  }
  static __device__ void copy(Pack<T, N>* to, const T* from) {
    if constexpr (sizeof(Pack<T, N>) >= 4) {
      cp_async<sizeof(Pack<T, N>)>(to, from);
    } else {
      *to = msops::load<N>(from);
    }
  }

  // Batch has the packs that a thread loads at once, where phases have launches of their own.
  template <bool kBoth>
  struct Batch {
    static constexpr int kPacks = kBoth ? 2 : 4;
    Pack<T, N> x[kPacks], dy[kPacks];  // dy only if kBoth
  };
  // Loads the first of `left` packs from an offset on; the last pack is loaded again where there are too few.
  template <bool kBoth>
  __device__ void load_batch(Batch<kBoth>& batch, int64_t at, int left) const {
#pragma unroll
    for (int j = 0; j < Batch<kBoth>::kPacks; ++j) {
      batch.x[j] = load_now(p.x + at);
      if constexpr (kBoth) batch.dy[j] = load_now(p.dy + at);
      if (j + 1 < left) at += step();
    }
  }

  // Calls f(is_first, offset, pack of x, pack of dy) for this thread's packs from `begin` on, before `end`. Without
  // kBoth, f gets x in place of dy. With kAhead, `ahead_` has the first packs.
  template <bool kBoth, bool kAhead, typename F>
  __device__ void each_pack(int begin, int end, const F& f) const {
    int64_t at = slab_.at + begin * step();
    if constexpr (kStaged) {
      const Pack<T, N>* from = stage_ + begin * layout.threads;
      for (int i = begin; i < end; ++i, at += step(), from += layout.threads)
        f(i == begin, at, from[0], from[kBoth ? layout.held * layout.threads : 0]);
    } else if (begin < end) {
      Batch<kBoth> batch;
      if constexpr (kAhead) {
        batch = ahead_;
      } else {
        load_batch(batch, at, end - begin);
      }
      for (int i = begin;;) {
#pragma unroll
        for (int j = 0; j < Batch<kBoth>::kPacks; ++j, at += step())
          if (i + j < end) f(j == 0 && i == begin, at, batch.x[j], kBoth ? batch.dy[j] : batch.x[j]);
        i += Batch<kBoth>::kPacks;
        if (i >= end) return;
        load_batch(batch, at, end - i);
      }
    }
  }
  // Loads a pack here, and not where nvcc would rather have it.
  static __device__ Pack<T, N> load_now(const T* from) {
    if constexpr (sizeof(Pack<T, N>) == 16) {
      uint32_t words[4];
      ld_global_v4(words, from);
      return value_of<Pack<T, N>>(words);
    } else {
      return msops::load<N>(from);
    }
  }

  // Computes all phases of the slab or, where each has launches of its own, this one after those before it.
  template <bool kSilu>
  __device__ void normalize(int phase) {
    C weights[kSums], biases[kSums];
    for (int k = 0; k < kSums; ++k) {
      const int64_t c = slab_.channel - slab_.sample * p.channels + k;
      weights[k] = p.weight[c], biases[k] = p.bias[c];
    }
    if constexpr (kStaged) {
      take_statistics();
    } else {
      gather_records<Statistics<C>>(finish_statistics());
      if (kBackward && phase == 3) gather_records<Sums<C>>(finish_sums());
      __syncthreads();
    }
    Channel<T> channels[kSums];
    for (int k = 0; k < kSums; ++k) channels[k] = Channel<T>(room.groups[group_of(k)], weights[k], biases[k]);
    if constexpr (kBackward) {
      if (kStaged || phase == 2) take_sums<kSilu>(channels, weights);
      if (phase == 2) return;
      if (kStaged)
        for (int k = 0; k < kSums; ++k) channels[k].take_means(room.groups[group_of(k)]);
    }
    each_pack<kBackward, true>(0, slab_.packs, [&](bool, int64_t at, const Pack<T, N>& x, const Pack<T, N>& dy) {
      C out[N];
      for (int k = 0; k < N; ++k) {
        const Channel<T>& channel = channels[kLast ? k : 0];
        if constexpr (kBackward) {
          out[k] = channel.template dx<kSilu>(C(x.values[k]), C(dy.values[k]));
        } else {
          out[k] = channel.template y<kSilu>(C(x.values[k]));
        }
      }
      store_at_once(p.out + at, rounded_pack<T>(out));
    });
  }

  // Combines n values of each group of the slab, from(group, i), by a warp, and calls to(group, result).
  template <typename V, typename From, typename To>
  __device__ void combine(int n, const From& from, const To& to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const WarpTeam warp{32, 1, lane};
    for (int g = static_cast<int>(threadIdx.x) / 32; g < slab_.groups; g += layout.threads / 32) {
      V all;
      warp.combine(n, [&](int i) { return from(g, i); }, all);
      if (lane == 0) to(g, all);
    }
  }

  // Combines the n records that this block has of each group with those of the cluster's other blocks, and calls
  // finish(group, result); or leaves what this block has in `partial`, for the next launch.
  template <typename V, typename Finish>
  __device__ void combine_records(int n, const Finish& finish) {
    const auto of_team = [&](int g, int i) { return value_of<V>(room.records[g * n + i]); };
    __syncthreads();
    if constexpr (kStaged) {
      if (layout.cuts > 1) {
        Record* const mine = room.exchanged + turn_ * layout.together;
        turn_ ^= 1;
        combine<V>(n, of_team, [&](int g, const V& all) { mine[g] = value_of<Record>(all); });
        __syncwarp();
        cluster_arrive_wait();
        combine<V>(layout.cuts, [&](int g, int block) { return value_of<V>(read_shared(mine + g, block)); }, finish);
      } else {
        combine<V>(n, of_team, finish);
      }
    } else {
      combine<V>(n, of_team, [&](int g, const V& all) {
        const auto record = value_of<Record>(all);
        C* const to = p.record(part_, slab_.group + g) + kPlace<V>;
        for (int k = 0; k < kNumbers<V>; ++k) to[k] = record.values[k];
      });
    }
    __syncthreads();
  }
  // Combines what the blocks of a launch before this one left in `partial`.
  template <typename V, typename Finish>
  __device__ void gather_records(const Finish& finish) const {
    const auto of_part = [&](int g, int part) {
      const C* const from = p.record(part, slab_.group + g) + kPlace<V>;
      Record record = {};
      for (int k = 0; k < kNumbers<V>; ++k) record.values[k] = from[k];
      return value_of<V>(record);
    };
    combine<V>(layout.parts(), of_part, finish);
  }
  template <typename V>
  static constexpr int kPlace = std::is_same<V, Sums<C>>::value ? 4 : 0;  // in a row of `partial`
  template <typename V>
  static constexpr int kNumbers = std::is_same<V, Sums<C>>::value ? 2 : 4;

  // finish_statistics makes the Groups of the slab, except their means of g, which finish_sums makes.
  __device__ auto finish_statistics() const {
    return [this](int g, const Statistics<C>& all) { room.groups[g] = Group<C>::of(all, p.eps); };
  }
  __device__ auto finish_sums() const {
    return [this](int g, const Sums<C>& all) {
      const C n = C(p.of_all());
      room.groups[g].along = all.weighted[0] / n, room.groups[g].mean = all.weighted[1] / n;
    };
  }

  __device__ void take_statistics() {
    Statistics<C> own[kSums] = {};
#pragma unroll 1
    for (int begin = 0; begin < slab_.packs; begin += kRun) {
      const int end = slab_.packs - begin < kRun ? slab_.packs : begin + kRun;
      C pivots[kSums] = {}, sums[kSums][2] = {};
      each_pack<false, false>(begin, end, [&](bool is_first, int64_t, const Pack<T, N>& x, const Pack<T, N>&) {
        if (is_first) {
          C all = 0;
          for (int k = 0; k < N; ++k) all += C(x.values[k]);
          for (int k = 0; k < kSums; ++k) pivots[k] = whole_ ? all / N : C(x.values[k]);
        }
        for (int k = 0; k < N; ++k) {
          const int s = kLast ? k : 0;
          const C d = C(x.values[k]) - pivots[s];
          sums[s][0] += d, sums[s][1] += d * d;
        }
      });
      if (kLast && whole_)
        for (int k = 1; k < kSums; ++k) sums[0][0] += sums[k][0], sums[0][1] += sums[k][1];
      each_unit([&](int k) {
        const C count = C(end - begin) * C(whole_ ? N : 1);
        own[k] = Statistics<C>::combine(own[k], Statistics<C>::of(count, pivots[k], sums[k][0], sums[k][1]));
      });
    }
    const int units = whole_ ? 1 : kSums;
    each_unit([&](int k) {
      Statistics<C> all = own[k];
      if (team_.size > 1) team_.combine(team_.size, [&](int) { return own[k]; }, all);
      put_record(item_ * units + k, all);
    });
    combine_records<Statistics<C>>(of_group_ * units / kSums * layout.teams(), finish_statistics());
  }
  // Calls f(k) for the first channel of an item, or for each if they may be of several groups.
  template <typename F>
  __device__ void each_unit(const F& f) const {
#pragma unroll
    for (int k = 0; k < kSums; ++k)
      if (k == 0 || !whole_) f(k);
  }
  // Takes a team's record from its first lane.
  template <typename V>
  __device__ void put_record(int unit, const V& value) const {
    if (has_item() && team_.number == 0)
      room.records[unit * layout.teams() + lane_ / layout.neighbours] = value_of<Record>(value);
  }

  // Adds up dz xhat and dz of each channel, and makes the means of g.
  template <bool kSilu>
  __device__ void take_sums(const Channel<T> (&channels)[kSums], const C (&weights)[kSums]) {
    C sums[kSums][2] = {};
    each_pack<true, true>(0, slab_.packs, [&](bool, int64_t, const Pack<T, N>& x, const Pack<T, N>& dy) {
      for (int k = 0; k < N; ++k) {
        const int s = kLast ? k : 0;
        const C d = C(x.values[k]) - channels[s].pivot, dz = channels[s].template dz<kSilu>(d, C(dy.values[k]));
        sums[s][0] += dz * d, sums[s][1] += dz;
      }
    });
    for (int k = 0; k < kSums; ++k) {
      team_.add_up(sums[k]);
      const C along = channels[k].sum_along(sums[k][0], sums[k][1]), w = weights[k];
      put_record(item_ * kSums + k, Sums<C>{{w * along, w * sums[k][1]}, {along, sums[k][1]}});
    }
    combine_records<Sums<C>>(of_group_ * layout.teams(), finish_sums());
    if (!p.weight.data && !p.bias.data) return;
    const int all = slab_.groups * of_group_;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += layout.threads) {
      C totals[2] = {};
      for (int team = 0; team < layout.teams(); ++team) {
        const auto part = value_of<Sums<C>>(room.records[i * layout.teams() + team]);
        totals[0] += part.plain[0], totals[1] += part.plain[1];
      }
      const int64_t channel = slab_.group * p.of_group + from_ + i, sample = channel / p.channels;
      C* const to = p.sums(part_ % layout.cuts, sample) + channel - sample * p.channels;
      to[0] = totals[0], to[p.channels] = totals[1];
    }
    __syncthreads();  // before records are written again
  }

  const Problem<T>& p;
  const Layout& layout;
  const Room<T, N> room;
  const int part_;
  WarpTeam team_;
  int of_group_, item_, lane_, packs_, turn_ = 0;  // of_group_: channels of a group in this part
  int64_t from_, begin_;                           // the part's first channel of a group, and step
  bool whole_;                                     // a pack is within one group
  Slab slab_;
  Batch<kBackward> ahead_;   // this thread's first packs, unless kStaged
  const Pack<T, N>* stage_;  // this thread's packs
};

}  // namespace msops::group_norm
#endif
