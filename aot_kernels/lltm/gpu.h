// run_loop runs the time loop on the GPU in the first way that takes it.
//
//   case                                          way              why
//   65 to 512 units, few samples; from sm_90      run_in_clusters  weights in registers; blocks send what they publish
//   up to 128 units                               run_in_blocks    weights in registers; a block never waits
//   the weights fit into all shared memories      run_in_grid      weights stay on the chip; L2 carries the exchange
//   float32, units a multiple of 8; from sm_90    run_in_tiles     a launch for each step; TMA and tensor cores
//   float32 without TF32, more numbers of a step  run_in_grid      still faster than cuBLAS
//   else, and float64                             run_in_steps     cuBLAS and a kernel for each step
//
// Each way checks what it needs itself; run_loop says up to how many numbers of a step it is the fastest.
#pragma once

#include "block.h"
#include "cluster.h"
#include "grid.h"
#include "steps.h"
#include "tiles.h"

namespace msops::lltm {

template <typename Loop>
void run_loop(Call& call, const Loop& loop, Compute<typename Loop::Element>* scratch, bool allow_tf32) {
  using T = typename Loop::Element;
  if (!call.ok() || loop.batch == 0 || loop.hidden == 0) return;
  if constexpr (!std::is_same<T, double>::value) {
    const Gpu gpu;
    // These are the most numbers that a cluster or a block of the grid may read in a step: beyond them, other ways are
    // faster on an H200.
    constexpr bool kHalf = std::is_same<T, Half>::value;
    constexpr int64_t kMostInCluster = !kHalf ? 3072 : Loop::kTiles == 1 ? 1280 : 1536;
    if (run_in_clusters(call, loop, gpu, kMostInCluster)) return;
    if (loop.hidden <= kLargestInBlock) return run_in_blocks(call, loop, gpu.multiprocessors);
    constexpr int64_t kMost = 32 << 10, kMostTf32Backward = 24 << 10, kMostWithoutTiles = 96 << 10;
    // If `odd`, there are no tiles, and cuBLAS takes up to 4 times as long.
    const bool odd = loop.hidden % kPackWidth<T> != 0;
    if constexpr (kHalf) {
      if (run_in_grid<Product::kHalf>(call, loop, scratch, gpu, odd ? kMostWithoutTiles : kMost)) return;
    } else if (allow_tf32) {
      const int64_t most = odd ? kMostWithoutTiles : Loop::kTiles == 1 ? kMostTf32Backward : kMost;
      if (run_in_grid<Product::kTf32>(call, loop, scratch, gpu, most)) return;
      if (run_in_tiles<Product::kTf32>(call, loop, scratch, gpu)) return;
    } else {
      if (run_in_grid<Product::kFloat>(call, loop, scratch, gpu, kMost)) return;
      if (run_in_tiles<Product::kFloat>(call, loop, scratch, gpu)) return;
      if (run_in_grid<Product::kFloat>(call, loop, scratch, gpu, kMostWithoutTiles)) return;
    }
  }
  run_in_steps(call, loop, scratch, allow_tf32);
}

template <typename T>
void forward_on_gpu(Call& call, const SequenceForward<T>& body, Compute<T>* scratch, bool allow_tf32) {
  run_loop(call, ForwardLoop<T>(body), scratch, allow_tf32);
}
template <typename T>
void backward_on_gpu(Call& call, const SequenceBackward<T>& body, Compute<T>* scratch, bool allow_tf32) {
  run_loop(call, BackwardLoop<T>(body), scratch, allow_tf32);
}

}  // namespace msops::lltm
