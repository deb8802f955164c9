// This time loop is for recurrent weights that fit into the registers of one block's threads: a block takes some
// samples through all steps, and never waits for another block.
#pragma once

#include "../common/pack.h"
#include "../common/parallel.h"
#include "registers.h"

namespace msops::lltm {

constexpr int kLargestInBlock = 128;  // hidden units

// The first threads multiply. With one sample in float32 and up to 64 units, other threads own its units, and read and
// write at the same time. Otherwise the first threads do that, too.
template <int kHidden, int kSamples, typename Loop>
struct BlockThreads {
  static constexpr int kProducts = 4 * kHidden;
  static constexpr bool kOthers =
      kSamples == 1 && kHidden < kLargestInBlock && std::is_same<typename Loop::Element, float>::value;
  static constexpr int kFirstOwner = kOthers ? kProducts : 0, kAll = kOthers ? kProducts + kHidden : kProducts;
};

template <int kHidden, int kSamples, typename Loop>
__global__ void __launch_bounds__(BlockThreads<kHidden, kSamples, Loop>::kAll, 1) block_kernel(const Loop loop) {
  using Threads = BlockThreads<kHidden, kSamples, Loop>;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments;
  // Three or four products for each number that a thread loads keep shared memory from being the limit.
  constexpr int kUnits = kTiles == 1 ? (kHidden < 64 ? 2 : 4) : 1, kSplits = 4 * kUnits,
                kPacks = kHidden / (4 * kSplits);
  constexpr int kPitch = kHidden + (kUnits == 1 ? 8 : 4);  // so that a warp's stores hit all banks
  __shared__ alignas(16) float published[2][kSamples][kSegments][kHidden];
  __shared__ alignas(16) float partial[kSamples][kTiles][kSplits][kPitch];

  const int first_unit = threadIdx.x / kSplits * kUnits, split = threadIdx.x % kSplits;
  const ThreadWeights<kUnits, kSplits, kPacks, Loop> weights(loop, first_unit, split);
  for (int i = threadIdx.x; i < 2 * kSamples * kSegments * kHidden; i += Threads::kAll) (&published[0][0][0][0])[i] = 0;
  __syncthreads();

  // Each owner has one unit of one sample.
  const unsigned unit = threadIdx.x % kHidden, mine = (threadIdx.x - Threads::kFirstOwner) / kHidden;
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kSamples + mine;
  const bool owner = mine < kSamples && unit < loop.hidden && sample < loop.batch;
  int now = 0;
  const auto publish = [&](int segment, const Pack<typename Loop::Element, 1>& pack) {
    published[now][mine][segment][unit] = float(pack.values[0]);
  };
  typename Loop::State state[1];
  typename Loop::template Inputs<1> next;
  if (owner) {
    state[0] = loop.begin(sample, unit);
    loop.write(loop.start(state, sample, unit, publish), sample, unit);
    if (loop.steps > 0) next = loop.template read<1>(0, sample, unit);
  }
  __syncthreads();
  for (int64_t round = 0; round < loop.steps; ++round) {
    if (!Threads::kOthers || threadIdx.x < Threads::kProducts) {
      float sums[kSamples][kTiles][kUnits] = {};
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment)
#pragma unroll
        for (int pack = 0; pack < kPacks; ++pack)
#pragma unroll
          for (int s = 0; s < kSamples; ++s)
            weights.multiply_add(sums[s], segment, pack,
                                 load<4>(&published[now][s][segment][(pack * kSplits + split) * 4]));
#pragma unroll
      for (int s = 0; s < kSamples; ++s)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          Pack<float, kUnits> pack;
#pragma unroll
          for (int u = 0; u < kUnits; ++u) pack.values[u] = sums[s][tile][u];
          store(&partial[s][tile][split][first_unit], pack);
        }
    }
    __syncthreads();
    now ^= 1;
    typename Loop::template Update<1> update;
    if (owner) {
      float total[kTiles][1] = {};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int s = 0; s < kSplits; ++s) total[tile][0] += partial[mine][tile][s][unit];
      update = loop.finish(round, next, total, state, publish);
    }
    __syncthreads();
    if (owner) {
      if (round + 1 < loop.steps) loop.read_next(next, round + 1, sample, unit);
      loop.write(update, sample, unit);
    }
  }
  if (owner) loop.end(state[0], sample, unit);
}

template <int kHidden, typename Loop>
void run_in_blocks(Call& call, const Loop& loop, int multiprocessors) {
  const auto run = [&](auto samples) {
    constexpr int kSamples = samples, kThreads = BlockThreads<kHidden, kSamples, Loop>::kAll;
    launch(call, block_kernel<kHidden, kSamples, Loop>, (loop.batch - 1) / kSamples + 1, kThreads, 0, loop);
  };
  // A block takes as few samples as the multiprocessors have room for.
  if (loop.batch <= multiprocessors * (kHidden == 32 ? 4 : 1)) return run(Constant<1>{});
  if (loop.batch <= multiprocessors * (256 / kHidden)) return run(Constant<2>{});
  run(Constant<4>{});
}

template <typename Loop>
void run_in_blocks(Call& call, const Loop& loop, int multiprocessors) {
  if (loop.hidden <= 32) return run_in_blocks<32>(call, loop, multiprocessors);
  if (loop.hidden <= 64) return run_in_blocks<64>(call, loop, multiprocessors);
  run_in_blocks<kLargestInBlock>(call, loop, multiprocessors);
}

}  // namespace msops::lltm
