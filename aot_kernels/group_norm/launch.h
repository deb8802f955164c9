// The choice of slabs, parts and stages for the GPU:
//
//   groups                          launches              why
//   that fit a block                one                   the tensors are read once
//   that fit a cluster, from sm_90  one                   so they are, and a few groups occupy all multiprocessors
//   longer, or a few before sm_90   one for each phase    any number of blocks shares a group
#pragma once

#include "../common/launch.h"
#include "gpu.h"
#ifdef __CUDACC__

namespace msops::group_norm {

template <typename T, int N, bool kLast, bool kBackward>
class Launcher {
 public:
  Launcher(Call& call, const Problem<T>& p) : call_(call), p_(p) {}

  // Returns how many cuts of the positions have sums.
  int64_t launch() {
    tile();
    const int64_t elements = layout_.width * p_.positions;
    const int64_t most =
        std::max<int64_t>(1, std::min({p_.parts / layout_.chunks, layout_.steps, (elements + kFew - 1) / kFew}));
    if (layout_.chunks == 1 && fit(most)) {
      run(1, 4, slabs_at_once() * layout_.cuts);
    } else {
      const int64_t wanted = (4 * gpu_.multiprocessors + layout_.slabs - 1) / layout_.slabs;
      share(static_cast<int>(std::min(most, wanted)));
      for (int phase = 1; phase <= 3; ++phase)
        if (kBackward || phase != 2) run(phase, phase + 1, (int64_t{1} << 30) / layout_.parts() * layout_.parts());
    }
    return layout_.cuts;
  }

 private:
  static constexpr int kSums = kLast ? N : 1, kAtOnce = kResident<T, kLast>;
  static constexpr int64_t kLine = 64;  // bytes of neighbours that a slab has at least
  static constexpr int64_t kStages = 3;

  // Chooses the groups of a slab.
  void tile() {
    const int64_t unit = unit_of(p_), whole = kMostChannels / p_.of_group / unit * unit;
    const int64_t batches = kLast ? p_.samples : 1, all = kLast ? p_.groups : p_.samples * p_.groups;
    int64_t together = std::max(unit, (kFew - 1) / (p_.of_group * p_.positions) + 1);
    if (kLast) together = std::max(together, (kLine / static_cast<int64_t>(sizeof(T)) - 1) / p_.of_group + 1);
    together = std::max<int64_t>(1, std::min((together + unit - 1) / unit * unit, whole));
    layout_.together = std::min(together, all);
    layout_.bundles = (all - 1) / layout_.together + 1, layout_.slabs = batches * layout_.bundles;
    layout_.chunks = static_cast<int>((p_.of_group - 1) / kMostChannels + 1);
    layout_.width = static_cast<int>((layout_.together * p_.of_group / kSums - 1) / layout_.chunks * kSums + kSums);
    layout_.steps = kLast ? p_.positions : p_.positions / N;
  }

  // Cuts the positions, and shares a part of a slab among threads.
  void share(int cuts) {
    const int items = layout_.width / kSums;
    const int64_t steps = (layout_.steps - 1) / cuts + 1;
    layout_.cuts = cuts, layout_.neighbours = 1;
    if (kLast) {
      if (items <= 32) layout_.neighbours = static_cast<int>(std::min<int64_t>(32 / items, steps));
    } else {
      while (layout_.neighbours < std::min<int64_t>(32, steps) && 2 * items * layout_.neighbours <= kMostThreads)
        layout_.neighbours *= 2;
    }
    const int64_t most = (steps - 1) / layout_.neighbours + 1;  // teams of an item
    const int fit = kLast && items <= 32 ? kMostThreads / 32 : std::max(1, kMostThreads / (items * layout_.neighbours));
    const int teams = static_cast<int>(std::min<int64_t>(most, fit));
    layout_.lanes = teams * layout_.neighbours;
    const int busy = kLast && items <= 32 ? 32 * teams : items * layout_.lanes;
    layout_.threads = (busy + 31) / 32 * 32;
    layout_.held = static_cast<int>(std::min<int64_t>((steps - 1) / layout_.lanes + 1, INT32_MAX / 1024));
    layout_.records = int64_t{layout_.width} * teams;
    layout_.stages = 0;
  }
  int64_t bytes_of_stage() const {
    return int64_t{layout_.held} * layout_.threads * static_cast<int64_t>(sizeof(Pack<T, N>)) * (kBackward ? 2 : 1);
  }
  int64_t own_bytes() const { return Room<T, N>::bytes_of(layout_); }

  // Chooses blocks of a slab, `most` at most, and their stages, so that all phases take one launch: the fewest blocks
  // that occupy the GPU and share multiprocessors, or as many as there can be. Returns false if a slab does not fit, or
  // if these leave most of the GPU idle.
  bool fit(int64_t most) {
    int found = 0;
    for (int blocks = 1; blocks <= std::min(most, kMostBlocks); blocks *= 2) {
      if (blocks > 1 && clusters(blocks, true) == 0) break;
      share(blocks);
      if (own_bytes() + bytes_of_stage() > gpu_.dynamic_bytes()) continue;
      found = blocks;
      if (own_bytes() + bytes_of_stage() <= shared() && layout_.slabs * blocks >= gpu_.multiprocessors) break;
    }
    if (found == 0 || (layout_.slabs * found * 2 < gpu_.multiprocessors && most > found)) return false;
    share(found);
    const int64_t rounds = (layout_.slabs * found - 1) / (kAtOnce * gpu_.multiprocessors) + 1;
    const int64_t room = (shared() - own_bytes()) / bytes_of_stage();
    layout_.stages = static_cast<int>(std::max<int64_t>(1, std::min({kStages, rounds, room})));
    return true;
  }
  // Returns the bytes of a block with which kAtOnce of them share a multiprocessor.
  int shared() const { return (gpu_.shared_bytes + 1024) / kAtOnce - 1024; }

  // Returns how many clusters of so many blocks run at once, or 0 if there are none.
  int clusters(int blocks, bool alone) {
    const auto kernel = group_norm_kernel<T, N, kLast, kBackward>;
    [[maybe_unused]] static FactOfGpu<2 * (kMostBlocks + 1)> fact;
    return fact.get(
        [&] {
          if (!is_compiled_for(90, kernel)) return 0;
          const int bytes = alone ? gpu_.dynamic_bytes() : shared();
          return clusters_at_once(kernel, Grid(blocks).in_clusters(blocks), kMostThreads, bytes);
        },
        2 * blocks + alone);
  }
  // Returns how many slabs the GPU computes at once.
  int64_t slabs_at_once() {
    const bool alone = bytes() > shared();
    if (layout_.cuts == 1) return int64_t{alone ? 1 : kAtOnce} * gpu_.multiprocessors;
    return std::max(1, clusters(layout_.cuts, alone));
  }
  int64_t bytes() const { return own_bytes() + layout_.stages * bytes_of_stage(); }

  // Runs the phases from `first` on, before `last`, in `most` blocks at most.
  void run(int first, int last, int64_t most) {
    const Grid grid(std::min(layout_.slabs * layout_.parts(), most));
    const bool clustered = layout_.stages > 0 && layout_.cuts > 1;
    msops::launch(call_, group_norm_kernel<T, N, kLast, kBackward>,
                  clustered ? grid.in_clusters(static_cast<unsigned>(layout_.cuts)) : grid, layout_.threads, bytes(),
                  p_, layout_, first, last);
  }

  // Returns how many groups have whole packs.
  static int64_t unit_of(const Problem<T>& p) {
    int64_t unit = 1;
    while (unit * p.of_group % kSums != 0) ++unit;
    return unit;
  }

 public:
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
int64_t launch_on_gpu(Call& call, const Problem<T>& p) {
  if constexpr (kMovesPacks<T>) {
    using Wide = Launcher<T, kPackWidth<T>, kLast, kBackward>;
    if (Wide::fits(p)) return Wide(call, p).launch();
  }
  return Launcher<T, 1, kLast, kBackward>(call, p).launch();
}

}  // namespace msops::group_norm
#endif
