// Depthwise convolution on the GPU for square kernels of K = 3, 5 or 7, strides of S = 1 or 2, no dilation,
// multiplier 1.
//
// A block copies image rows to shared memory as float, with zeros where the padding is, so that no inner loop asks
// whether it is inside. Then each thread computes kRows x kColumns neighbouring results in registers: it walks down the
// rows that they need, and uses each row that it reads for all results that meet it. A tile is some whole images, or a
// band of one.
#pragma once

#include <algorithm>

#include "common/pack.h"
#include "common/sum.h"

namespace msops {
namespace depthwise {

// One spatial direction.
struct Axis {
  int64_t in, out, kernel, stride, dilation;
  int64_t pad, padding;  // before the first element, and altogether

  int64_t largest() const { return in + padding + dilation * kernel + stride; }

  // Where the window of output o begins in the input; may be negative.
  template <typename I>
  MSOPS_BOTH I start(I o) const {
    return o * static_cast<I>(stride) - static_cast<I>(pad);
  }
};

struct Shape {
  int64_t batch, channels, multiplier;
  Axis h, w;

  int64_t taps() const { return h.kernel * w.kernel; }
  // No index of the kernels is larger; padded coordinates included.
  int64_t largest(int64_t sizes) const { return std::max({sizes, h.largest(), w.largest()}); }
};

#ifdef __CUDACC__

constexpr int kTileThreads = 128, kRows = 4, kColumns = 4;
constexpr int kTileBytes = 32 * 1024;  // seven blocks on a multiprocessor

// How images are cut into tiles. Rows and columns are those of the results: out forward, dx backward.
struct Tiling {
  int images, bands, band_rows;  // of a tile; bands of one image; either images or bands is 1
  int tile_rows, pitch;          // rows and floats a row that an image, or its band, has in shared memory
  int strips, groups;            // of kRows rows in a band, of kColumns columns in a row

  // A vector read may go past the last row.
  MSOPS_BOTH int bytes() const { return (images * tile_rows * pitch + 16) * 4; }
};

// How many rows of the tile some rows of results read: forward, those of `stride` apart and a window's; backward, those
// that meet them.
struct RowsRead {
  int64_t window, step, phase, stride;
  int64_t operator()(int64_t rows) const { return window + ((rows - 1) * step + phase) / stride; }
};

inline bool make_tiling(int64_t images, int64_t rows, int64_t columns, int64_t pitch, RowsRead rows_read,
                        Tiling* tiling) {
  const int64_t most_rows = kTileBytes / 4 / pitch;
  int64_t band = std::min(rows + kRows - 1, 2 * most_rows + kRows) / kRows * kRows;
  while (band > kRows && rows_read(band) > most_rows) band -= kRows;
  if (rows_read(band) > most_rows) return false;
  const int64_t bands = (rows + band - 1) / band;
  band = ((rows + bands - 1) / bands + kRows - 1) / kRows * kRows;
  const int64_t strips = band / kRows, groups = (columns + kColumns - 1) / kColumns;
  int64_t together = 1;
  if (bands == 1)
    together = std::max<int64_t>(1, std::min({kTileThreads / (strips * groups), most_rows / rows_read(band), images}));
  *tiling = {static_cast<int>(together),        static_cast<int>(bands), static_cast<int>(band),
             static_cast<int>(rows_read(band)), static_cast<int>(pitch), static_cast<int>(strips),
             static_cast<int>(groups)};
  return true;
}

// Copies rows of images into the tile: its row t is row first + t of the image, its column c the image's column c -
// left. `image(i)` is where the i-th image begins, or null; `sum(row, value)` sees all that is read.
template <int V, typename T, typename Image, typename Sum>
__device__ void fill_tile(float* tile, const Tiling& tiling, int first, int left, int height, int width, Image image,
                          Sum sum) {
  constexpr int kAtOnce = 4;  // loads that a thread has under way
  const int packs = width / V, thread = threadIdx.x, rows = tiling.images * tiling.tile_rows;
  const int lanes = packs < kTileThreads ? packs : kTileThreads, step = kTileThreads / lanes;
  if (thread >= lanes * step) return;
  for (int p = thread % lanes; p < packs; p += kTileThreads) {
    int i = 0, row = thread / lanes;
    for (int at = row; at < rows; at += kAtOnce * step) {
      Pack<T, V> values[kAtOnce];
      int of_image[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u, row += step) {
        while (row >= tiling.tile_rows) row -= tiling.tile_rows, ++i;
        of_image[u] = row;
        values[u] = {};
        const T* from = i < tiling.images ? image(i) : nullptr;
        if (from != nullptr && first + row >= 0 && first + row < height)
          values[u] = load<V>(from + (first + row) * width + p * V);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (at + u * step >= rows) break;
        float* to = tile + (at + u * step) * tiling.pitch + left + p * V;
        for (int j = 0; j < V; ++j) {
          const float value = float(values[u].values[j]);
          sum(of_image[u], value);
          to[j] = value;
        }
      }
    }
  }
}

__device__ inline void clear_tile(float* tile, const Tiling& tiling) {
  for (int i = threadIdx.x; i < tiling.bytes() / 16; i += kTileThreads)
    reinterpret_cast<float4*>(tile)[i] = make_float4(0, 0, 0, 0);
}

// kCount floats of a tile's row, in vectors of V; what is read beyond them is not used.
template <int V, int kCount>
__device__ void read_row(const float* from, float (&values)[kCount]) {
  for (int v = 0; v < kCount; v += V) {
    const Pack<float, V> pack = *reinterpret_cast<const Pack<float, V>*>(from + v);
    for (int j = 0; j < V && v + j < kCount; ++j) values[v + j] = pack.values[j];
  }
}

template <int K, typename T>
__device__ void read_taps(const T* weight, int channel, float (&taps)[K][K]) {
  for (int a = 0; a < K; ++a)
    for (int b = 0; b < K; ++b) taps[a][b] = float(weight[(channel * K + a) * K + b]);
}

// Row `row`, columns `column` to `column` + kColumns of an image, in packs of V; zero or nothing outside.
template <int V, typename T>
__device__ void read_results(const T* image, int row, int column, int height, int width, float (&values)[kColumns]) {
  for (int c = 0; c < kColumns; c += V) {
    Pack<T, V> pack = {};
    if (row < height && column + c < width) pack = load<V>(image + row * width + column + c);
    for (int j = 0; j < V; ++j) values[c + j] = float(pack.values[j]);
  }
}

template <int V, typename T>
__device__ void write_results(T* image, int row, int column, int height, int width, const float (&values)[kColumns]) {
  for (int c = 0; c < kColumns; c += V) {
    Pack<T, V> pack;
    for (int j = 0; j < V; ++j) pack.values[j] = T(values[c + j]);
    if (row < height && column + c < width) store(image + row * width + column + c, pack);
  }
}

// One block: one tile of images in the order of memory, batch and channel together.
template <int K, int S, int V, typename T>
__global__ void __launch_bounds__(kTileThreads)
    forward_kernel(Shape s, Tiling tiling, const T* __restrict__ x, const T* __restrict__ weight,
                   const T* __restrict__ bias, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  float* tile = reinterpret_cast<float*>(shared);
  const int h_in = s.h.in, w_in = s.w.in, h_out = s.h.out, w_out = s.w.out, channels = s.channels;
  const int images = s.batch * s.channels, first_image = blockIdx.x / tiling.bands * tiling.images;
  const int first_row = blockIdx.x % tiling.bands * tiling.band_rows;
  clear_tile(tile, tiling);
  __syncthreads();
  fill_tile<V, T>(
      tile, tiling, first_row * S - int(s.h.pad), int(s.w.pad), h_in, w_in,
      [&](int i) { return first_image + i < images ? x + (first_image + i) * h_in * w_in : nullptr; },
      [](int, float) {});
  __syncthreads();
  const int end = min(h_out, first_row + tiling.band_rows);
  for (int task = threadIdx.x; task < tiling.images * tiling.strips * tiling.groups; task += kTileThreads) {
    const int group = task % tiling.groups, strip = task / tiling.groups % tiling.strips;
    const int i = task / tiling.groups / tiling.strips, image = first_image + i, channel = image % channels;
    if (image >= images) break;
    float taps[K][K], sums[kRows][kColumns];
    read_taps(weight, channel, taps);
    const float start = bias ? float(bias[channel]) : 0;
    for (auto& row : sums)
      for (float& sum : row) sum = start;
    const float* from = tile + (i * tiling.tile_rows + strip * kRows * S) * tiling.pitch + group * kColumns * S;
#pragma unroll
    for (int t = 0; t < (kRows - 1) * S + K; ++t) {
      float values[(kColumns - 1) * S + K];
      read_row<4>(from + t * tiling.pitch, values);
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
    for (int r = 0; r < kRows; ++r)
      write_results<V>(out + image * h_out * w_out, first_row + strip * kRows + r, group * kColumns, end, w_out,
                       sums[r]);
  }
}

// Backward, how far the outputs that an input meets begin before the place of its own output.
template <int K, int S, int kPhase>
constexpr int kBefore = (K - 1 - kPhase + S - 1) / S;

// All three gradients from one reading of x and dout. Input position i meets tap k in output (i + pad - k) / S, where
// that is whole; with pad = S P + kPhase and i = S q + j, that is q + P + (j + kPhase - k) / S: the same for all i but
// for q + P, which is where the tile of dout begins. One block: one channel, one part of its tiles.
template <int K, int S, int kPhaseH, int kPhaseW, int V, typename T>
__global__ void __launch_bounds__(kTileThreads)
    backward_kernel(Shape s, Tiling tiling, const T* __restrict__ x, const T* __restrict__ weight,
                    const T* __restrict__ dout, T* __restrict__ dx, float* __restrict__ partial) {
  constexpr int kSums = K * K + 1;
  constexpr int kBeforeH = kBefore<K, S, kPhaseH>, kBeforeW = kBefore<K, S, kPhaseW>;
  extern __shared__ float4 shared[];
  float* tile = reinterpret_cast<float*>(shared);
  const int h_in = s.h.in, w_in = s.w.in, h_out = s.h.out, w_out = s.w.out, channels = s.channels, batch = s.batch;
  const int channel = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
  float taps[K][K], sums[kSums] = {};  // the last one is of the bias
  read_taps(weight, channel, taps);
  clear_tile(tile, tiling);
  const int tiles = (batch + tiling.images - 1) / tiling.images * tiling.bands,
            end = part_begin(tiles, split + 1, splits);
  for (int at = part_begin(tiles, split, splits); at < end; ++at) {
    const int first_n = at / tiling.bands * tiling.images, band = at % tiling.bands,
              first_row = band * tiling.band_rows;
    const int first_out = first_row / S + int(s.h.pad) / S - kBeforeH;
    // Rows that this tile shares with the band before are counted there.
    const int counted = band == 0 ? 0 : tiling.tile_rows - tiling.band_rows / S;
    __syncthreads();
    fill_tile<V, T>(
        tile, tiling, first_out, kBeforeW - int(s.w.pad) / S, h_out, w_out,
        [&](int i) {
          return first_n + i < batch ? dout + ((first_n + i) * channels + channel) * h_out * w_out : nullptr;
        },
        [&](int row, float value) { sums[K * K] += row >= counted ? value : 0; });
    __syncthreads();
    for (int task = threadIdx.x; task < tiling.images * tiling.strips * tiling.groups; task += kTileThreads) {
      const int group = task % tiling.groups, strip = task / tiling.groups % tiling.strips;
      const int i = task / tiling.groups / tiling.strips, n = first_n + i;
      if (n >= batch) break;
      const int image = (n * channels + channel) * h_in * w_in, row = first_row + strip * kRows,
                column = group * kColumns;
      float values[kRows][kColumns], results[kRows][kColumns] = {};
      for (int r = 0; r < kRows; ++r) read_results<V>(x + image, row + r, column, h_in, w_in, values[r]);
      const float* from = tile + (i * tiling.tile_rows + strip * kRows / S) * tiling.pitch + column / S;
#pragma unroll
      for (int t = 0; t <= kBeforeH + (kRows - 1 + kPhaseH) / S; ++t) {
        float d[kBeforeW + (kColumns - 1 + kPhaseW) / S + 1];
        read_row<kColumns / S>(from + t * tiling.pitch, d);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int a = r + kPhaseH - S * (t - kBeforeH);
          if (a < 0 || a >= K) continue;
#pragma unroll
          for (int b = 0; b < K; ++b) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              if ((c + kPhaseW + K * S - b) % S != 0) continue;
              const float gradient = d[(c + kPhaseW + S * kBeforeW - b) / S];
              results[r][c] += taps[a][b] * gradient;
              sums[a * K + b] += values[r][c] * gradient;
            }
          }
        }
      }
      const int band_end = min(h_in, first_row + tiling.band_rows);
      for (int r = 0; r < kRows; ++r) write_results<V>(dx + image, row + r, column, band_end, w_in, results[r]);
    }
  }
  __syncthreads();
  constexpr int kWarps = kTileThreads / 32;
  for (int k = 0; k < kSums; ++k) {
    const float sum = team_sum<32>(sums[k]);
    if (threadIdx.x % 32 == 0) tile[threadIdx.x / 32 * kSums + k] = sum;
  }
  __syncthreads();
  float* to = partial + static_cast<int64_t>(split) * channels * kSums;
  for (int k = threadIdx.x; k < kSums; k += kTileThreads) {
    float sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += tile[warp * kSums + k];
    to[k < K * K ? channel * K * K + k : channels * K * K + channel] = sum;
  }
}

template <int K_, int S_>
struct Kernel {
  static constexpr int K = K_, S = S_;
};

// Calls `f(Kernel<K, S>{})` if these kernels take the convolution; false if not.
template <typename F>
bool with_kernel(const Shape& s, F&& f) {
  const int64_t k = s.h.kernel, stride = s.h.stride;
  if (s.multiplier != 1 || s.w.kernel != k || s.w.stride != stride || s.h.dilation != 1 || s.w.dilation != 1)
    return false;
  if (k == 3 && stride == 1) return f(Kernel<3, 1>{});
  if (k == 3 && stride == 2) return f(Kernel<3, 2>{});
  if (k == 5 && stride == 1) return f(Kernel<5, 1>{});
  if (k == 5 && stride == 2) return f(Kernel<5, 2>{});
  if (k == 7 && stride == 1) return f(Kernel<7, 1>{});
  if (k == 7 && stride == 2) return f(Kernel<7, 2>{});
  return false;
}

// Both return false, and do nothing, if the convolution is not for these kernels.

template <typename T>
bool forward(Call& call, const Shape& s, int64_t largest, const T* x, const T* weight, const T* bias, T* out) {
  if (largest > kLargest32 || s.w.out == 0 || s.h.out == 0) return false;
  return with_kernel(s, [&](auto kernel) {
    constexpr int K = decltype(kernel)::K, S = decltype(kernel)::S;
    const int64_t groups = (s.w.out + kColumns - 1) / kColumns;
    const int64_t pitch = (std::max(S * (groups * kColumns - 1) + K, s.w.in + s.w.pad) + 3) / 4 * 4;
    const RowsRead rows_read{K, S, 0, 1};
    const int64_t images = s.batch * s.channels;
    Tiling tiling;
    if (!make_tiling(images, s.h.out, s.w.out, pitch, rows_read, &tiling)) return false;
    const int64_t blocks = (images + tiling.images - 1) / tiling.images * tiling.bands;
    if (blocks == 0) return true;
    with_width<T, 4>(false, s.w.in | s.w.out, {x, out}, [&](auto width) {
      forward_kernel<K, S, decltype(width)::value>
          <<<static_cast<unsigned>(blocks), kTileThreads, tiling.bytes(), call.stream()>>>(s, tiling, x, weight, bias,
                                                                                           out);
    });
    call.check_launch();
    return true;
  });
}

template <typename T>
bool backward(Call& call, const Shape& s, int64_t largest, const T* x, const T* weight, const T* dout, T* dx,
              float* partial, int64_t splits) {
  if (largest > kLargest32 || s.channels == 0) return false;
  for (const Axis& axis : {s.h, s.w}) {
    if (axis.in == 0 || axis.out == 0) return false;
    // Every output must meet the image: none may be in the padding alone.
    if (axis.pad >= axis.kernel || axis.stride * (axis.out - 1) - axis.pad >= axis.in) return false;
  }
  return with_kernel(s, [&](auto kernel) {
    constexpr int K = decltype(kernel)::K, S = decltype(kernel)::S;
    const auto phases = [&](auto phase_h, auto phase_w) {
      constexpr int H = decltype(phase_h)::value, W = decltype(phase_w)::value;
      constexpr int kBeforeH = kBefore<K, S, H>, kBeforeW = kBefore<K, S, W>;
      const int64_t groups = (s.w.in + kColumns - 1) / kColumns;
      const int64_t reach = kBeforeW + (groups * kColumns - 1 + W) / S + 1;
      const int64_t pitch = (std::max(reach, kBeforeW - s.w.pad / S + s.w.out) + 3) / 4 * 4;
      const RowsRead rows_read{kBeforeH + 1, 1, H, S};
      Tiling tiling;
      if (!make_tiling(s.batch, s.h.in, s.w.in, pitch, rows_read, &tiling)) return false;
      const dim3 grid(static_cast<unsigned>(s.channels), static_cast<unsigned>(splits));
      with_width<T, 4>(false, s.w.in | s.w.out, {x, dout, dx}, [&](auto width) {
        backward_kernel<K, S, H, W, decltype(width)::value>
            <<<grid, kTileThreads, std::max(tiling.bytes(), 4096), call.stream()>>>(s, tiling, x, weight, dout, dx,
                                                                                    partial);
      });
      call.check_launch();
      return true;
    };
    if constexpr (S == 1) {
      return phases(Constant<0>{}, Constant<0>{});
    } else {
      // Both directions nearly always have the same padding.
      if (s.h.pad % 2 == 0 && s.w.pad % 2 == 0) return phases(Constant<0>{}, Constant<0>{});
      if (s.h.pad % 2 == 1 && s.w.pad % 2 == 1) return phases(Constant<1>{}, Constant<1>{});
      return false;
    }
  });
}

#endif

}  // namespace depthwise
}  // namespace msops
