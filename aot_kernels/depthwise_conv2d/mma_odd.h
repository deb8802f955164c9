// This is what mma.h does differently where rows begin anywhere: images of odd width, and arrays that begin between
// aligned pairs of elements. Rows are read and written as the aligned pairs that contain the elements, and shifted in
// registers.
#pragma once

#include "mma_tiles.h"

#ifdef __CUDACC__

namespace msops::depthwise::mma {

// Returns a mask of those elements of a pair at `column` that are in the row.
__device__ inline uint32_t mask_of(int column, int width) {
  return (within(column, width) ? 0xffff : 0) | (within(column + 1, width) ? 0xffff0000 : 0);
}

// Pairs is a thread's place in rows of images that begin anywhere, taken as aligned pairs of elements.
struct Pairs {
  uint32_t* pairs;
  int at[2], pitch;   // at: of an even and an odd row; pitch: pairs from a row to the next but one
  uint32_t shift[2];  // bits to the row's first element
  int row, height;    // of its image
  int safe, count;    // rows whose pairs are in the array, even those beyond the row's ends

  __device__ Pairs(const Half* array, int images, int image, int row, int column, int height, int width, int margin,
                   int step = 1)
      : pitch(width * step), row(row), height(height) {
    const int odd = reinterpret_cast<uintptr_t>(array) / 2 % 2;
    pairs = reinterpret_cast<uint32_t*>(const_cast<Half*>(array) - odd);
    for (int i = 0; i < 2; ++i) {
      const int element = (image * height + row + i * step) * width + column + odd;
      at[i] = element >> 1;
      shift[i] = (element & 1) * 16;
    }
    safe = max(margin - image * height, 0);
    count = max(min((images - image) * height - margin, height) - safe, 0);
  }
  __device__ uint32_t* of_row(int i) const { return pairs + (at[i % 2] + i / 2 * pitch); }
  __device__ bool is_safe(int at) const { return within(row + at - safe, count); }
  // Returns whether the image has the row, but it is not safe.
  __device__ bool is_edge(int at) const { return within(row + at, height) && !is_safe(at); }
  __device__ bool has_edges() const { return count < height; }
};

// Returns the elements of a pair that are in the row; the others are zero.
__device__ inline uint32_t pair_within(const uint32_t* pair, int column, int width) {
  const Half* const from = reinterpret_cast<const Half*>(pair);
  return pair_of(within(column, width) ? from[0] : Half(0.f), within(column + 1, width) ? from[1] : Half(0.f));
}

// Writes a warp's results of kRows rows, of which a thread has two neighbours at `column`. In rows that begin between
// aligned pairs, the second one is written with the next thread's first.
template <int kRows>
struct PairsOut {
  Pairs to;
  int paired[2], single[2];  // how many rows are written as pairs, or one element by itself
  int single_shift[2];       // which one of the two
  bool both_alone[2];

  __device__ PairsOut(Half* array, int images, int image, int row, int column, int height, int width)
      : to(array, images, image, row, column, height, width, 0) {
    const int lane = threadIdx.x % 32, rows = height - row;
    for (int i = 0; i < 2; ++i) {
      const bool odd = to.shift[i] != 0, last = lane == 31 || column + 2 == width;
      to.at[i] += odd;
      paired[i] = column + odd + 1 < width && !(odd && lane == 31) ? rows : 0;
      const bool first_alone = odd ? column < width && (column == 0 || lane == 0) : column + 1 == width;
      const bool second_alone = odd && column + 1 < width && last;
      single[i] = first_alone || second_alone ? rows : 0;
      single_shift[i] = second_alone ? 16 : 0;
      both_alone[i] = first_alone && second_alone;
    }
  }
  __device__ void write(int r, float first, float second) const {
    const __half2 both = __floats2half2_rn(first, second);
    uint32_t own;
    memcpy(&own, &both, sizeof own);
    const uint32_t next = __shfl_down_sync(~0u, own, 1);
    uint32_t* const pair = to.of_row(r);
    if (r < paired[r % 2]) *pair = __funnelshift_r(own, next, to.shift[r % 2]);
    // Alone, the second element is the first of its pair; the first element is that, too, or the one before the pair.
    if (r < single[r % 2])
      *(reinterpret_cast<uint16_t*>(pair) - (to.shift[r % 2] - single_shift[r % 2]) / 16) =
          static_cast<uint16_t>(own >> single_shift[r % 2]);
    if (both_alone[r % 2] && r < single[r % 2]) *(reinterpret_cast<uint16_t*>(pair) - 1) = static_cast<uint16_t>(own);
  }
};

// Eights are a thread's 8 elements of each of kCount rows, at a distance of `step` rows, for 16 bytes in shared memory.
// If kNext, the pair after them is the next thread's first.
template <int kCount, bool kNext>
struct Eights {
  Pairs in;
  int column, width, step;
  uint32_t pairs[kCount][kNext ? 4 : 5];

  __device__ Eights(const Half* array, int images, int image, int row, int column, int height, int width, int margin,
                    int step)
      : in(array, images, image, row, column, height, width, margin, step), column(column), width(width), step(step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int k = 0; k < (kNext ? 4 : 5); ++k) pairs[i][k] = in.is_safe(i * step) ? in.of_row(i)[k] : 0;
  }

  __device__ void write(Half* to, int pitch) const {
    uint32_t masks[4];
    for (int k = 0; k < 4; ++k) masks[k] = mask_of(column + 2 * k, width);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t behind = kNext ? __shfl_down_sync(~0u, pairs[i][0], 1) : pairs[i][kNext ? 0 : 4];
      const uint32_t shift = in.shift[i % 2];
      uint4 eight;
      eight.x = __funnelshift_r(pairs[i][0], pairs[i][1], shift) & masks[0];
      eight.y = __funnelshift_r(pairs[i][1], pairs[i][2], shift) & masks[1];
      eight.z = __funnelshift_r(pairs[i][2], pairs[i][3], shift) & masks[2];
      eight.w = __funnelshift_r(pairs[i][3], behind, shift) & masks[3];
      *reinterpret_cast<uint4*>(to + i * pitch) = eight;
    }
    if (!in.has_edges()) return;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      if (!in.is_edge(i * step)) continue;
      const Half* const from =
          reinterpret_cast<const Half*>(in.pairs + ((i % 2 ? in.at[1] : in.at[0]) + i / 2 * in.pitch)) +
          (i % 2 ? in.shift[1] : in.shift[0]) / 16;
      for (int j = 0; j < 8; ++j) to[i * pitch + j] = within(column + j, width) ? from[j] : Half(0.f);
    }
  }
};

// Works as forward_kernel in mma.h. In a row that begins between two aligned pairs, a thread's last pair comes from
// the next thread.
template <int K, int S>
__global__ void __launch_bounds__(kForwardThreads)
    odd_forward_kernel(Sizes s, Windows w, Divisor channels, const Half* __restrict__ x,
                       const Half* __restrict__ weight, const Half* __restrict__ bias, Half* __restrict__ out) {
  if (!has_instructions_of(80)) return;
  constexpr int kRows = kForwardRows, kIn = (kRows - 1) * S + K;
  const int lane = threadIdx.x % 32, q = lane % 4, images = s.batch * s.channels;
  int channel;
  const int tile = channels.divide((blockIdx.x * kForwardThreads + threadIdx.x) / 32, &channel);
  if (tile >= w.tiles) return;
  uint32_t windows[kIn][S][4], shifts[2][2], masks[2][S][2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const Strip strip(w, s, tile * kStrips + u * 8 + lane / 4, channel, kRows, s.h_out);
    const int column = strip.column * S - w.left + 4 * q;
    const Pairs in(x, images, strip.image, strip.row < s.h_out ? strip.row * S - s.top : s.h_in, column, s.h_in, s.w_in,
                   w.margin);
#pragma unroll
    for (int t = 0; t < kIn; ++t)
#pragma unroll
      for (int j = 0; j < 2 * S; ++j)
        windows[t][j / 2][j % 2 * 2 + u] = in.is_safe(t) ? in.of_row(t)[j / 2 * kWindow / 2 + j % 2] : 0;
    for (int i = 0; i < 2; ++i) shifts[u][i] = in.shift[i];
    for (int j = 0; j < 2 * S; ++j) masks[u][j / 2][j % 2] = mask_of(column + j / 2 * kWindow + j % 2 * 2, s.w_in);
    if (!in.has_edges()) continue;
#pragma unroll 1
    for (int edge = 0; edge < kIn; ++edge) {
      if (!in.is_edge(edge)) continue;
      const uint32_t* const row = in.pairs + ((edge % 2 ? in.at[1] : in.at[0]) + edge / 2 * s.w_in);
      const int before = (edge % 2 ? in.shift[1] : in.shift[0]) / 16;
#pragma unroll
      for (int j = 0; j < 2 * S; ++j) {
        const int at = j / 2 * kWindow / 2 + j % 2;
        const uint32_t pair = pair_within(row + at, column - before + 2 * at, s.w_in);
#pragma unroll
        for (int t = 0; t < kIn; ++t)
          if (t == edge) windows[t][j / 2][j % 2 * 2 + u] = pair;
      }
    }
  }
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
  float sums[kRows][4];
  start_sums(sums, bias, channel);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < kIn; ++t) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int chunk = 0; chunk < S; ++chunk) {
        const uint32_t first = windows[t][chunk][u], second = windows[t][chunk][2 + u];
        const uint32_t before = q > 0 ? first : chunk + 1 < S ? windows[t][(chunk + 1) % S][u] : 0;
        const uint32_t third = __shfl_sync(~0u, before, (lane + 1) % 4, 4), shift = shifts[u][t % 2];
        windows[t][chunk][u] = __funnelshift_r(first, second, shift) & masks[u][chunk][0];
        windows[t][chunk][2 + u] = __funnelshift_r(second, third, shift) & masks[u][chunk][1];
      }
    }
    multiply_row<K>(sums, t, windows[t], taps);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const Strip strip(w, s, tile * kStrips + u * 8 + lane / 4, channel, kRows, s.h_out);
    const PairsOut<kRows> to(out, images, strip.image, strip.row, strip.column + 2 * q, s.h_out, s.w_out);
#pragma unroll
    for (int r = 0; r < kRows; ++r) to.write(r, sums[r][2 * u], sums[r][2 * u + 1]);
  }
}

}  // namespace msops::depthwise::mma

#endif
