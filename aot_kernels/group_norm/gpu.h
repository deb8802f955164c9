// The kernels on the GPU. A slab is some whole groups, or some channels of one long group. It has parts: chunks of its
// channels and cuts of its positions. A block takes one part; layout.h says which.
//
//   1. statistics   each thread adds up its packs, teams add up by shuffles, a warp combines the teams of a group
//   2. sums         so are those of dz xhat and dz added up, for each channel and, weighted, for each group
//   3. map          each thread writes y or dx of its packs
//
// Where one launch has all phases, a block keeps its parts of several slabs in shared memory, in as many stages: it
// computes one while the next are being copied. Each thread copies what it reads itself. The blocks of a cluster tell
// each other their statistics and sums through shared memory. Otherwise each phase is a launch, which reads the tensors
// again, and whose blocks tell those of the next through `partial`. No sum depends on which block comes first.
#pragma once

#include "block.h"
#ifdef __CUDACC__
#include "../common/gpu/griddepcontrol.h"
#include "../common/sum.h"

namespace msops::group_norm {

// Adds up sums of a channel over cuts and samples: those of dz xhat or of dz. `thread` counts through sums and, for
// each of them, its lanes.
template <typename T>
__device__ void add_up_channels(const Problem<T>& p, int cuts, int64_t thread) {
  const int lanes = lanes_of_sum(cuts * p.samples), lane = static_cast<int>(thread % lanes);
  const int64_t sum = thread / lanes;
  const bool is_sum = sum < 2 * p.channels, of_dz = sum >= p.channels;
  const int64_t rows = is_sum ? cuts * p.samples : 0;
  int cut = lane % cuts;
  int64_t sample = lane / cuts;
  Sum<T> total;
#pragma unroll 8  // so that loads do not wait for each other
  for (int64_t row = lane; row < rows; row += lanes) {
    total += p.sums(cut, sample)[sum];
    cut += lanes % cuts, sample += lanes / cuts;
    if (cut >= cuts) cut -= cuts, ++sample;
  }
  Compute<T> all = total.total();
  for (int distance = lanes / 2; distance > 0; distance /= 2) all += __shfl_xor_sync(~0u, all, distance);
  const Numbers<T>& out = of_dz ? p.dbias : p.dweight;
  if (lane == 0 && is_sum && out.data) out.set(of_dz ? sum - p.channels : sum, all);
}

template <typename T, int N, bool kLast, bool kBackward>
__global__ void __launch_bounds__(kMostThreads, kResident<T, kLast>) staged_kernel(Problem<T> p, Layout layout) {
  extern __shared__ __align__(32) unsigned char bytes[];
  griddepcontrol_launch_dependents();
  Block<T, N, kLast, kBackward, true>(p, layout, bytes, static_cast<int>(blockIdx.x % layout.cuts)).run();
}

// Runs one phase in as many blocks as all slabs have parts; further blocks add up sums of channels, after phase 2.
template <typename T, int N, bool kLast, bool kBackward>
__global__ void __launch_bounds__(kMostThreads, kResidentOfPhases<T, kLast>)
    phase_kernel(Problem<T> p, Layout layout, int phase, unsigned blocks) {
  extern __shared__ __align__(32) unsigned char bytes[];
  griddepcontrol_launch_dependents();
  if (blockIdx.x < blocks) {
    const unsigned parts = static_cast<unsigned>(layout.parts());
    Block<T, N, kLast, kBackward, false>(p, layout, bytes, static_cast<int>(blockIdx.x % parts))
        .run(blockIdx.x / parts, phase);
  } else if constexpr (kBackward) {
    griddepcontrol_wait();
    add_up_channels(p, layout.cuts, int64_t{blockIdx.x - blocks} * blockDim.x + threadIdx.x);
  }
}

}  // namespace msops::group_norm
#endif
