// These kernels compute the depthwise convolution in float32 for small weights and stride 1, as in small.h, where no
// pack of elements tiles the images' rows. A warp copies what its threads need to shared memory, where each thread
// reads 16 bytes at once, and copies its results back in the same way. So neighbouring threads move neighbouring
// elements, wherever rows begin.
#pragma once

#include "tasks.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"

namespace msops::depthwise::staged {

using namespace tasks;

constexpr int kWarps = kThreads / 32, kColumns = 4;  // a task's, of inputs and of results
constexpr int kRow = 32 * kColumns;                  // of a warp's tasks
constexpr int kForwardRows = 10, kBackwardRows = 4;  // of a task: the more, the less is read twice

// Place is where a task's first element is: in its array, and in its image.
struct Place {
  int offset, row, column;
};

__device__ inline void wait_for_copies() {
  cp_async_wait_all();
  __syncwarp();
}

// Lanes are the elements of a warp's tasks that this lane moves: every 32nd of a row, so that lanes are neighbours.
struct Lanes {
  int height, width, offset[kColumns], row[kColumns];

  __device__ Lanes(const Place& own, int height, int width) : height(height), width(width) {
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < kColumns; ++j) {
      const int task = (j * 32 + lane) / kColumns, at = lane % kColumns;
      offset[j] = __shfl_sync(~0u, own.offset, task) + at;
      row[j] = __shfl_sync(~0u, own.row, task);
      if (!within(__shfl_sync(~0u, own.column, task) + at, width)) row[j] = height;
    }
  }

  template <int kRows>
  __device__ void read(float* to, int pitch, const float* array) const {
#pragma unroll
    for (int t = 0; t < kRows; ++t)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        cp_async<4>(to + t * pitch + j * 32 + threadIdx.x % 32, array + offset[j] + t * width,
                    within(row[j] + t, height));
  }

  // Writes by way of `shared`, which has room for the rows.
  template <int kRows>
  __device__ void write(float* array, const float (&results)[kRows][kColumns], float* shared) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      Pack<float, kColumns> pack;
      for (int c = 0; c < kColumns; ++c) pack.values[c] = results[t][c];
      store(shared + t * kRow + lane * kColumns, pack);
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kRows; ++t)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        if (within(row[j] + t, height)) array[offset[j] + t * width] = shared[t * kRow + j * 32 + lane];
  }
};

// Window is kRows rows of a warp's windows: pieces of the task before its first, of its 32 tasks, of the task after
// them, and of zeros.
template <int kRows>
struct Window {
  static constexpr int kZeros = 34 * kColumns, kPitch = kZeros + kColumns;
  alignas(16) float values[kRows][kPitch];

  // `beside` is the task before the warp's for the first kColumns lanes, and the task after them for the others.
  __device__ void read(const float* array, const Place& own, const Place& beside, int height, int width) {
    const int lane = threadIdx.x % 32;
    Lanes(own, height, width).read<kRows>(values[0] + kColumns, kPitch, array);
    if (lane >= 3 * kColumns) return;
    const bool inside = lane < 2 * kColumns && within(beside.column + lane % kColumns, width);
#pragma unroll
    for (int t = 0; t < kRows; ++t)
      cp_async<4>(values[t] + (lane < kColumns ? lane : kRow + lane),
                  array + beside.offset + lane % kColumns + t * width, inside && within(beside.row + t, height));
  }

  // Reads row t of the window of a task, one of `groups` in its row: kSide elements, its own piece, and kSide elements.
  template <int kSide>
  __device__ void row(int t, int group, int groups, float (&window)[kColumns + 2 * kSide]) const {
    const int own = (threadIdx.x % 32 + 1) * kColumns;
    const auto left = load<kColumns>(values[t] + (group > 0 ? own - kColumns : kZeros));
    const auto middle = load<kColumns>(values[t] + own);
    const auto right = load<kColumns>(values[t] + (group + 1 < groups ? own + kColumns : kZeros));
    for (int i = 0; i < kSide; ++i) {
      window[i] = left.values[kColumns - kSide + i];
      window[kSide + kColumns + i] = right.values[i];
    }
    for (int c = 0; c < kColumns; ++c) window[kSide + c] = middle.values[c];
  }
};

// A warp has 32 neighbouring tasks.
template <int K>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<K, 1>)
    forward_kernel(Sizes s, Tasks tasks, Divisor channels, const float* __restrict__ x,
                   const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ out) {
  constexpr int kRows = kForwardRows, kIn = kRows - 1 + K;
  __shared__ Window<kIn> windows[kWarps];
  Window<kIn>& window = windows[threadIdx.x / 32];
  const int images = s.batch * s.channels, lane = threadIdx.x % 32, task = blockIdx.x * kThreads + threadIdx.x;
  int group, strip, image, channel;
  const auto place = [&](int at) {
    image = tasks.strips.divide(tasks.groups.divide(max(at, 0), &group), &strip);
    const int row = image < images ? strip * kRows - s.top : s.h_in, column = group * kColumns;
    return Place{(image * s.h_in + row) * s.w_in + column, row, column};
  };
  const Place beside = place(task - lane + (lane < kColumns ? -1 : 32)), own = place(task);
  window.read(x, own, beside, s.h_in, s.w_in);
  channels.divide(image, &channel);
  float taps[K][K], sums[kRows][kColumns];
  for (int a = 0; a < K; ++a)
    for (int b = 0; b < K; ++b) taps[a][b] = weight[(channel * K + a) * K + b];
  const float start = bias ? bias[channel] : 0;
  for (auto& of_row : sums)
    for (float& sum : of_row) sum = start;
  wait_for_copies();
#pragma unroll
  for (int t = 0; t < kIn; ++t) {
    float values[kColumns + K - 1];
    window.template row<K / 2>(t, group, tasks.groups.value(), values);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int a = t - r;
      if (a < 0 || a >= K) continue;
#pragma unroll
      for (int b = 0; b < K; ++b)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r][c] += taps[a][b] * values[c + b];
    }
  }
  __syncwarp();
  const int row = image < images ? strip * kRows : s.h_out, column = group * kColumns;
  const Place to{(image * s.h_out + row) * s.w_out + column, row, column};
  Lanes(to, s.h_out, s.w_out).write(out, sums, window.values[0]);
}

// Computes all three gradients, as in small.h. A task has 4 columns of dx.
template <int K>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<K>)
    backward_kernel(Sizes s, Tasks tasks, const float* __restrict__ x, const float* __restrict__ weight,
                    const float* __restrict__ dout, float* __restrict__ dx, float* __restrict__ partial) {
  constexpr int kRows = kBackwardRows, kTall = kRows + K - 1, kSums = K * K + 1;
  const int channel = blockIdx.x, part = blockIdx.y, parts = gridDim.y, lane = threadIdx.x % 32;
  __shared__ SharedTaps<K> taps;
  __shared__ Window<kTall> windows[kWarps];
  __shared__ alignas(16) float inputs[kWarps][kRows * kRow];
  Window<kTall>& window = windows[threadIdx.x / 32];
  float* const input = inputs[threadIdx.x / 32];
  taps.fill(weight, channel);
  float sums[kSums] = {};  // the last one is for the bias
  const int all = s.batch * tasks.strips.value() * tasks.groups.value(), end = part_begin(all, part + 1, parts);
#pragma unroll 1
  for (int task = part_begin(all, part, parts) + threadIdx.x; task - lane < end; task += kThreads) {
    int group, strip, n;
    const auto place = [&](int at) {
      n = tasks.strips.divide(tasks.groups.divide(max(at, 0), &group), &strip);
      const int row = n < s.batch ? strip * kRows + s.top - (K - 1) : s.h_out, column = group * kColumns;
      return Place{((n * s.channels + channel) * s.h_out + row) * s.w_out + column, row, column};
    };
    const Place beside = place(task - lane + (lane < kColumns ? -1 : 32)), own = place(task);
    window.read(dout, own, beside, s.h_out, s.w_out);
    const int row = task < end ? strip * kRows : s.h_in, column = group * kColumns;
    const Place here{((n * s.channels + channel) * s.h_in + row) * s.w_in + column, row, column};
    const Lanes lanes(here, s.h_in, s.w_in);
    lanes.read<kRows>(input, kRow, x);
    wait_for_copies();
    float values[kRows][kColumns], results[kRows][kColumns] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto pack = load<kColumns>(input + r * kRow + lane * kColumns);
      for (int c = 0; c < kColumns; ++c) values[r][c] = pack.values[c];
    }
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      float d[kColumns + K - 1];
      window.template row<K / 2>(t, group, tasks.groups.value(), d);
      // Each output is counted by the thread that has the input at its position.
      const bool counted = task < end && within(own.row + t - strip * kRows, kRows);
      float of_bias = 0;
#pragma unroll
      for (int j = K / 2; j < K / 2 + kColumns; ++j) of_bias += d[j];
      sums[K * K] += counted ? of_bias : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int a = r + K - 1 - t;
        if (a < 0 || a >= K) continue;
        float of_row[SharedTaps<K>::kPitch];
        taps.row(a, of_row);
#pragma unroll
        for (int b = 0; b < K; ++b) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const float gradient = d[c + K - 1 - b];
            results[r][c] += of_row[b] * gradient;
            sums[a * K + b] += values[r][c] * gradient;
          }
        }
      }
    }
    __syncwarp();
    lanes.write(dx, results, input);
    __syncwarp();
  }
  write_sums(sums, channel, s.channels, part, partial);
}

// Calls `f(Constant<K>{})` if these kernels take the convolution, where no window reaches beyond the pieces of its row.
template <typename F>
void with_kernel(const Convolution& s, int64_t largest, std::initializer_list<const float*> pointers, F&& f) {
  bool packs = false;
  with_width<float>(false, s.w.in | s.w.out, pointers, [&](auto width) { packs = width > 1; });
  if (packs || largest > kLargest32 / 2 || s.w.in != s.w.out || s.w.pad != s.w.kernel / 2) return;
  // Rows above an image are addressed, too.
  if ((s.h.kernel + s.h.padding) * s.w.in > kLargest32 / 2 || s.h.in * s.w.in * s.h.out == 0) return;
  with_square_weights(s, largest, [&](auto kernel, auto stride) {
    if constexpr (stride == 1) f(kernel);
  });
}

// These return what the functions of small.h return.
inline bool forward(Call& call, const Convolution& s, int64_t largest, const float* x, const float* weight,
                    const float* bias, float* out) {
  bool done = false;
  with_kernel(s, largest, {x, out}, [&](auto kernel) {
    const int64_t strips = (s.h.out - 1) / kForwardRows + 1, groups = (s.w.out - 1) / kColumns + 1;
    const int64_t threads = s.batch * s.channels * strips * groups, blocks = (threads - 1) / kThreads + 1;
    constexpr int K = kernel;
    launch(call, forward_kernel<K>, blocks, kThreads, 0, Sizes(s), {Divisor(strips), Divisor(groups)},
           Divisor(s.channels), x, weight, bias, out);
    done = true;
  });
  return done;
}

inline int64_t backward(Call& call, const Convolution& s, int64_t largest, const float* x, const float* weight,
                        const float* dout, float* dx, float* partial, int64_t rows) {
  int64_t parts = 0;
  with_kernel(s, largest, {x, dout, dx}, [&](auto kernel) {
    constexpr int K = kernel;
    if (s.h.padding >= K) return;  // or an output without an input at its position would not be counted
    const int64_t strips = (s.h.in - 1) / kBackwardRows + 1, groups = (s.w.in - 1) / kColumns + 1;
    [[maybe_unused]] static FactOfGpu<> fact;
    const int at_once = fact.get([] { return blocks_at_once(Gpu(), backward_kernel<K>, kThreads, 0); });
    parts = best_parts(s.channels, s.batch * strips * groups, kThreads, rows, at_once);
    launch(call, backward_kernel<K>, {s.channels, parts}, kThreads, 0, Sizes(s), {Divisor(strips), Divisor(groups)}, x,
           weight, dout, dx, partial);
  });
  return parts;
}

}  // namespace msops::depthwise::staged

#endif
