// On a GPU, a team of lanes takes a row: 8 lanes for up to 64 experts, else a warp. It finds one expert after the
// other: each lane the first of its own, and the team the first of these.
//
//   experts       lanes  where keys are  why
//   up to 64      8      registers       a warp's shuffles then serve four rows
//   up to 256     32     registers       8 keys a lane
//   up to 1024    32     registers       32 keys a lane
//   more          32     scratch         registers do not hold them; a warp takes several rows in turn
#pragma once

#include "choose_few_gpu.h"
#include "lanes_gpu.h"

namespace msops::gating {

template <typename C>
__device__ Candidate<C> first_over(Candidate<C> first, int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    const Candidate<C> other{__shfl_xor_sync(~0u, first.key, distance), __shfl_xor_sync(~0u, first.index, distance)};
    if (other.precedes(first)) first = other;
  }
  return first;
}

// A team's row of keys. Lanes without a row have no experts, but take part in all shuffles. `memory` has room for a key
// of each expert, and a number for each group; without kHeld it holds the keys.
template <int kLanes, int kHeld, typename T>
class Keys {
 public:
  using C = Compute<T>;
  static constexpr int kWidth = kPackWidth<T>;

  __device__ Keys(const Row<T>& all, int64_t row, bool has_row, C* memory)
      : all_(all),
        row_(row),
        experts_(has_row ? static_cast<int>(all.experts) : 0),
        lane_(static_cast<int>(threadIdx.x) % kLanes),
        memory_(memory) {}

  // Loads the logits as keys. `aligned` says that whole packs tile each row.
  __device__ void load_logits(bool aligned) {
    const T* const logits = all_.logits + row_ * all_.experts;
    if constexpr (kHeld > 0) {
      if (aligned) {
#pragma unroll
        for (int h = 0; h < kHeld; h += kWidth) {
          Pack<T, kWidth> pack = {};
          if (index_of(h) < experts_) pack = load<kWidth>(logits + index_of(h));
          for (int j = 0; j < kWidth; ++j) held_[h + j] = C(pack.values[j]);
        }
        return;
      }
    }
    each([&](int index, C& key) { key = C(logits[index]); });
  }

  // Calls f(expert, key) for this lane's experts.
  template <typename F>
  __device__ void each(const F& f) {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int h = 0; h < kHeld; ++h)
        if (index_of(h) < experts_) f(index_of(h), held_[h]);
    } else {
      for (int index = lane_; index < experts_; index += kLanes) f(index, memory_[index]);
    }
  }

  __device__ Shares<C> shares() {
    C largest = -C(HUGE_VAL), total = 0;
    each([&](int, C& x) { largest = std::fmax(largest, x); });
    Shares<C> found;
    found.shift = Shares<C>::shift_of(largest_over(largest, kLanes));
    each([&](int, C& x) { total += found.term(x); });
    found.total = sum_over(total, kLanes);
    return found;
  }

  // Marks the experts of all but the best groups as none that can be chosen. Several lanes share a group, or a lane has
  // several.
  __device__ void keep_best_groups() {
    const Settings& s = all_.s;
    const int groups = static_cast<int>(s.groups), size = experts_ / groups;
    int lanes = 1;  // of a group
    while (lanes * 2 * groups <= kLanes) lanes *= 2;
    const int first = lane_ / lanes, step = kLanes / lanes;
    C* const worths = memory_ + all_.experts;
    if constexpr (kHeld > 0) each([&](int index, C& key) { memory_[index] = key; });
    __syncwarp();
    for (int g = first; g - first < groups; g += step) {  // as often in all lanes
      Candidate<C> last = Candidate<C>::before_all();
      C worth = 0;
      for (int i = 0; i < s.group_top; ++i) {
        Candidate<C> best = Candidate<C>::none();
        each_of_group(g, g < groups ? size : 0, lanes, [&](int expert) {
          const Candidate<C> own{memory_[expert], expert};
          if (last.precedes(own) && own.precedes(best)) best = own;
        });
        last = first_over(best, lanes);
        worth += last.key;
      }
      if (lane_ % lanes == 0 && g < groups && size > 0) worths[g] = ordered(worth);
    }
    __syncwarp();
    for (int g = first; g < groups && size > 0; g += step) {
      const Candidate<C> own{worths[g], g};
      int rank = 0;
      for (int other = 0; other < groups; ++other) rank += Candidate<C>{worths[other], other}.precedes(own);
      if (rank >= s.top_groups) each_of_group(g, size, lanes, [&](int expert) { memory_[expert] = C(NAN); });
    }
    __syncwarp();
    if constexpr (kHeld > 0) each([&](int index, C& key) { key = memory_[index]; });
  }

  // Finds the first expert that is left, and takes it out.
  __device__ int take_first() {
    Candidate<C> first = Candidate<C>::none();
    each([&](int index, C& key) {
      if (const Candidate<C> own{key, index}; own.precedes(first)) first = own;
    });
    const int chosen = first_over(first, kLanes).index;
    each([&](int index, C& key) {
      if (index == chosen) key = C(NAN);
    });
    return chosen;
  }

 private:
  // Calls f(expert) for this lane's share of a group, which so many lanes have together. Each group begins at another
  // one of these, since lanes that took the same one of several groups would wait for each other's bank of memory.
  template <typename F>
  __device__ void each_of_group(int group, int size, int lanes, const F& f) const {
    const int part = lane_ % lanes, number = (size - part + lanes - 1) / lanes;
    for (int i = 0, turn = number > 0 ? group % number : 0; i < number; ++i) {
      f(group * size + part + turn * lanes);
      turn = turn + 1 < number ? turn + 1 : 0;
    }
  }

  // Returns the expert of a lane's key: packs of neighbours are in neighbouring lanes.
  __device__ int index_of(int h) const { return (h / kWidth * kLanes + lane_) * kWidth + h % kWidth; }

  const Row<T>& all_;
  int64_t row_;
  int experts_, lane_;
  C* memory_;
  C held_[kHeld > 0 ? kHeld : 1];
};

// Chooses the experts of one row, and writes their weights.
template <int kLanes, int kHeld, typename T>
__device__ void choose_in_row(const Choice<T>& choice, int64_t row, bool has_row, Compute<T>* memory, bool aligned) {
  using C = Compute<T>;
  const Row<T>& all = choice.all;
  const int k = static_cast<int>(all.s.k), lane = static_cast<int>(threadIdx.x) % kLanes;
  Keys<kLanes, kHeld, T> keys(all, row, has_row, memory);
  keys.load_logits(aligned);
  Shares<C> shares;
  if (all.needs_shares() || all.s.is_share_of_all()) shares = keys.shares();
  keys.each([&](int index, C& key) { key = all.key(key, index, shares); });
  if (all.s.selects_groups()) keys.keep_best_groups();
  int32_t* const chosen = choice.experts + row * k;
  for (int i = 0; i < k; ++i) {
    const int expert = keys.take_first();
    if (has_row && lane == i % kLanes) chosen[i] = expert;
  }
  // A lane goes on with the experts that it wrote itself.
  const auto each = [&](const auto& f) {
    for (int i = lane; has_row && i < k; i += kLanes) f(i, all.logit(row, chosen[i]));
  };
  if (all.s.renormalize) {
    C largest = -C(HUGE_VAL), total = 0;
    each([&](int, C x) { largest = std::fmax(largest, x); });
    shares.shift = Shares<C>::shift_of(largest_over(largest, kLanes));
    each([&](int, C x) { total += all.term(x, shares); });
    shares.total = sum_over(total, kLanes);
  }
  each([&](int i, C x) { assign(choice.weights[row * k + i], C(all.s.scale) * shares.share(all.term(x, shares))); });
}

// Keys are in registers; memory of the block is for groups.
template <int kLanes, int kHeld, typename T>
__global__ void __launch_bounds__(kGatingThreads) choose_kernel(Choice<T> choice, bool aligned) {
  using C = Compute<T>;
  extern __shared__ uint4 shared[];
  constexpr int kTeams = kGatingThreads / kLanes;
  const int team = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t row = blockIdx.x * int64_t{kTeams} + team;
  C* const memory = reinterpret_cast<C*>(shared) + team * (choice.all.experts + choice.all.s.groups);
  choose_in_row<kLanes, kHeld>(choice, row, row < choice.rows, memory, aligned);
}

// Keys are in scratch, of which each warp has a part.
template <typename T>
__global__ void __launch_bounds__(kGatingThreads) choose_of_many_kernel(Choice<T> choice) {
  const int64_t warp = blockIdx.x * int64_t{kGatingThreads / 32} + threadIdx.x / 32;
  if (warp >= choice.rows_at_once) return;
  Compute<T>* const memory = choice.keys + warp * choice.all.s.room(choice.all.experts);
  for (int64_t row = warp; row < choice.rows; row += choice.rows_at_once)
    choose_in_row<32, 0>(choice, row, true, memory, false);
}

template <int kLanes, int kHeld, typename T>
void launch_choice(Call& call, const Choice<T>& choice) {
  using C = Compute<T>;
  constexpr int kTeams = kGatingThreads / kLanes;
  const Row<T>& all = choice.all;
  const bool aligned = all.experts % kPackWidth<T> == 0 && is_aligned<kPackWidth<T>>(all.logits);
  const int64_t room = all.s.selects_groups() ? all.experts + all.s.groups : 0;
  launch(call, choose_kernel<kLanes, kHeld, T>, (choice.rows + kTeams - 1) / kTeams, kGatingThreads,
         kTeams * room * static_cast<int64_t>(sizeof(C)), choice, aligned);
}

template <typename T>
void choose_on_gpu(Call& call, const Choice<T>& choice) {
  const int64_t experts = choice.all.experts;
  if (choose_few(call, choice)) return;
  if (experts <= 64) return launch_choice<8, 8>(call, choice);
  if (experts <= 256) return launch_choice<32, 8>(call, choice);
  if (experts <= kMostHeld) return launch_choice<32, 32>(call, choice);
  launch(call, choose_of_many_kernel<T>, (choice.rows_at_once + kGatingThreads / 32 - 1) / (kGatingThreads / 32),
         kGatingThreads, 0, choice);
}

}  // namespace msops::gating
