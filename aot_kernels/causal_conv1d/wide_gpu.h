// This header convolves with more than kFew taps on the GPU. A block computes a tile of results out of a tile in shared
// memory, for so many taps at a time. A thread has eight neighbouring results: for eight taps it reads eight more
// elements.
#pragma once

#ifdef __CUDACC__
#include "../common/gpu/unrolled.h"
#include "../common/launch.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "wide.h"

namespace msops::causal_conv1d {

constexpr int kWideThreads = 128, kResults = 8;  // of a thread
constexpr int kTile = kWideThreads * kResults, kTapsAtOnce = 512;

// Returns where element i of a tile is: threads that read elements 8 apart meet different banks.
__device__ __forceinline__ int padded(int i) { return i + i / kResults; }

// sums[o] += sum over k < count of taps[k] tile[first + o + k]
template <typename C>
__device__ __forceinline__ void correlate(const C* tile, int first, const C* taps, int first_tap, int count,
                                          C (&sums)[kResults]) {
  C window[2 * kResults - 1];
  unrolled<kResults - 1>([&](int o) { window[o] = tile[padded(first + o)]; });
  int k = 0;
  for (; k + kResults <= count; k += kResults) {
    unrolled<kResults>([&](int o) { window[kResults - 1 + o] = tile[padded(first + k + kResults - 1 + o)]; });
    unrolled<kResults>([&](int j) {
      const C tap = taps[padded(first_tap + k + j)];
      unrolled<kResults>([&](int o) { sums[o] += tap * window[j + o]; });
    });
    unrolled<kResults - 1>([&](int o) { window[o] = window[kResults + o]; });
  }
  for (; k < count; ++k) {
    const C tap = taps[padded(first_tap + k)];
    unrolled<kResults>([&](int o) { sums[o] += tap * tile[padded(first + k + o)]; });
  }
}

// Blocks take the tiles of all rows in turn.
template <typename Correlation, typename T>
__global__ void __launch_bounds__(kWideThreads) wide_kernel(const Problem<T> p, int64_t tiles) {
  using C = Compute<T>;
  __shared__ C tile[(kTile + kTapsAtOnce) / kResults * (kResults + 1)], taps[kTapsAtOnce / kResults * (kResults + 1)];
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t item = blockIdx.x; item < p.s.rows() * tiles; item += gridDim.x) {
    const Correlation row(p, item / tiles);
    const int64_t first = item % tiles * kTile;
    C sums[kResults] = {};
    for (int64_t tap = 0; tap < row.taps; tap += kTapsAtOnce) {
      const int count = static_cast<int>(row.taps - tap < kTapsAtOnce ? row.taps - tap : kTapsAtOnce);
      __syncthreads();  // all have read what is replaced
      for (int i = thread; i < kTile + count - 1; i += kWideThreads)
        tile[padded(i)] = row.signal()[first + tap + i - p.s.history()];
      for (int k = thread; k < count; k += kWideThreads) taps[padded(k)] = row.tap(tap + k);
      __syncthreads();
      correlate(tile, thread * kResults, taps, 0, count, sums);
    }
    __syncthreads();
    unrolled<kResults>([&](int o) { tile[padded(thread * kResults + o)] = sums[o]; });
    __syncthreads();
    for (int i = thread; i < kTile && first + i < row.outputs; i += kWideThreads) row.put(first + i, tile[padded(i)]);
    __syncthreads();  // all have read the sums
  }
}

// Threads of one block are (slices of the steps, groups of eight taps), of which there are as many as `of_width` taps
// need. Blocks take the items: each is so many taps for a part of a row.
template <typename T>
__global__ void __launch_bounds__(kWideThreads) wide_sums_kernel(const Problem<T> p, int groups, int64_t of_width) {
  using C = Compute<T>;
  constexpr int kSteps = 512, kRoom = (kSteps + kTile) / kResults * (kResults + 1);
  __shared__ C tile[kRoom], g[kSteps / kResults * (kResults + 1)];
  const int thread = static_cast<int>(threadIdx.x), group = thread % groups, slice = thread / groups;
  const int slices = kWideThreads / groups, of_slice = kSteps / slices, of_block = groups * kResults;
  for (int64_t item = blockIdx.x; item < p.s.rows() * p.parts * of_width; item += gridDim.x) {
    const int64_t row = item / (p.parts * of_width), part = item / of_width % p.parts;
    const int64_t first_tap = item % of_width * of_block, channel = row % p.s.channels;
    const int64_t end = part_begin<int64_t>(p.s.length, part + 1, p.parts);
    const Signal<T> x = p.signal(row);
    C sums[kResults] = {}, of_bias = 0;
    for (int64_t t = part_begin<int64_t>(p.s.length, part, p.parts); t < end; t += kSteps) {
      const int count = static_cast<int>(end - t < kSteps ? end - t : kSteps);
      __syncthreads();  // all have read what is replaced
      for (int i = thread; i < count; i += kWideThreads) {
        g[padded(i)] = p.gradients[row * p.s.length + t + i];
        of_bias += g[padded(i)];
      }
      for (int i = thread; i < count + of_block - 1; i += kWideThreads)
        tile[padded(i)] = x[t + first_tap - p.s.history() + i];
      __syncthreads();
      const int begin = slice * of_slice, mine = count - begin < of_slice ? count - begin : of_slice;
      if (mine > 0) correlate(tile, begin + group * kResults, g, begin, mine, sums);
    }
    __syncthreads();
    unrolled<kResults>([&](int o) { tile[padded(thread * kResults + o)] = sums[o]; });
    g[thread] = of_bias;
    __syncthreads();
    C* const to = p.sums(part, row / p.s.channels);
    for (int k = thread; k < of_block && first_tap + k < p.s.width; k += kWideThreads) {
      C sum = 0;
      for (int other = 0; other < slices; ++other) sum += tile[padded(other * of_block + k)];
      to[channel * p.s.width + first_tap + k] = sum;
    }
    if (thread == 0 && first_tap == 0) {
      C sum = 0;
      for (int other = 0; other < kWideThreads; ++other) sum += g[other];
      to[p.s.channels * p.s.width + channel] = sum;
    }
    __syncthreads();  // all have read the sums
  }
}

template <typename Correlation, typename T>
void correlate_on_gpu(Call& call, const Problem<T>& p, int64_t outputs) {
  const int64_t tiles = (outputs + kTile - 1) / kTile;
  launch(call, wide_kernel<Correlation, T>, std::min<int64_t>(p.s.rows() * tiles, INT32_MAX), kWideThreads, 0, p,
         tiles);
}

template <typename T>
struct PutStates {
  Problem<T> p;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const int64_t row = i / p.s.history();
    p.put_state(row, i - row * p.s.history());
  }
};

template <typename T>
void convolve_wide_on_gpu(Call& call, const Problem<T>& p, bool backward) {
  if (!backward) {
    correlate_on_gpu<Convolved<T>>(call, p, p.s.length);
    return on_gpu_with<int64_t>(call, p.s.rows() * p.s.history(), PutStates<T>{p});
  }
  correlate_on_gpu<OutputGradient<T>>(call, p, p.s.length);
  correlate_on_gpu<InputGradient<T>>(call, p, p.s.length + p.s.history());
  int groups = 1;
  while (groups < kWideThreads && groups * kResults < p.s.width) groups *= 2;
  const int64_t of_width = (p.s.width - 1) / (groups * kResults) + 1;
  launch(call, wide_sums_kernel<T>, std::min<int64_t>(p.s.rows() * p.parts * of_width, INT32_MAX), kWideThreads, 0, p,
         groups, of_width);
}

}  // namespace msops::causal_conv1d
#endif
