// The choice of slabs, parts and stages for the GPU:
//
//   groups                          launches            why
//   that fit a block                one                 the tensors are read once
//   that fit a cluster, from sm_90  one                 so they are, and a few groups occupy all multiprocessors
//   others                          one for each phase  any number of blocks shares a group
//
// One more launch adds up the gradients of weight and bias; of the phases, the last one does it.
#pragma once

#include "../common/launch.h"
#include "gpu.h"
#ifdef __CUDACC__

namespace msops::group_norm {

template <typename T, int N, bool kLast, bool kBackward>
class Launcher {
 public:
  Launcher(Call& call, const Problem<T>& p) : call_(call), p_(p) {}

  void launch() {
    tile();
    if (layout_.chunks == 1 && fit()) {
      const Grid grid(slabs_at_once_ * layout_.cuts);
      msops::launch(call_, staged_kernel<T, N, kLast, kBackward>,
                    layout_.cuts > 1 ? grid.in_clusters(static_cast<unsigned>(layout_.cuts)) : grid, layout_.threads,
                    own_bytes() + layout_.stages * bytes_of_stage(), p_, layout_);
      if (blocks_of_sums() > 0) run(3, 0, blocks_of_sums());
    } else {
      cut();
      const int64_t blocks = layout_.slabs * layout_.parts();
      run(1, blocks, 0);
      if (kBackward) run(2, blocks, 0);
      run(3, blocks, blocks_of_sums());
    }
  }

 private:
  static constexpr int kSums = kLast ? N : 1, kAtOnce = kResident<T, kLast>;
  static constexpr int64_t kLine = 64;  // bytes of neighbours that a slab has at least
  static constexpr int64_t kStages = 3;

  // Chooses blocks of a slab, which are a cluster, and their stages, so that all phases take one launch: the fewest
  // blocks that share multiprocessors and occupy the GPU, or as many as there can be. Returns false if a slab does not
  // fit, if these leave most of the GPU idle, or if few slabs take several rounds, of which the last does.
  bool fit() {
    const int64_t slabs = layout_.slabs, processors = gpu_.multiprocessors;
    const int64_t most = std::min({p_.parts, layout_.steps, (layout_.width * p_.positions - 1) / kFew + 1});
    int found = 0, resident = 0;
    for (int blocks = 1; blocks <= std::min(most, kMostBlocks); blocks *= 2) {
      if (blocks > 1 && clusters(blocks, kAtOnce) == 0) break;
      share(blocks);
      const int64_t bytes = own_bytes() + bytes_of_stage();
      const bool in_pairs = kAtOnce > 2 && N == 1 && slabs * blocks <= 2 * processors;  // in one round
      if (bytes > shared(in_pairs ? 2 : kAtOnce)) continue;
      found = blocks, resident = bytes > shared(kAtOnce) ? 2 : kAtOnce;
      if (slabs * blocks >= processors) break;
    }
    if (found == 0 || (2 * slabs * found < processors && most > found)) return false;
    share(found);
    const int64_t at_once = found > 1 ? clusters(found, resident) : resident * processors;
    const int64_t rounds = (slabs - 1) / at_once + 1, room = (shared(resident) - own_bytes()) / bytes_of_stage();
    slabs_at_once_ = std::min(slabs, at_once), layout_.stages = static_cast<int>(std::min({kStages, rounds, room}));
    return rounds == 1 || 4 * slabs >= 3 * processors;
  }
  // Returns how many clusters of so many blocks run at once, `resident` blocks to a multiprocessor, or 0.
  int clusters(int blocks, int resident) {
    const auto kernel = staged_kernel<T, N, kLast, kBackward>;
    [[maybe_unused]] static FactOfGpu<2 * (kMostBlocks + 1)> fact;
    return fact.get(
        [&] {
          if (!is_compiled_for(90, kernel)) return 0;
          return clusters_at_once(kernel, Grid(blocks).in_clusters(blocks), kMostThreads, shared(resident));
        },
        2 * blocks + (resident == kAtOnce));
  }

  // Cuts slabs into as many parts as keep all blocks of a phase on the GPU at once, if these have enough to do.
  void cut() {
    const int64_t enough = (layout_.width * p_.positions - 1) / kFewOfPhase + 1;
    const int64_t most = std::max<int64_t>(1, std::min({p_.parts / layout_.chunks, layout_.steps, enough}));
    share(static_cast<int>(most));
    const int64_t threads = kResidentOfPhases<T, kLast> * kMostThreads * gpu_.multiprocessors;
    const int64_t blocks = threads / layout_.threads / (layout_.slabs * layout_.chunks);
    share(static_cast<int>(std::max<int64_t>(1, std::min(most, blocks))));
  }
  // Runs a phase in so many blocks, and adds up sums of channels in others. Phases 2 and 3 may begin before the phase
  // before them has ended, and wait for it.
  void run(int phase, int64_t blocks, int64_t of_sums) {
    const auto kernel = phase_kernel<T, N, kLast, kBackward>;
    [[maybe_unused]] static FactOfGpu<> fact;
    const bool can_wait = fact.get([&] { return int{is_compiled_for(90, kernel)}; });
    const Grid grid(blocks + of_sums);
    msops::launch(call_, kernel, grid.programmatic(phase > 1 && can_wait), layout_.threads, own_bytes(), p_, layout_,
                  phase, static_cast<unsigned>(blocks));
  }
  int64_t blocks_of_sums() const {
    const int64_t lanes = lanes_of_sum(layout_.cuts * p_.samples);
    return p_.dweight.data || p_.dbias.data ? (2 * lanes * p_.channels - 1) / layout_.threads + 1 : 0;
  }

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
      const auto threads = [&](int neighbours) { return kMostThreads / (items * neighbours) * neighbours; };
      for (int n = 2; n <= std::min<int64_t>(32, steps); n *= 2)
        if (8 * threads(n) >= 7 * threads(1)) layout_.neighbours = n;
    }
    const int64_t most = (steps - 1) / layout_.neighbours + 1;  // teams of an item
    const int fit = kLast && items <= 32 ? kMostThreads / 32 : std::max(1, kMostThreads / (items * layout_.neighbours));
    const int teams = static_cast<int>(std::min<int64_t>(most, fit));
    layout_.lanes = teams * layout_.neighbours;
    const int busy = kLast && items <= 32 ? 32 * teams : items * layout_.lanes;
    layout_.threads = (busy + 31) / 32 * 32;
    layout_.held = static_cast<int>(std::min<int64_t>((steps - 1) / layout_.lanes + 1, INT32_MAX / 1024));
    layout_.records = int64_t{layout_.width} * teams;
  }
  int64_t bytes_of_stage() const {
    return int64_t{layout_.held} * layout_.threads * static_cast<int64_t>(sizeof(Pack<T, N>)) * (kBackward ? 2 : 1);
  }
  int64_t own_bytes() const { return Room<T, N>::bytes_of(layout_); }

  // Returns the bytes of a block with which so many of them share a multiprocessor.
  int shared(int blocks) const { return (gpu_.shared_bytes + 1024) / blocks - 1024; }

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
  int64_t slabs_at_once_ = 0;  // if one launch has all phases
};

template <typename T, bool kLast, bool kBackward>
void launch_on_gpu(Call& call, const Problem<T>& p) {
  if constexpr (kMovesPacks<T>) {
    using Wide = Launcher<T, kPackWidth<T>, kLast, kBackward>;
    if (Wide::fits(p)) return Wide(call, p).launch();
  }
  return Launcher<T, 1, kLast, kBackward>(call, p).launch();
}

}  // namespace msops::group_norm
#endif
