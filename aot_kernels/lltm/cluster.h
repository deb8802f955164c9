// This time loop is for recurrent weights that fit into the registers of a cluster's blocks, on GPUs from sm_90 on. A
// cluster takes some samples through all steps, and each of its blocks computes some of their units. A block sends what
// its units publish to the shared memory of all blocks, each of which waits for as many bytes as are sent to it in a
// step.
#pragma once

#include "../common/gpu/cluster.h"
#include "../common/gpu/mbarrier.h"
#include "../common/parallel.h"
#include "registers.h"

namespace msops::lltm {

#if CUDART_VERSION >= 12010  // the first version that knows st.async

template <int kHidden, typename Loop>
struct ClusterPlan {
  static constexpr int kBlocks = kHidden <= 128 ? 2 : kHidden <= 256 ? 8 : 16, kUnits = kHidden / kBlocks;
  static constexpr int kThreads = kUnits * (kHidden <= 128 ? 4 : kHidden <= 256 ? 8 : 16);
  static constexpr int kThreadUnits = Loop::kTiles == 1 ? 2 : 1, kSplits = kThreads * kThreadUnits / kUnits;
  static constexpr int kPacks = kHidden / (4 * kSplits);
  static constexpr int kPitch = kSplits % 8 == 0 ? kSplits + 4 : kSplits;  // so that a warp's loads hit all banks
  static_assert(kPacks * 4 * kSplits == kHidden, "a thread has whole packs");

  struct Sample {
    float published[2][Loop::kSegments][kHidden];
    float partial[2][Loop::kTiles][kUnits][kPitch];
  };
};

template <int kHidden, typename Loop>
__global__ void __launch_bounds__(ClusterPlan<kHidden, Loop>::kThreads, 1)
    cluster_kernel(const Loop loop, const int samples) {
  if (!has_instructions_of(90)) return;
  using Plan = ClusterPlan<kHidden, Loop>;
  using Sample = typename Plan::Sample;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments, kBlocks = Plan::kBlocks, kUnits = Plan::kUnits;
  constexpr int kThreads = Plan::kThreads, kThreadUnits = Plan::kThreadUnits, kSplits = Plan::kSplits;
  constexpr int kPacks = Plan::kPacks;
  extern __shared__ uint4 shared_samples[];
  __shared__ uint64_t barriers[2];
  Sample* const shared = reinterpret_cast<Sample*>(shared_samples);
  const auto arrived = [&](int64_t round) { return shared_address(&barriers[round % 2]); };

  // All blocks have units, since hidden > (kBlocks - 1)^2: blocks do not wait for one without, and would overtake it.
  const int units = (static_cast<int>(loop.hidden) - 1) / kBlocks + 1, first_unit = blockIdx.x % kBlocks * units;
  const int64_t first_sample = static_cast<int64_t>(blockIdx.x / kBlocks) * samples;
  const int of_thread = threadIdx.x / kSplits * kThreadUnits, split = threadIdx.x % kSplits;
  const ThreadWeights<kThreadUnits, kSplits, kPacks, Loop> weights(loop, first_unit + of_thread, split);

  const int64_t there = min(static_cast<int64_t>(samples), loop.batch - first_sample);
  const int bytes = static_cast<int>(there * loop.hidden * kSegments * sizeof(float));
  for (int i = threadIdx.x; i < samples * static_cast<int>(sizeof(Sample) / sizeof(float)); i += kThreads)
    reinterpret_cast<float*>(shared)[i] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) mbarrier_init(arrived(i), 1);
    fence_mbarrier_init();
    for (int i = 0; i < 2; ++i) mbarrier_arrive_expect_tx(arrived(i), bytes);
  }
  cluster_arrive_wait();

  // Each of the first threads has one unit of one sample.
  const int mine = threadIdx.x / kUnits, of_block = threadIdx.x % kUnits;
  const int64_t sample = first_sample + mine, unit = first_unit + of_block;
  const bool owner = mine < samples && sample < loop.batch && of_block < units && unit < loop.hidden;
  int64_t next_round = 0;
  const auto publish = [&](int segment, const Pack<typename Loop::Element, 1>& pack) {
    if (next_round == loop.steps) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      st_async(float(pack.values[0]), &shared[mine].published[next_round % 2][segment][unit], arrived(next_round),
               block);
  };
  typename Loop::State state[1];
  typename Loop::template Inputs<1> next;
  if (owner) {
    state[0] = loop.begin(sample, unit);
    loop.write(loop.start(state, sample, unit, publish), sample, unit);
    if (loop.steps > 0) next = loop.template read<1>(0, sample, unit);
  }
  for (int64_t round = 0; round < loop.steps; ++round) {
    mbarrier_wait(arrived(round), static_cast<int>(round / 2 % 4096));       // the phase, as an int
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived(round), bytes);  // for the round after the next one
#pragma unroll 1
    for (int s = 0; s < samples; ++s) {
      float sums[kTiles][kThreadUnits] = {};
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment)
#pragma unroll
        for (int pack = 0; pack < kPacks; ++pack)
          weights.multiply_add(sums, segment, pack,
                               load<4>(&shared[s].published[round % 2][segment][(pack * kSplits + split) * 4]));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int u = 0; u < kThreadUnits; ++u) shared[s].partial[round % 2][tile][of_thread + u][split] = sums[tile][u];
    }
    __syncthreads();
    next_round = round + 1;
    if (owner) {
      float total[kTiles][1] = {};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int s = 0; s < kSplits; s += 4) {
          const Pack<float, 4> sums = load<4>(&shared[mine].partial[round % 2][tile][of_block][s]);
          total[tile][0] += (sums.values[0] + sums.values[1]) + (sums.values[2] + sums.values[3]);
        }
      const auto update = loop.finish(round, next, total, state, publish);
      if (next_round < loop.steps) loop.read_next(next, next_round, sample, unit);
      loop.write(update, sample, unit);
    }
  }
  if (owner) loop.end(state[0], sample, unit);
}

template <int kHidden, typename Loop>
bool run_in_clusters(Call& call, const Loop& loop, const Gpu& gpu, int64_t most_numbers) {
  using Plan = ClusterPlan<kHidden, Loop>;
  const auto kernel = cluster_kernel<kHidden, Loop>;
  if (!is_compiled_for(90, kernel)) return false;
  const int clusters = clusters_at_once(kernel, Grid(Plan::kBlocks).in_clusters(Plan::kBlocks), Plan::kThreads, 0);
  if (clusters == 0) return false;
  const int64_t samples = (loop.batch - 1) / clusters + 1, bytes = samples * sizeof(typename Plan::Sample);
  if (samples * Plan::kUnits > Plan::kThreads || samples * kHidden > most_numbers) return false;
  if (bytes > gpu.shared_bytes - 16) return false;  // the barriers take 16
  const Grid grid = Grid(((loop.batch - 1) / samples + 1) * Plan::kBlocks).in_clusters(Plan::kBlocks);
  launch(call, kernel, grid, Plan::kThreads, bytes, loop, static_cast<int>(samples));
  return true;
}

// Runs the loop if it fits and a cluster has at most `most_numbers` numbers of a step, one for each unit of each
// sample; returns whether it did. Up to 64 units are faster in a block.
template <typename Loop>
bool run_in_clusters(Call& call, const Loop& loop, const Gpu& gpu, int64_t most_numbers) {
  if (loop.hidden <= 64 || loop.hidden > 512) return false;
  if (loop.hidden <= 128) return run_in_clusters<128>(call, loop, gpu, most_numbers);
  if (loop.hidden <= 192) return run_in_clusters<192>(call, loop, gpu, most_numbers);
  if (loop.hidden <= 256) return run_in_clusters<256>(call, loop, gpu, most_numbers);
  if (loop.hidden <= 384) return run_in_clusters<384>(call, loop, gpu, most_numbers);
  return run_in_clusters<512>(call, loop, gpu, most_numbers);
}

#else
template <typename Loop>
bool run_in_clusters(Call&, const Loop&, const Gpu&, int64_t) {
  return false;
}
#endif

}  // namespace msops::lltm
