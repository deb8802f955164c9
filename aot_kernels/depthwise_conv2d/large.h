// These kernels compute the depthwise convolution for weights of any size, stride 1, no dilation, multiplier 1, where
// the kernels made for small weights do not take it.
//
// A thread computes 4 x 4 neighbouring results in registers. In steps of 4 taps of a row it reads 4 more of the row's
// elements, and the taps of the 4 rows of the kernel that the row meets: 5 reads of 16 bytes for 64 products. The
// weight's gradient is computed alike, with other roles: its taps are the results, and an image of dout is the kernel.
// Rows of taps are padded with zeros, which turn an infinity up to 3 columns after a window into NaN.
#pragma once

#include "../common/sum.h"
#include "convolution.h"

#ifdef __CUDACC__

namespace msops::depthwise::large {

constexpr int kTile = 4;                       // results of a thread, down and across
constexpr int kMostThreads = 256, kEdge = 64;  // a tile of 64 x 64 results has 256 threads

inline int round_up(int64_t n) { return static_cast<int>((n + kTile - 1) / kTile * kTile); }

// Plane is rows of floats in shared memory, whose length is a multiple of 4.
struct Plane {
  int rows, pitch;

  MSOPS_BOTH int size() const { return rows * pitch; }

  // Copies an image of height x width from row `row` and column `column` on, with zeros where it ends. Returns the sum
  // of what this thread copied.
  template <typename T>
  __device__ float fill(float* to, const T* image, int row, int column, int height, int width) const {
    float sum = 0;
    for (int r = threadIdx.x / 32; r < rows; r += blockDim.x / 32) {
      for (int c = threadIdx.x % 32; c < pitch; c += 32) {
        const bool inside = within(row + r, height) && within(column + c, width);
        const float value = inside ? float(image[(row + r) * width + column + c]) : 0;
        sum += value;
        to[r * pitch + c] = value;
      }
    }
    return sum;
  }
};

// sums[r][c] += sum over taps (a, b) of taps[a][b] * rows[r + a][c + b]; a row of taps is padded with zeros.
__device__ inline void correlate(const float* rows, int pitch, const float* taps, const Plane& kernel,
                                 float (&sums)[kTile][kTile]) {
  const auto row = [&](int t, auto whole) {
    const float* from = rows + t * pitch;
    float values[2 * kTile], of_row[kTile][kTile] = {};  // summed by themselves, which loses fewer digits
    *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(from);
#pragma unroll 2
    for (int b = 0; b < kernel.pitch; b += kTile) {
      *reinterpret_cast<float4*>(values + kTile) = *reinterpret_cast<const float4*>(from + b + kTile);
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        if (!whole && !within(t - r, kernel.rows)) continue;
        float tap[kTile];
        *reinterpret_cast<float4*>(tap) = *reinterpret_cast<const float4*>(taps + (t - r) * kernel.pitch + b);
#pragma unroll
        for (int e = 0; e < kTile; ++e)
#pragma unroll
          for (int c = 0; c < kTile; ++c) of_row[r][c] += tap[e] * values[c + e];
      }
#pragma unroll
      for (int c = 0; c < kTile; ++c) values[c] = values[c + kTile];
    }
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) sums[r][c] += of_row[r][c];
  };
  int t = 0;
#pragma unroll 1
  for (; t < kTile - 1; ++t) row(t, std::false_type{});
#pragma unroll 1
  for (; t < kernel.rows; ++t) row(t, std::true_type{});
#pragma unroll 1
  for (; t < kernel.rows + kTile - 1; ++t) row(t, std::false_type{});
}

// A Problem takes images of height_in x width_in to results of height x width, whose windows begin `top` and `left`
// before them.
struct Problem {
  int channels, height_in, width_in, height, width, top, left;
  int k_rows, k_columns;
  bool reversed;  // the kernel's last tap comes first
  Plane image, kernel;
  int tile_rows, tile_columns, tiles_down, tiles_across;
};

// A block computes one tile of one image's results.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    forward_kernel(Problem p, const T* __restrict__ in, const T* __restrict__ weight, const T* __restrict__ bias,
                   T* __restrict__ out) {
  extern __shared__ float4 shared[];
  float* const rows = reinterpret_cast<float*>(shared);
  float* const taps = rows + p.image.size();
  const int tiles = p.tiles_down * p.tiles_across, image = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int channel = image % p.channels;
  const int first_row = tile / p.tiles_across * p.tile_rows, first_column = tile % p.tiles_across * p.tile_columns;
  p.image.fill(rows, in + image * p.height_in * p.width_in, first_row - p.top, first_column - p.left, p.height_in,
               p.width_in);
  for (int i = threadIdx.x; i < p.kernel.size(); i += blockDim.x) {
    const int a = i / p.kernel.pitch, b = i % p.kernel.pitch, k = a * p.k_columns + b,
              last = p.k_rows * p.k_columns - 1;
    taps[i] = b < p.k_columns ? float(weight[channel * (last + 1) + (p.reversed ? last - k : k)]) : 0;
  }
  __syncthreads();
  const int across = p.tile_columns / kTile, row = threadIdx.x / across * kTile, column = threadIdx.x % across * kTile;
  if (row >= p.tile_rows) return;
  float sums[kTile][kTile];
  for (auto& of_row : sums)
    for (float& sum : of_row) sum = bias ? float(bias[channel]) : 0;
  correlate(rows + row * p.image.pitch + column, p.image.pitch, taps, p.kernel, sums);
  out += image * p.height * p.width;
  for (int r = 0; r < kTile; ++r) {
    for (int c = 0; c < kTile; ++c) {
      const int y = first_row + row + r, x = first_column + column + c;
      if (y < p.height && x < p.width) out[y * p.width + x] = T(sums[r][c]);
    }
  }
}

// Sums are the sums over images and positions for one channel's weight and bias. Tiles are of dout, which is the
// kernel. The results are the taps: `down` x `across` threads compute them, for each of `groups` parts of a tile's
// rows.
struct Sums {
  int batch, groups, down, across;
};

// A block takes one channel and one part of its tiles.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    sums_kernel(Problem p, Sums s, const T* __restrict__ x, const T* __restrict__ dout, float* __restrict__ partial) {
  extern __shared__ float4 shared[];
  float* const rows = reinterpret_cast<float*>(shared);
  float* const gradients = rows + p.image.size();
  const int channel = blockIdx.x, part = blockIdx.y, parts = gridDim.y;
  const int tiles = p.tiles_down * p.tiles_across, all = s.batch * tiles, end = part_begin(all, part + 1, parts);
  const int per_group = s.down * s.across, group = threadIdx.x / per_group, place = threadIdx.x % per_group;
  const int row = place / s.across * kTile, column = place % s.across * kTile;
  const int first = group < s.groups ? part_begin(p.kernel.rows, group, s.groups) : 0;
  const int last = group < s.groups ? part_begin(p.kernel.rows, group + 1, s.groups) : 0;
  float sums[kTile][kTile] = {}, of_bias = 0;
  for (int at = part_begin(all, part, parts); at < end; ++at) {
    const int image = at / tiles * p.channels + channel, tile = at % tiles;
    const int first_row = tile / p.tiles_across * p.tile_rows, first_column = tile % p.tiles_across * p.tile_columns;
    __syncthreads();
    p.image.fill(rows, x + image * p.height_in * p.width_in, first_row - p.top, first_column - p.left, p.height_in,
                 p.width_in);
    of_bias += p.kernel.fill(gradients, dout + image * p.height * p.width, first_row, first_column, p.height, p.width);
    __syncthreads();
    correlate(rows + (row + first) * p.image.pitch + column, p.image.pitch, gradients + first * p.kernel.pitch,
              {last - first, p.kernel.pitch}, sums);
  }
  __syncthreads();
  float* const terms = rows;  // [group][4 x 4][place], then the warps' sums for the bias
  if (group < s.groups)
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) terms[(group * kTile * kTile + r * kTile + c) * per_group + place] = sums[r][c];
  float* const of_warps = terms + s.groups * kTile * kTile * per_group;
  of_bias = team_sum<32>(of_bias);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_bias;
  __syncthreads();
  const int kernel = p.k_rows * p.k_columns;
  float* to = partial + static_cast<int64_t>(part) * p.channels * (kernel + 1);
  for (int k = threadIdx.x; k <= kernel; k += blockDim.x) {
    float sum = 0;
    if (k == kernel) {
      for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
      to[p.channels * kernel + channel] = sum;
      continue;
    }
    const int a = k / p.k_columns, b = k % p.k_columns;
    for (int g = 0; g < s.groups; ++g)
      sum += terms[(g * kTile * kTile + a % kTile * kTile + b % kTile) * per_group + a / kTile * s.across + b / kTile];
    to[channel * kernel + k] = sum;
  }
}

inline bool takes(const Convolution& s, int64_t largest) {
  return s.multiplier == 1 && s.h.stride == 1 && s.w.stride == 1 && s.h.dilation == 1 && s.w.dilation == 1 &&
         largest <= kLargest32 && s.batch * s.channels > 0 && s.h.in > 0 && s.w.in > 0 && s.h.out > 0 && s.w.out > 0;
}

// Chooses tiles of the results as large as a block and shared memory allow; returns false if even the smallest are too
// large.
inline bool plan(Problem* p, int rows, int columns, int64_t* bytes) {
  for (int edge = kEdge; edge >= kTile; edge /= 2) {
    p->tile_rows = std::min(edge, round_up(p->height));
    p->tile_columns = std::min(edge, round_up(p->width));
    p->tiles_down = (p->height - 1) / p->tile_rows + 1;
    p->tiles_across = (p->width - 1) / p->tile_columns + 1;
    p->tile_rows = round_up((p->height - 1) / p->tiles_down + 1);
    p->tile_columns = round_up((p->width - 1) / p->tiles_across + 1);
    p->image = {p->tile_rows + rows - 1, p->tile_columns + round_up(columns)};
    *bytes = (int64_t{p->image.rows} * p->image.pitch + int64_t{p->kernel.rows} * p->kernel.pitch) * 4;
    if (*bytes <= Gpu().dynamic_bytes()) return true;
  }
  return false;
}

template <typename T>
bool convolve(Call& call, int64_t images, Problem p, const T* in, const T* weight, const T* bias, T* out) {
  int64_t bytes;
  p.kernel = {p.k_rows, round_up(p.k_columns)};
  if (!plan(&p, p.k_rows, p.k_columns, &bytes)) return false;
  const int threads = (p.tile_rows / kTile * p.tile_columns / kTile + 31) / 32 * 32;
  launch(call, forward_kernel<T>, images * p.tiles_down * p.tiles_across, threads, bytes, p, in, weight, bias, out);
  return true;
}

inline Problem problem_of(const Convolution& s) {
  Problem p{};
  p.channels = s.channels, p.height_in = s.h.in, p.width_in = s.w.in, p.height = s.h.out, p.width = s.w.out;
  p.top = s.h.pad, p.left = s.w.pad, p.k_rows = s.h.kernel, p.k_columns = s.w.kernel;
  return p;
}

// Returns false, and does nothing, if the convolution is not for these kernels.
template <typename T>
bool forward(Call& call, const Convolution& s, int64_t largest, const T* x, const T* weight, const T* bias, T* out) {
  return takes(s, largest) && convolve(call, s.batch * s.channels, problem_of(s), x, weight, bias, out);
}

// Returns how many rows of `partial` it wrote, at most `rows`. Returns 0, and does nothing, if the convolution is not
// for these kernels.
template <typename T>
int64_t backward(Call& call, const Convolution& s, int64_t largest, const T* x, const T* weight, const T* dout, T* dx,
                 float* partial, int64_t rows) {
  if (!takes(s, largest)) return 0;
  Problem p = problem_of(s);
  Sums sums{static_cast<int>(s.batch), 0, round_up(p.k_rows) / kTile, round_up(p.k_columns) / kTile};
  const int per_group = sums.down * sums.across;
  if (per_group > kMostThreads) return 0;
  int64_t bytes;
  p.kernel = {};
  if (!plan(&p, round_up(p.k_rows), p.k_columns, &bytes)) return 0;
  p.kernel = {p.tile_rows, p.tile_columns};
  sums.groups = std::min(kMostThreads / per_group, p.kernel.rows);
  const int threads = (sums.groups * per_group + 31) / 32 * 32;
  const int64_t terms = sums.groups * per_group * kTile * kTile + kMostThreads / 32;
  bytes = std::max<int64_t>(p.image.size() + p.kernel.size(), terms) * 4;
  Problem back = problem_of(s);  // dx from dout
  std::swap(back.height_in, back.height), std::swap(back.width_in, back.width);
  back.top = p.k_rows - 1 - p.top, back.left = p.k_columns - 1 - p.left, back.reversed = true;
  if (bytes > Gpu().dynamic_bytes() || !convolve<T>(call, s.batch * s.channels, back, dout, weight, nullptr, dx))
    return 0;
  const auto kernel = sums_kernel<T>;
  const int64_t parts = best_parts(s.channels, s.batch * p.tiles_down * p.tiles_across, 1, rows,
                                   blocks_at_once(Gpu(), kernel, threads, bytes));
  launch(call, kernel, {s.channels, parts}, threads, bytes, p, sums, x, dout, partial);
  return parts;
}

}  // namespace msops::depthwise::large

#endif
