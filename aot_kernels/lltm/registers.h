// ThreadWeights keeps recurrent weights in a thread's registers.
#pragma once

#include "../common/pack.h"
#include "loop.h"

namespace msops::lltm {

// The weights are of kUnits units, for every kSplits-th pack of four numbers; the packs of a warp's threads are
// neighbours.
template <int kUnits, int kSplits, int kPacks, typename Loop>
struct ThreadWeights {
  static constexpr int kTiles = Loop::kTiles, kSegments = Loop::kSegments;
  float of[kTiles][kSegments][kPacks][kUnits][4];

  __device__ __forceinline__ ThreadWeights(const Loop& loop, int first_unit, int split) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment)
#pragma unroll
        for (int pack = 0; pack < kPacks; ++pack)
#pragma unroll
          for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int unit = first_unit + u, k = (pack * kSplits + split) * 4 + j;
              const bool there = unit < loop.hidden && k < loop.hidden;
              of[tile][segment][pack][u][j] = there ? float(*loop.weight_of(tile, unit, segment, k)) : 0;
            }
  }

  // Adds the products of the thread's `pack`-th pack of a segment.
  __device__ __forceinline__ void multiply_add(float (&sums)[kTiles][kUnits], int segment, int pack,
                                               const Pack<float, 4>& numbers) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[tile][u] += of[tile][segment][pack][u][j] * numbers.values[j];
  }
};

}  // namespace msops::lltm
