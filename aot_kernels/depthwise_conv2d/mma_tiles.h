// The kernels for the tensor cores (see mma.h) share these tiles, and the band matrix.
#pragma once

#include "../common/sum.h"
#include "convolution.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"
#include "../common/gpu/ldmatrix.h"
#include "../common/gpu/mma.h"

namespace msops::depthwise::mma {

constexpr int kStrips = 16, kColumns = 8, kWindow = 16;
constexpr int kForwardThreads = 64, kForwardRows = 7;

// The windows begin `left` columns before a strip's first, `shift` of which meet no tap of the strip's first result.
struct Windows {
  int k_columns, left, shift, tiles;  // a tile is a warp's 16 strips
  int margin;                         // rows that the window of a row's first or last strip may reach into
  Divisor bands, groups;              // of rows and of 8 columns of results in an image
};

struct Strip {
  int image, row, column;

  // Finds strip `strip` of a channel, in all images; beyond the last one, `row` is `beyond`.
  __device__ Strip(const Windows& w, const Sizes& s, int strip, int channel, int rows, int beyond) {
    const int n = w.bands.divide(w.groups.divide(strip, &column), &row);
    column *= kColumns;
    row = n < s.batch ? row * rows : beyond;
    image = n * s.channels + channel;
  }
};

__device__ inline uint32_t pair_of(Half first, Half second) {
  return first.bits | static_cast<uint32_t>(second.bits) << 16;
}

// Begins the sums of a warp's result rows with the bias of their channel.
template <int kRows>
__device__ __forceinline__ void start_sums(float (&sums)[kRows][4], const Half* bias, int channel) {
  const float start = bias ? float(bias[channel]) : 0;
  for (auto& of_row : sums)
    for (float& sum : of_row) sum = start;
}

// Adds to the sums of all result rows what they get from input row t: `windows` are its, and `taps` those of K rows.
template <int K, int S, int kRows>
__device__ __forceinline__ void multiply_row(float (&sums)[kRows][4], int t, const uint32_t (&windows)[S][4],
                                             const uint32_t (&taps)[K][S][2]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (t < r * S || t >= r * S + K) continue;
#pragma unroll
    for (int chunk = 0; chunk < S; ++chunk) mma_m16n8k16(sums[r], windows[chunk], taps[t - r * S][chunk]);
  }
}

// Returns the tap of a row for window column j and result column n = lane / 4, or zero. If kReversed, the last tap is
// first.
template <int S, bool kReversed>
__device__ Half tap_at(const Half* row, const Windows& w, int j) {
  const int b = j - w.shift - threadIdx.x % 32 / 4 * S;
  return within(b, w.k_columns) ? row[kReversed ? w.k_columns - 1 - b : b] : Half(0.f);
}

// Calls `f(Constant<K>{}, Constant<V>{}, windows)` if these kernels take the convolution whose windows begin `pad`
// columns before the results, with the stride S.
template <int S, typename F>
void with_kernel(const Convolution& s, int64_t largest, int64_t pad, std::initializer_list<const Half*> pointers,
                 int64_t height, int64_t width, int rows, F&& f) {
  if (s.multiplier != 1 || s.h.stride != S || s.w.stride != S || s.h.dilation != 1 || s.w.dilation != 1) return;
  // Rows above an image are addressed, too, and rows of results rounded up to whole strips.
  if (largest > kLargest32 / 2 || (s.h.kernel + s.h.padding) * std::max(s.w.in, s.w.out) > kLargest32 / 2) return;
  if (s.batch * s.channels * height * width == 0 || pad < 0) return;
  with_width<Half, 4>(false, s.w.in | s.w.out, pointers, [&](auto pack) {
    constexpr int V = pack;
    const int64_t left = (pad + V - 1) / V * V, bands = (height - 1) / rows + 1, groups = (width - 1) / kColumns + 1;
    // Where rows begin anywhere, a window's last column is not read.
    if (left - pad + (kColumns - 1) * S + s.w.kernel > kWindow * S - (V == 1)) return;
    if (V == 1 && std::min(s.w.in, s.w.out) < 3) return;
    const int64_t margin = (kWindow * S + s.w.padding) / std::min(s.w.in, s.w.out) + 1;
    const int64_t tiles = (s.batch * bands * groups - 1) / kStrips + 1;
    if (tiles * s.channels > kLargest32 / 32) return;  // so that a thread's number has 32 bits
    const Windows windows{static_cast<int>(s.w.kernel),
                          static_cast<int>(left),
                          static_cast<int>(left - pad),
                          static_cast<int>(tiles),
                          static_cast<int>(margin),
                          Divisor(bands),
                          Divisor(groups)};
    with_constant<3, 5, 7>(s.h.kernel, [&](auto K) { f(K, pack, windows); });
  });
}

}  // namespace msops::depthwise::mma

#endif
