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
      alone_ = false;
      share(static_cast<int>(std::min(most, wanted)));
      for (int phase = 1; phase <= 3; ++phase)
        if (kBackward || phase != 2) run(phase, phase + 1, (int64_t{1} << 30) / layout_.parts() * layout_.parts());
    }
    return layout_.cuts;
  }

 private:
  static constexpr int kSums = kLast ? N : 1, kAtOnce = kResident<T>;
  static constexpr int64_t kLine = 64;   // bytes of neighbours that a slab has at least
  static constexpr int64_t kStages = 3;  // one that is mapped, one that is added up, one that is copied

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
      while (layout_.neighbours < std::min<int64_t>(32, steps) && 2 * items * layout_.neighbours <= threads())
        layout_.neighbours *= 2;
    }
    const int64_t most = (steps - 1) / layout_.neighbours + 1;  // teams of an item
    const int fit = kLast && items <= 32 ? threads() / 32 : std::max(1, threads() / (items * layout_.neighbours));
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
  // Returns the bytes beside the stages.
  int64_t own_bytes() const {
    const bool keeps_dz = kBackward && p_.silu && sizeof(Compute<T>) > sizeof(T);
    return Room<T, N>::bytes_of(layout_) + (keeps_dz ? bytes_of_stage() / 2 : 0);
  }

  // Chooses blocks of a slab, `most` at most, and their stages, so that all phases take one launch: the fewest blocks
  // that occupy the GPU with as many stages as there is use for, if they can share multiprocessors, else alone; or what
  // comes closest to it. Returns false if a slab does not fit, or if these leave most of the GPU idle.
  bool fit(int64_t most) {
    Layout best{};
    int64_t best_score = 0;
    bool best_alone = false;
    for (bool alone : {false, true}) {
      alone_ = alone;
      for (int blocks = 1; blocks <= std::min(most, kMostBlocks); blocks *= 2) {
        if (blocks > 1 && clusters(blocks) == 0) break;
        share(blocks);
        const int64_t all = layout_.slabs * blocks, multiprocessors = gpu_.multiprocessors;
        const int64_t rounds = (all - 1) / ((alone ? 1 : kAtOnce) * multiprocessors) + 1;
        const int64_t wanted = std::min(kStages, rounds), stages = (room() - own_bytes()) / bytes_of_stage();
        if (own_bytes() + bytes_of_stage() > room()) continue;
        const int64_t score = std::min(all, multiprocessors) * kStages + (stages < wanted ? stages : kStages);
        if (score <= best_score) continue;
        layout_.stages = static_cast<int>(std::min(stages, wanted));
        best = layout_, best_score = score, best_alone = alone;
      }
    }
    layout_ = best, alone_ = best_alone;
    return best_score > 0 && (layout_.slabs * layout_.cuts * 2 >= gpu_.multiprocessors || most <= layout_.cuts);
  }
  // Returns the most bytes of a block, if it is alone or shares a multiprocessor.
  int room() const { return alone_ ? gpu_.dynamic_bytes() : (gpu_.shared_bytes + 1024) / kAtOnce - 1024; }
  int threads() const { return alone_ ? kMostThreads<T> : kThreads; }

  // Returns how many clusters of so many blocks run at once, or 0 if there are none.
  int clusters(int blocks) {
    const auto kernel = group_norm_kernel<T, N, kLast, kBackward>;
    [[maybe_unused]] static FactOfGpu<2 * (kMostBlocks + 1)> fact;
    return fact.get(
        [&] {
          if (!is_compiled_for(90, kernel)) return 0;
          return clusters_at_once(kernel, Grid(blocks).in_clusters(blocks), threads(), room());
        },
        2 * blocks + alone_);
  }
  // Returns how many slabs the GPU computes at once.
  int64_t slabs_at_once() {
    if (layout_.cuts == 1) return int64_t{alone_ ? 1 : kAtOnce} * gpu_.multiprocessors;
    return std::max(1, clusters(layout_.cuts));
  }
  int64_t bytes() const {
    return layout_.stages > 0 ? own_bytes() + layout_.stages * bytes_of_stage() : Room<T, N>::bytes_of(layout_);
  }

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
  bool alone_ = false;  // a block has a multiprocessor of its own
};

template <typename T, bool kLast, bool kBackward>
int64_t launch_on_gpu(Call& call, const Problem<T>& p) {
  if constexpr (kMovesPacks<T>) {
    using Wide = Launcher<T, kPackWidth<T>, kLast, kBackward>;
    if (Wide::fits(p)) return Wide(call, p).launch();
  }
  return Launcher<T, 1, kLast, kBackward>(call, p).launch();
}

// Adds up what `parts` rows of sums have of the weight's and the bias's gradients.
template <typename T>
void add_up_on_gpu(Call& call, const Problem<T>& p, int64_t parts, const Tensor& dweight, const Tensor& dbias) {
  if (!dweight.dtype && !dbias.dtype) return;
  const auto kernel = group_norm_sums_kernel<T>;
  const Grid grid((2 * p.channels + 31) / 32);
  launch(call, kernel, parts > 0 && is_compiled_for(90, kernel) ? grid.programmatic() : grid, 256, 0, p, parts,
         Gradient<T>(dweight), Gradient<T>(dbias));
}

}  // namespace msops::group_norm
#endif
