// The GPU's tensor cores compute the depthwise convolution in float16: kernels of K = 3, 5 or 7 rows and up to 9
// columns (18 with stride 2), no dilation, multiplier 1.
//
// A strip is 8 columns of results in the kRows rows of a band of an image. A warp takes 16 strips of one channel. Along
// a row, the results of a strip are its window, 16 S columns of the input, times a band matrix of a row of taps: one
// instruction multiplies a window row of all 16 strips. Products are exact, and summed as float. The band's zeros meet
// elements, too: an infinity in a strip's window makes the strip's results NaN.
#pragma once

#include "mma_odd.h"

#ifdef __CUDACC__

namespace msops::depthwise::mma {

constexpr int kBackwardRows = 8;  // even, since it takes rows of x in pairs

// With more rows of taps, blocks are smaller, and more of them fit on a multiprocessor.
template <int K>
constexpr int kBackwardThreads = K > 5 ? 64 : 128;
template <int V>
constexpr int kBuffers = V > 1 ? 2 : 1;

// Loads four neighbouring elements, of which each V are `inside` or are zero.
template <int V>
__device__ uint2 load_four(const Half* from, const bool (&inside)[4 / V]) {
  if constexpr (V == 4) return inside[0] ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(from);
  return make_uint2(inside[0] ? pairs[0] : 0, inside[4 / V - 1] ? pairs[1] : 0);
}

// Window columns are taken in an order in which a thread's columns are neighbours: its pairs begin at columns 4 q and 4
// q + 2, where q = lane % 4. V elements are read at once; they are all in the image, or none.
template <int K, int S, int V>
__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(Sizes s, Windows w, Divisor channels, const Half* __restrict__ x, const Half* __restrict__ weight,
                   const Half* __restrict__ bias, Half* __restrict__ out) {
  if (!has_instructions_of(80)) return;
  constexpr int kRows = kForwardRows, kIn = (kRows - 1) * S + K;
  const int lane = threadIdx.x % 32, q = lane % 4;
  int channel;
  const int tile = channels.divide((blockIdx.x * kForwardThreads + threadIdx.x) / 32, &channel);
  if (tile >= w.tiles) return;
  uint32_t taps[K][S][2];
  for (int a = 0; a < K; ++a) {
    const Half* row = weight + (channel * K + a) * w.k_columns;
    for (int chunk = 0; chunk < S; ++chunk) {
      for (int i = 0; i < 2; ++i) {
        const int j = chunk * kWindow + 4 * q + 2 * i;
        taps[a][chunk][i] = pair_of(tap_at<S, false>(row, w, j), tap_at<S, false>(row, w, j + 1));
      }
    }
  }
  const Half* from[2];
  Half* to[2];
  int in_row[2], out_row[2];
  bool inside[2][S][4 / V], out_inside[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const Strip strip(w, s, tile * kStrips + u * 8 + lane / 4, channel, kRows, s.h_out);
    const int in_column = strip.column * S - w.left + 4 * q, out_column = strip.column + 2 * q;
    out_row[u] = strip.row;
    in_row[u] = strip.row < s.h_out ? strip.row * S - s.top : s.h_in;
    out_inside[u] = out_column < s.w_out;
    from[u] = x + (strip.image * s.h_in + in_row[u]) * s.w_in + in_column;
    to[u] = out + (strip.image * s.h_out + out_row[u]) * s.w_out + out_column;
#pragma unroll
    for (int chunk = 0; chunk < S; ++chunk)
#pragma unroll
      for (int p = 0; p < 4 / V; ++p) inside[u][chunk][p] = within(in_column + chunk * kWindow + p * V, s.w_in);
  }
  float sums[kRows][4];
  start_sums(sums, bias, channel);
  uint32_t windows[kIn][S][4];  // all loads are in flight at once
#pragma unroll
  for (int t = 0; t < kIn; ++t) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool row_inside = within(in_row[u] + t, s.h_in);
#pragma unroll
      for (int chunk = 0; chunk < S; ++chunk) {
        bool here[4 / V];
        for (int p = 0; p < 4 / V; ++p) here[p] = row_inside && inside[u][chunk][p];
        const uint2 four = load_four<V>(from[u] + chunk * kWindow, here);
        windows[t][chunk][u] = four.x;
        windows[t][chunk][2 + u] = four.y;
      }
      from[u] += s.w_in;
    }
  }
  __syncwarp();  // else the compiler would delay some loads
#pragma unroll
  for (int t = 0; t < kIn; ++t) multiply_row<K>(sums, t, windows[t], taps);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (out_inside[u] && out_row[u] + r < s.h_out)
        *reinterpret_cast<uint32_t*>(to[u]) = pair_of(Half(sums[r][2 * u]), Half(sums[r][2 * u + 1]));
      to[u] += s.w_out;
    }
  }
}

// Writes the sums of a block's warps, for the gradients of a channel's taps and its bias, to a part's row of `partial`.
template <int K>
__device__ __forceinline__ void write_sums(const float (&products)[K + 1][2][4], const float (&of_bias)[4],
                                           const Windows& w, int channel, int channels, int part, float4* shared,
                                           float* __restrict__ partial) {
  constexpr int kThreads = kBackwardThreads<K>, kWarps = kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
  auto* of_warps = reinterpret_cast<float (*)[K + 1][kWindow][17]>(shared);  // 17 to spread columns over the banks
  __shared__ float bias_of_warps[kWarps];
#pragma unroll
  for (int d = 0; d <= K; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        of_warps[warp][d][8 * half + 2 * q + i % 2][lane / 4 + i / 2 * 8] = products[d][half][i];
  const float bias_sum = team_sum<32>(q == 0 ? of_bias[0] + of_bias[2] : 0);  // all columns of of_bias are the same
  if (lane == 0) bias_of_warps[warp] = bias_sum;
  __syncthreads();
  const int kernel = K * w.k_columns;
  float* to = partial + static_cast<int64_t>(part) * channels * (kernel + 1);
  // Tap (a, b) is met by column i of x and column i + k_columns - 1 - b of the window, counted from `shift`.
  for (int k = threadIdx.x; k <= kernel; k += kThreads) {
    const int a = k / w.k_columns, b = k % w.k_columns;
    float sum = 0;
    for (int of_warp = 0; of_warp < kWarps; ++of_warp) {
      if (k == kernel) {
        sum += bias_of_warps[of_warp];
        continue;
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int j = i + w.k_columns - 1 - b + w.shift;
        sum += of_warps[of_warp][K - 1 - a][j][i] + of_warps[of_warp][K - a][j][i + 8];
      }
    }
    to[k < kernel ? channel * kernel + k : channels * kernel + channel] = sum;
  }
}

// Computes all gradients for stride 1, in strips of dx. Each window row t of dout adds to
//   dx: as forward, with the taps reversed;
//   dweight: for each pair of rows of x, the products of x's elements and the window's, summed over the 16 strips; the
//     gradients of the taps are sums along diagonals of these, taken at the end;
//   dbias: the strips' own columns of the window times ones.
// A block takes one channel and one part of its tiles. A warp copies a tile to shared memory while it works on the one
// before.
template <int K, int V>
__global__ void __launch_bounds__(kBackwardThreads<K>)
    backward_kernel(Sizes s, Windows w, const Half* __restrict__ x, const Half* __restrict__ weight,
                    const Half* __restrict__ dout, Half* __restrict__ dx, float* __restrict__ partial) {
  if (!has_instructions_of(80)) return;
  constexpr int kRows = kBackwardRows, kIn = kRows - 1 + K, kThreads = kBackwardThreads<K>, kWarps = kThreads / 32;
  constexpr int kX = kIn * kStrips * kWindow, kTile = kX + kRows * kStrips * kColumns;  // rows of x after the windows
  extern __shared__ float4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
  const int channel = blockIdx.x, part = blockIdx.y, parts = gridDim.y;
  Half* const tiles = reinterpret_cast<Half*>(shared) + warp * kBuffers<V> * kTile;
  // A window row's halves change places where strip / 4 is odd, so that 8 strips' halves lie in different banks.
  const auto window_at = [](int t, int strip, int half) {
    return (t * kStrips + strip) * kWindow + (half ^ strip / 4 % 2) * 8;
  };
  const int end = part_begin(w.tiles, part + 1, parts);
  const auto copy = [&](int tile, Half* to_tile) {
    if constexpr (V == 1) {
      const int images = s.batch * s.channels, half = lane % 2, row = lane / 16;
      const Strip of_window(w, s, tile * kStrips + lane / 2, channel, kRows, s.h_in);
      const Strip of_x(w, s, tile * kStrips + lane % 16, channel, kRows, s.h_in);
      const Eights<kIn, true> windows(dout, images, of_window.image,
                                      of_window.row < s.h_in ? of_window.row + s.top - (K - 1) : s.h_out,
                                      of_window.column - w.left + half * 8, s.h_out, s.w_out, w.margin, 1);
      const Eights<kRows / 2, false> inputs(x, images, of_x.image, of_x.row + row, of_x.column, s.h_in, s.w_in,
                                            w.margin, 2);
      __syncwarp();
      windows.write(to_tile + window_at(0, lane / 2, half), kStrips * kWindow);
      inputs.write(to_tile + kX + (row * kStrips + lane % 16) * kColumns, 2 * kStrips * kColumns);
    } else {
      if (tile < end) {
        constexpr int kLanes = kWindow / V, kXLanes = kColumns / V;  // for a row of a strip
#pragma unroll
        for (int first = 0; first < kStrips; first += 32 / kLanes) {
          const int in_tile = first + lane / kLanes, at = lane % kLanes * V;
          const Strip strip(w, s, tile * kStrips + in_tile, channel, kRows, s.h_in);
          const int column = strip.column - w.left + at,
                    row = strip.row < s.h_in ? strip.row + s.top - (K - 1) : s.h_out;
          const bool inside = within(column, s.w_out);
          const Half* from = dout + (strip.image * s.h_out + row) * s.w_out + column;
          Half* to = to_tile + window_at(0, in_tile, at / 8) + at % 8;
#pragma unroll
          for (int t = 0; t < kIn; ++t, from += s.w_out)
            cp_async<2 * V>(to + t * kStrips * kWindow, from, inside && within(row + t, s.h_out));
        }
#pragma unroll
        for (int first = 0; first < kStrips; first += 32 / kXLanes) {
          const int in_tile = first + lane / kXLanes, at = lane % kXLanes * V;
          const Strip strip(w, s, tile * kStrips + in_tile, channel, kRows, s.h_in);
          const Half* from = x + (strip.image * s.h_in + strip.row) * s.w_in + strip.column + at;
          Half* to = to_tile + kX + in_tile * kColumns + at;
#pragma unroll
          for (int r = 0; r < kRows; ++r, from += s.w_in)
            cp_async<2 * V>(to + r * kStrips * kColumns, from, strip.column + at < s.w_in && strip.row + r < s.h_in);
        }
      }
      cp_async_commit();
    }
  };
  const int begin = part_begin(w.tiles, part, parts) + warp;
  if (V > 1) copy(begin, tiles);
  uint32_t taps[K][2], ones[2];
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * q + 8 * i;
    for (int t = 0; t < K; ++t) {
      const Half* row = weight + (channel * K + K - 1 - t) * w.k_columns;
      taps[t][i] = pair_of(tap_at<1, true>(row, w, j), tap_at<1, true>(row, w, j + 1));
    }
    const Half one(1.f), zero(0.f);
    ones[i] = pair_of(within(j - w.left, kColumns) ? one : zero, within(j + 1 - w.left, kColumns) ? one : zero);
  }
  float products[K + 1][2][4] = {}, of_bias[4] = {};  // products[t - the pair's row][half of the window]
  int current = 0;
#pragma unroll 1
  for (int tile = begin; tile < end; tile += kWarps, current ^= 1) {
    if constexpr (V > 1) {
      copy(tile + kWarps, tiles + (current ^ 1) * kTile);
      cp_async_wait<1>();
    } else {
      copy(tile, tiles);
    }
    __syncwarp();
    const Half* const here = tiles + (V > 1 ? current : 0) * kTile;
    float sums[kRows][4] = {};
    uint32_t inputs[kRows / 2][4];
    // Matrix m of four is row r + m % 2 of x, with strips from 8 (m / 2) on.
#pragma unroll
    for (int r = 0; r < kRows; r += 2)
      ldmatrix_x4_trans(
          inputs[r / 2],
          shared_address(here + kX + ((r + lane / 8 % 2) * kStrips + lane / 16 * 8 + lane % 8) * kColumns));
#pragma unroll
    for (int t = 0; t < kIn; ++t) {
      // Matrix m of four has strips from 8 (m % 2) on, and half m / 2 of the window.
      const unsigned row = shared_address(here + window_at(t, lane / 8 % 2 * 8 + lane % 8, lane / 16));
      uint32_t window[4], transposed[4];
      ldmatrix_x4(window, row);
      ldmatrix_x4_trans(transposed, row);
      const uint32_t halves[2][2] = {{transposed[0], transposed[1]}, {transposed[2], transposed[3]}};
      const bool counted = within(t + s.top - (K - 1), kRows);
      mma_m16n8k16(of_bias, window, {counted ? ones[0] : 0, counted ? ones[1] : 0});
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (t >= r && t < r + K) mma_m16n8k16(sums[r], window, taps[t - r]);
#pragma unroll
      for (int r = 0; r < kRows; r += 2)
        if (t >= r && t <= r + K)
          for (int half = 0; half < 2; ++half) mma_m16n8k16(products[t - r][half], inputs[r / 2], halves[half]);
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const Strip strip(w, s, tile * kStrips + u * 8 + lane / 4, channel, kRows, s.h_in);
      const int column = strip.column + 2 * q;
      if constexpr (V == 1) {
        const PairsOut<kRows> to(dx, s.batch * s.channels, strip.image, strip.row, column, s.h_in, s.w_in);
#pragma unroll
        for (int r = 0; r < kRows; ++r) to.write(r, sums[r][2 * u], sums[r][2 * u + 1]);
        continue;
      }
      Half* to = dx + (strip.image * s.h_in + strip.row) * s.w_in + column;
#pragma unroll
      for (int r = 0; r < kRows; ++r, to += s.w_in)
        if (column < s.w_in && strip.row + r < s.h_in)
          *reinterpret_cast<uint32_t*>(to) = pair_of(Half(sums[r][2 * u]), Half(sums[r][2 * u + 1]));
    }
    __syncwarp();
  }
  __syncthreads();
  write_sums<K>(products, of_bias, w, channel, s.channels, part, shared, partial);
}

// Returns false, and does nothing, if the convolution is not for these kernels.
inline bool forward(Call& call, const Convolution& s, int64_t largest, const Half* x, const Half* weight,
                    const Half* bias, Half* out) {
  bool done = false;
  with_constant<1, 2>(s.w.stride, [&](auto stride) {
    constexpr int S = stride;
    with_kernel<S>(s, largest, s.w.pad, {x, out}, s.h.out, s.w.out, kForwardRows, [&](auto k, auto pack, auto windows) {
      const auto kernel = [] {
        constexpr int K = decltype(k)::value, V = decltype(pack)::value;
        if constexpr (V > 1) {
          return forward_kernel<K, S, V>;
        } else {
          return odd_forward_kernel<K, S>;
        }
      }();
      // In narrow images with few taps, the many writes of parts of 32 bytes would take longer than everything else.
      if (pack == 1 && s.h.kernel == 3 && s.w.out <= kColumns) return;
      [[maybe_unused]] static FactOfGpu<> fact;
      if (!fact.get([=] { return is_compiled_for(80, kernel); })) return;
      const int64_t blocks = (windows.tiles * s.channels * 32 - 1) / kForwardThreads + 1;
      launch(call, kernel, blocks, kForwardThreads, 0, Sizes(s), windows, Divisor(s.channels), x, weight, bias, out);
      done = true;
    });
  });
  return done;
}

// Returns how many rows of `partial` it wrote, at most `rows`. Returns 0, and does nothing, if the convolution is not
// for these kernels.
inline int64_t backward(Call& call, const Convolution& s, int64_t largest, const Half* x, const Half* weight,
                        const Half* dout, Half* dx, float* partial, int64_t rows) {
  // Every output must be in a column and row of dx, or it would not be counted.
  if (s.h.padding >= s.h.kernel || s.w.padding >= s.w.kernel) return 0;
  int64_t parts = 0;
  const int64_t pad = s.w.kernel - 1 - s.w.pad;
  with_kernel<1>(s, largest, pad, {x, dout, dx}, s.h.in, s.w.in, kBackwardRows, [&](auto k, auto pack, auto windows) {
    constexpr int K = decltype(k)::value, V = decltype(pack)::value;
    constexpr int kThreads = kBackwardThreads<K>, kWarps = kThreads / 32;
    constexpr int kTile = (kBackwardRows - 1 + K) * kStrips * kWindow + kBackwardRows * kStrips * kColumns;
    constexpr int kBytes =
        kWarps * std::max<int>(kBuffers<V> * kTile * sizeof(Half), (K + 1) * kWindow * 17 * sizeof(float));
    const auto kernel = backward_kernel<K, V>;
    [[maybe_unused]] static FactOfGpu<> fact;
    const int at_once =
        fact.get([=] { return is_compiled_for(80, kernel) ? blocks_at_once(Gpu(), kernel, kThreads, kBytes) : 0; });
    if (at_once == 0) return;
    parts = best_parts(s.channels, windows.tiles, kWarps, rows, at_once);
    launch(call, kernel, {s.channels, parts}, kThreads, kBytes, Sizes(s), windows, x, weight, dout, dx, partial);
  });
  return parts;
}

}  // namespace msops::depthwise::mma

#endif
