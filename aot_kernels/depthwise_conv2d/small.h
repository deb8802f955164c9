// These kernels compute the depthwise convolution for square weights of K = 3, 5 or 7, strides of S = 1 or 2, no
// dilation, multiplier 1.
//
// A thread computes kRows x kColumns neighbouring results in registers. It walks down the rows that they need, reads of
// each row what their windows meet, and uses it for all results that meet it. What neighbouring threads read, too,
// comes from the L1 cache; copying tiles to shared memory first took a quarter longer on an H200, because of its
// barriers. V elements are moved at once; with V > 1 the padding on the left is K / 2.
#pragma once

#include "tasks.h"

#ifdef __CUDACC__

namespace msops::depthwise::small {

using namespace tasks;

constexpr int kForwardRows = 7;
template <int K>
constexpr int kBackwardRows = K == 3 ? 2 : 4;

// These say whether mma.h takes all that a kernel for packs of V would, which is then empty in code for sm_80 or
// later.
template <int V, typename T>
constexpr bool kForwardIsHalfs = sizeof(T) == 2 && V > 1;
template <int S, int V, typename T>
constexpr bool kBackwardIsHalfs = sizeof(T) == 2 && V > 1 && S == 1;

// Reads elements column + kFirst, ... of a row of `width` elements; they are zero outside it, and where the row is not
// `inside`. `column` and `width` are multiples of V.
template <int V, int kFirst, int kCount, typename T>
__device__ void read_window(const T* row, int column, int width, bool inside, float (&values)[kCount]) {
  constexpr int kEnd = kFirst + kCount, kBegin = (kFirst - (kFirst < 0 ? V - 1 : 0)) / V * V;
#pragma unroll
  for (int at = kBegin; at < kEnd; at += V) {
    const bool valid = inside && within(column + at, width);
    const int first = at < kFirst ? kFirst : at, end = at + V > kEnd ? kEnd : at + V;
    if (end - first == 1) {
      values[first - kFirst] = valid ? float(row[column + first]) : 0;
    } else {
      Pack<T, V> pack = {};
      if (valid) pack = load<V>(row + column + at);
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (at + j >= kFirst && at + j < kEnd) values[at + j - kFirst] = float(pack.values[j]);
    }
  }
}

template <int V, int kCount, typename T>
__device__ void write_row(T* row, int column, int width, bool inside, const float (&values)[kCount]) {
#pragma unroll
  for (int c = 0; c < kCount; c += V) {
    Pack<T, V> pack;
    for (int j = 0; j < V; ++j) pack.values[j] = T(values[c + j]);
    if (inside && within(column + c, width)) store(row + column + c, pack);
  }
}

template <int K, int S, int V, typename T>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<K, S>)
    forward_kernel(Sizes s, Tasks tasks, Divisor channels, const T* __restrict__ x, const T* __restrict__ weight,
                   const T* __restrict__ bias, T* __restrict__ out) {
  if (kForwardIsHalfs<V, T> && has_instructions_of(80)) return;
  constexpr int kRows = kForwardRows, kColumns = V;
  int group, strip, channel;
  const int image = tasks.strips.divide(tasks.groups.divide(blockIdx.x * kThreads + threadIdx.x, &group), &strip);
  if (channels.divide(image, &channel) >= s.batch) return;
  const int row = strip * kRows, column = group * kColumns;
  float taps[K][K], sums[kRows][kColumns];
  for (int a = 0; a < K; ++a)
    for (int b = 0; b < K; ++b) taps[a][b] = float(weight[(channel * K + a) * K + b]);
  const float start = bias ? float(bias[channel]) : 0;
  for (auto& of_row : sums)
    for (float& sum : of_row) sum = start;
  x += image * s.h_in * s.w_in;
  out += image * s.h_out * s.w_out;
#pragma unroll
  for (int t = 0; t < (kRows - 1) * S + K; ++t) {
    const int at = row * S - s.top + t;
    float values[(kColumns - 1) * S + K];
    read_window<V, (V > 1 ? -(K / 2) : 0)>(x + at * s.w_in, column * S - (V > 1 ? 0 : s.left), s.w_in,
                                           within(at, s.h_in), values);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int a = t - r * S;
      if (a < 0 || a >= K) continue;
#pragma unroll
      for (int b = 0; b < K; ++b)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r][c] += taps[a][b] * values[c * S + b];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) write_row<V>(out + (row + r) * s.w_out, column, s.w_out, row + r < s.h_out, sums[r]);
}

// Computes all gradients from one reading of x and dout. Input position i meets tap k in output (i + pad - k) / S,
// where that is whole. A thread's inputs begin at rows where i + pad is a multiple of S, and at columns where that
// leaves kPhase: which inputs meet which taps is then the same for all threads. A block takes one channel and one part
// of its tasks.
template <int K, int S, int V, typename T>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<K>)
    backward_kernel(Sizes s, Tasks tasks, const T* __restrict__ x, const T* __restrict__ weight,
                    const T* __restrict__ dout, T* __restrict__ dx, float* __restrict__ partial) {
  if (kBackwardIsHalfs<S, V, T> && has_instructions_of(80)) return;
  constexpr int kRows = kBackwardRows<K>, kColumns = V > S ? V : S, kSums = K * K + 1;
  constexpr int kPhase = V > 1 ? K / 2 % S : 0;
  constexpr int kAbove = (K - 1) / S, kBefore = (K - 1 - kPhase) / S;  // outputs before that of the first input
  constexpr int kTall = kAbove + (kRows - 1) / S + 1, kWide = kBefore + (kColumns - 1 + kPhase) / S + 1;
  constexpr int kFirst = V > 1 ? (K / 2 - kPhase) / S - kBefore : 0;
  const int channel = blockIdx.x, part = blockIdx.y, parts = gridDim.y;
  __shared__ SharedTaps<K> taps;
  taps.fill(weight, channel);
  float sums[kSums] = {};  // the last one is for the bias
  const int all = s.batch * tasks.strips.value() * tasks.groups.value(), end = part_begin(all, part + 1, parts);
#pragma unroll 1
  for (int task = part_begin(all, part, parts) + threadIdx.x; task < end; task += kThreads) {
    int group, strip;
    const int n = tasks.strips.divide(tasks.groups.divide(task, &group), &strip), image = n * s.channels + channel;
    const int row = strip * kRows - s.top % S, column = group * kColumns - (V > 1 ? 0 : s.left % S);
    const int out_row = (row + s.top) / S - kAbove, out_column = V > 1 ? column / S : (column + s.left) / S - kBefore;
    float values[kRows][kColumns], results[kRows][kColumns] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      read_window<V, 0>(x + (image * s.h_in + row + r) * s.w_in, column, s.w_in, within(row + r, s.h_in), values[r]);
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      const int at = out_row + t;
      float d[kWide];
      read_window<(V > S ? V / S : 1), kFirst>(dout + (image * s.h_out + at) * s.w_out, out_column, s.w_out,
                                               within(at, s.h_out), d);
      // An output is counted by the thread that has the input S times its position.
      const bool counted = within(at - strip * (kRows / S), kRows / S);
      float of_bias = 0;
#pragma unroll
      for (int j = 0; j < kWide; ++j)
        if (V > 1 ? j + kFirst >= 0 && j + kFirst < V / S : out_column + j == group) of_bias += d[j];
      sums[K * K] += counted ? of_bias : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int a = r - S * (t - kAbove);
        if (a < 0 || a >= K) continue;
        float of_row[SharedTaps<K>::kPitch];
        taps.row(a, of_row);
#pragma unroll
        for (int b = 0; b < K; ++b) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            if ((c + kPhase + K * S - b) % S != 0) continue;
            const float gradient = d[(c + kPhase + S * kBefore - b) / S];
            results[r][c] += of_row[b] * gradient;
            sums[a * K + b] += values[r][c] * gradient;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      write_row<V>(dx + (image * s.h_in + row + r) * s.w_in, column, s.w_in, within(row + r, s.h_in), results[r]);
  }
  write_sums(sums, channel, s.channels, part, partial);
}

// Returns false, and does nothing, if the convolution is not for these kernels.
template <typename T>
bool forward(Call& call, const Convolution& s, int64_t largest, const T* x, const T* weight, const T* bias, T* out) {
  bool done = false;
  with_square_weights(s, largest, [&](auto kernel, auto stride) {
    constexpr int K = kernel, S = stride;
    if (s.h.out * s.w.out == 0) return;
    with_width<T>(false, s.w.pad == K / 2 ? s.w.in | s.w.out : 1, {x, out}, [&](auto width) {
      constexpr int V = width;
      const auto kernel = forward_kernel<K, S, V, T>;
      [[maybe_unused]] static FactOfGpu<> is_empty;
      if (kForwardIsHalfs<V, T> && is_empty.get([=] { return is_compiled_for(80, kernel); })) return;
      const int64_t strips = (s.h.out - 1) / kForwardRows + 1, groups = s.w.out / V;
      const int64_t threads = s.batch * s.channels * strips * groups, blocks = (threads - 1) / kThreads + 1;
      launch(call, kernel, blocks, kThreads, 0, Sizes(s), {Divisor(strips), Divisor(groups)}, Divisor(s.channels), x,
             weight, bias, out);
      done = true;
    });
  });
  return done;
}

// Returns how many rows of `partial` it wrote, at most `rows`. Returns 0, and does nothing, if the convolution is not
// for these kernels.
template <typename T>
int64_t backward(Call& call, const Convolution& s, int64_t largest, const T* x, const T* weight, const T* dout, T* dx,
                 float* partial, int64_t rows) {
  int64_t parts = 0;
  with_square_weights(s, largest, [&](auto kernel, auto stride) {
    constexpr int K = kernel, S = stride;
    // Every output must have the input S times its position, or it would not be counted.
    for (const Axis& axis : {s.h, s.w})
      if (axis.padding >= K || axis.in == 0) return;
    with_width<T>(false, s.w.pad == K / 2 ? s.w.in | s.w.out * S : 1, {x, dout, dx}, [&](auto width) {
      constexpr int V = width, kColumns = V > S ? V : S;
      const auto kernel = backward_kernel<K, S, V, T>;
      [[maybe_unused]] static FactOfGpu<> is_empty, fact;
      if (kBackwardIsHalfs<S, V, T> && is_empty.get([=] { return is_compiled_for(80, kernel); })) return;
      const int64_t strips = (s.h.in + s.h.pad % S - 1) / kBackwardRows<K> + 1;
      const int64_t groups = (s.w.in + (V > 1 ? 0 : s.w.pad % S) - 1) / kColumns + 1;
      const int at_once = fact.get([=] { return blocks_at_once(Gpu(), kernel, kThreads, 0); });
      parts = best_parts(s.channels, s.batch * strips * groups, kThreads, rows, at_once);
      launch(call, kernel, {s.channels, parts}, kThreads, 0, Sizes(s), {Divisor(strips), Divisor(groups)}, x, weight,
             dout, dx, partial);
    });
  });
  return parts;
}

}  // namespace msops::depthwise::small

#endif
