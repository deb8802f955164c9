// This time loop is for recurrent weights that fit into the shared memory of all blocks together. Each block keeps the
// weights of 16 units, and takes the samples of its group through all steps. After each step its units' results go
// through L2 to the other blocks of the group, which wait until all blocks have counted themselves. All blocks must run
// at once, or the loop would not end: a cooperative launch fails if they can't.
//
// Tensor cores make the products, of 16 units and 8 samples.
#pragma once

#include "../common/gpu/counter.h"
#include "../common/gpu/product.h"
#include "../common/pack.h"
#include "../common/parallel.h"
#include "loop.h"

namespace msops::lltm {

constexpr int kSliceUnits = 16, kTileSamples = 8, kWarps = kThreads / 32;
constexpr int kPadded = kSliceUnits + 4;  // stride of a sample's sums, so that a warp's stores hit all banks

// The lanes of a warp load this many units of 8 rows at once: a pack of 16 bytes for each of 4 lanes and each row. The
// position of a number in its row of the tensor cores' operands does not matter, as long as both operands agree on it.
template <typename T>
constexpr int kBlockUnits = 4 * kPackWidth<T>;

struct GridPlan {
  int slices, groups, rows;      // rows: samples of a group, a multiple of 8
  int64_t padded_batch, blocks;  // blocks: of kBlockUnits
  float* exchange;               // [2][segments][blocks][padded_batch][kBlockUnits]
  float* state;                  // [2][batch][hidden]
  unsigned* published;           // [groups]: how many times blocks have published, over all rounds
};

// An Operand is a lane's pack of a row of weights, of the eighth row after it, or of a sample.
template <Product kProduct>
struct Operand {
  Word<kProduct> words[4];

  __device__ explicit Operand(const uint4& pack)
      : words{Word<kProduct>(pack.x), Word<kProduct>(pack.y), Word<kProduct>(pack.z), Word<kProduct>(pack.w)} {}
};

template <Product kProduct>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Operand<kProduct>& row,
                                             const Operand<kProduct>& row8, const Operand<kProduct>& column) {
#pragma unroll
  for (int j = 0; j < 4; j += 2)
    msops::multiply_add<kProduct>(sums, {row.words[j], row8.words[j], row.words[j + 1], row8.words[j + 1]},
                                  {column.words[j], column.words[j + 1]});
}

// Puts the weights of 16 units where `grid_kernel` reads them: [kTiles][kSegments * blocks][2][32], a lane's packs of
// rows lane / 4 and lane / 4 + 8.
template <typename Loop>
__device__ void place_weights(const Loop& loop, int64_t first_unit, int blocks, uint4* weights) {
  using T = typename Loop::Element;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments, kWidth = kPackWidth<T>;
  for (int i = threadIdx.x; i < kTiles * kSegments * kSliceUnits * blocks * kBlockUnits<T>; i += kThreads) {
    int rest = i;
    const auto digit = [&](int radix) {
      const int value = rest % radix;
      rest /= radix;
      return value;
    };
    // The faster index is the one of neighbours in memory.
    int k, row;
    if (kTiles == 1) {
      row = digit(kSliceUnits);
      k = digit(blocks * kBlockUnits<T>);
    } else {
      k = digit(blocks * kBlockUnits<T>);
      row = digit(kSliceUnits);
    }
    const int segment = digit(kSegments), tile = rest;
    const int64_t unit = first_unit + row;
    const T value = unit < loop.hidden && k < loop.hidden ? *loop.weight_of(tile, unit, segment, k) : T(0.f);
    const int block = segment * blocks + k / kBlockUnits<T>, at = k % kBlockUnits<T>;
    const int pack = ((tile * kSegments * blocks + block) * 2 + row / 8) * 32 + row % 8 * 4 + at / kWidth;
    reinterpret_cast<T*>(weights + pack)[at % kWidth] = value;
  }
}

// SumsOfWarps are the sums of a block's warps, in shared memory. put() adds the sums of the upper half of the warps to
// the sums of the lower half; total() adds these up when they are used.
template <int kTiles, int kColumns>
struct SumsOfWarps {
  static constexpr int kSamples = kColumns * kTileSamples;
  static constexpr int64_t kBytes = kWarps / 2 * kTiles * kSamples * kPadded * sizeof(float);
  float* shared;

  __device__ float& at(int warp, int tile, int sample, int unit) const {
    return shared[((warp * kTiles + tile) * kSamples + sample) * kPadded + unit];
  }
  // All threads of the block must call this.
  __device__ __forceinline__ void put(float (&sums)[kTiles][kColumns][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto for_sums = [&](const auto& f) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int sample = column * kTileSamples + lane % 4 * 2 + j % 2, unit = lane / 4 + j / 2 * 8;
            f(sums[tile][column][j], at(warp % (kWarps / 2), tile, sample, unit));
          }
    };
    if (warp >= kWarps / 2) for_sums([](float& sum, float& there) { there = sum; });
    __syncthreads();
    if (warp < kWarps / 2) for_sums([](float& sum, float& there) { there += sum; });
    __syncthreads();
  }
  __device__ float total(int tile, int sample, int unit) const {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps / 2; ++warp) total += at(warp, tile, sample, unit);
    return total;
  }
};

template <int kColumns, typename Loop>
constexpr int64_t shared_bytes(int64_t blocks) {
  using T = typename Loop::Element;
  const int64_t weights = Loop::kTiles * Loop::kSegments * kSliceUnits * blocks * kBlockUnits<T> * sizeof(T);
  return weights + SumsOfWarps<Loop::kTiles, kColumns>::kBytes;
}

// The kernel takes kColumns tiles of 8 samples at once.
template <Product kProduct, int kColumns, typename Loop>
__global__ void __launch_bounds__(kThreads, 1) grid_kernel(const Loop loop, const GridPlan plan) {
  if (!has_instructions_of(80)) return;
  using T = typename Loop::Element;
  using State = typename Loop::State;
  constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments;
  constexpr int kSamples = kColumns * kTileSamples, kAhead = kColumns < 4 ? 4 : kProduct == Product::kFloat ? 2 : 3;
  constexpr int kElements = (kSamples * kSliceUnits + kThreads - 1) / kThreads;  // of a thread
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = static_cast<int>(plan.blocks);
  const int64_t first_unit = blockIdx.x * kSliceUnits, first_sample = static_cast<int64_t>(blockIdx.y) * plan.rows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(plan.rows), plan.padded_batch - first_sample));

  extern __shared__ uint4 weights[];
  const SumsOfWarps<kTiles, kColumns> of_warps{
      reinterpret_cast<float*>(weights + kTiles * kSegments * blocks * 2 * 32)};
  place_weights(loop, first_unit, blocks, weights);

  T* const exchange = reinterpret_cast<T*>(plan.exchange);
  float* const states = plan.state;
  const int64_t buffer = kSegments * plan.blocks * plan.padded_batch * kBlockUnits<T>;
  const int64_t all = loop.batch * loop.hidden;
  // `times` counts how often this block has published, in the two halves of the exchange by turns. A half is written
  // again when all blocks have read it: each block counts itself after its products.
  unsigned times = 0;

  // Calls f(sample, unit, i) for the i-th element of this thread among kSamples samples.
  const auto for_elements = [&](int first, const auto& f) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int e = threadIdx.x + i * kThreads, row = first + e / kSliceUnits;
      const int64_t sample = first_sample + row, unit = first_unit + e % kSliceUnits;
      if (e / kSliceUnits < kSamples && row < rows && sample < loop.batch && unit < loop.hidden) f(sample, unit, i);
    }
  };
  const auto publish_to = [&](int64_t sample, int64_t unit) {
    return [=](int segment, const Pack<T, 1>& pack) {
      const int64_t row = (segment * plan.blocks + unit / kBlockUnits<T>)*plan.padded_batch + sample;
      exchange[times % 2 * buffer + row * kBlockUnits<T> + unit % kBlockUnits<T>] = pack.values[0];
    };
  };
  const auto published = [&] {
    ++times;
    if (threadIdx.x == 0) red_release_add(plan.published + blockIdx.y);
  };

  for (int first = 0; first < rows; first += kSamples)
    for_elements(first, [&](int64_t sample, int64_t unit, int) {
      State state[1] = {loop.begin(sample, unit)};
      loop.write(loop.start(state, sample, unit, publish_to(sample, unit)), sample, unit);
      states[sample * loop.hidden + unit] = state[0].h;
      states[all + sample * loop.hidden + unit] = state[0].c;
    });
  __syncthreads();
  published();

  // Each warp multiplies with the units of some of the exchange's blocks, in all segments.
  const int first_block = part_begin(blocks, warp, kWarps), end_block = part_begin(blocks, warp + 1, kWarps);
  const int products = (end_block - first_block) * kSegments;
  using Inputs = typename Loop::template Inputs<1>;
  using Update = typename Loop::template Update<1>;

  // These are the phases of a round, for kSamples samples from `first` on.
  const auto load = [&](int64_t round, int first, Inputs(&inputs)[kElements], State(&state)[kElements][1]) {
    for_elements(first, [&](int64_t sample, int64_t unit, int i) {
      inputs[i] = loop.template read<1>(round, sample, unit);
      state[i][0] = {states[sample * loop.hidden + unit], states[all + sample * loop.hidden + unit]};
    });
  };
  const auto wait_for_others = [&] {
    if (threadIdx.x == 0) {
      const unsigned wanted = times * plan.slices;
      while (static_cast<int>(ld_acquire(plan.published + blockIdx.y) - wanted) < 0) {
      }
    }
    __syncthreads();
  };
  const auto update = [&](int64_t round, int first, const Inputs(&inputs)[kElements], State(&state)[kElements][1],
                          Update(&updates)[kElements]) {
    for_elements(first, [&](int64_t sample, int64_t unit, int i) {
      const int e = threadIdx.x + i * kThreads;
      float total[kTiles][1];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) total[tile][0] = of_warps.total(tile, e / kSliceUnits, e % kSliceUnits);
      updates[i] = loop.finish(round, inputs[i], total, state[i], publish_to(sample, unit));
      states[sample * loop.hidden + unit] = state[i][0].h;
      states[all + sample * loop.hidden + unit] = state[i][0].c;
    });
  };

  for (int64_t round = 0; round < loop.steps; ++round) {
    const T* from = exchange + (times - 1) % 2 * buffer;
    Update updates[kElements];
    for (int first = 0; first < rows; first += kSamples) {
      Inputs inputs[kElements];
      State state[kElements][1];
      load(round, first, inputs, state);
      if (first == 0) wait_for_others();
      float sums[kTiles][kColumns][4] = {};
      // Multiply: operands are fetched ahead of their use.
      const auto block_of = [&](int product) {
        return product % kSegments * blocks + first_block + product / kSegments;
      };
      uint4 columns[kAhead][kColumns];
      const auto fetch = [&](int product, uint4(&to)[kColumns]) {
        const uint4* source = reinterpret_cast<const uint4*>(
            from + (block_of(product) * plan.padded_batch + first_sample + first) * kBlockUnits<T>);
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
          to[column] = first + column * kTileSamples < rows ? __ldcg(source + column * 32 + lane) : uint4{};
      };
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead)
        if (ahead < products) fetch(ahead, columns[ahead]);
      for (int begin = 0; begin < products; begin += kAhead)
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead) {
          const int product = begin + ahead;
          if (product >= products) break;
          const uint4* packs = weights + block_of(product) * 2 * 32 + lane;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint4* row = packs + tile * kSegments * blocks * 2 * 32;
            const Operand<kProduct> a(row[0]), a8(row[32]);
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
              multiply_add(sums[tile][column], a, a8, Operand<kProduct>(columns[ahead][column]));
          }
          if (product + kAhead < products) fetch(product + kAhead, columns[ahead]);
        }
      of_warps.put(sums);  // The warps' sums are reduced in shared memory.
      update(round, first, inputs, state, updates);
      __syncthreads();
      if (first + kSamples >= rows) published();
      for_elements(first, [&](int64_t sample, int64_t unit, int i) { loop.write(updates[i], sample, unit); });
    }
  }
  for (int first = 0; first < rows; first += kSamples)
    for_elements(first, [&](int64_t sample, int64_t unit, int) {
      const int64_t at = sample * loop.hidden + unit;
      loop.end({states[at], states[all + at]}, sample, unit);
    });
}

// Runs the loop if it fits and a block reads at most `most_numbers` numbers in a step; returns whether it did.
template <Product kProduct, int kColumns = 1, typename Loop>
bool run_in_grid(Call& call, const Loop& loop, float* scratch, const Gpu& gpu, int64_t most_numbers) {
  using T = typename Loop::Element;
  constexpr int64_t kMostGroups = 1020;  // with 4 for the exchange's alignment, 1024 elements of the scratch
  GridPlan plan;
  plan.slices = static_cast<int>((loop.hidden + kSliceUnits - 1) / kSliceUnits);
  plan.blocks = (loop.hidden + 31) / 32 * 32 / kBlockUnits<T>;
  plan.padded_batch = (loop.batch + kTileSamples - 1) / kTileSamples * kTileSamples;
  const auto kernel = grid_kernel<kProduct, kColumns, Loop>;
  const int64_t bytes = shared_bytes<kColumns, Loop>(plan.blocks);
  if (!gpu.cooperative || bytes > gpu.shared_bytes || !is_compiled_for(80, kernel)) return false;
  const int64_t most_groups =
      std::min<int64_t>(blocks_at_once(gpu, kernel, kThreads, bytes) / plan.slices, kMostGroups);
  if (most_groups == 0) return false;
  const int64_t tiles = plan.padded_batch / kTileSamples, tiles_each = (tiles - 1) / most_groups + 1;
  if (tiles_each * kTileSamples * loop.hidden > most_numbers) return false;
  if constexpr (kColumns < 4) {
    if (tiles_each > kColumns) return run_in_grid<kProduct, 2 * kColumns>(call, loop, scratch, gpu, most_numbers);
  }
  plan.rows = static_cast<int>(tiles_each * kTileSamples);
  plan.groups = static_cast<int>((tiles - 1) / tiles_each + 1);
  const int64_t exchanged = 2 * Loop::kSegments * plan.blocks * kBlockUnits<T> * plan.padded_batch * sizeof(T);
  float* const exchange = scratch + kMostGroups + elements_to_pack<4>(scratch + kMostGroups);
  plan.published = reinterpret_cast<unsigned*>(scratch);
  plan.exchange = exchange;
  plan.state = exchange + exchanged / sizeof(float);
  // The scratch starts as zeros: no block has published, and the padding of samples and units adds nothing.
  cudaMemsetAsync(scratch, 0, (plan.state - scratch) * sizeof(float), call.stream());
  launch(call, kernel, Grid(plan.slices, plan.groups).cooperative(), kThreads, bytes, loop, plan);
  return true;
}

}  // namespace msops::lltm
