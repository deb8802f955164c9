// Which of three ways the time loop runs on the GPU.
#pragma once

#include "block.h"
#include "grid.h"
#include "steps.h"

namespace msops {

template <typename Loop>
void run_loop(Call& call, const Loop& loop, Compute<typename Loop::Element>* scratch, bool allow_tf32) {
  using T = typename Loop::Element;
  if (!call.ok() || loop.batch == 0 || loop.hidden == 0) return;
  int device = 0, multiprocessors = 0, major = 0, cooperative = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
  if constexpr (!std::is_same<T, double>::value) {
    if (loop.hidden <= kLargestInBlock) return run_in_blocks(call, loop, multiprocessors);
    if (major >= 8 && cooperative) {
      if constexpr (std::is_same<T, Half>::value) {
        if (run_in_grid<Product::kHalf>(call, loop, scratch, device, multiprocessors)) return;
      } else if (allow_tf32) {
        if (run_in_grid<Product::kTf32>(call, loop, scratch, device, multiprocessors)) return;
      } else {
        if (run_in_grid<Product::kFloat>(call, loop, scratch, device, multiprocessors)) return;
      }
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

}  // namespace msops
