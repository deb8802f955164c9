// Convolution tells the kernels what the depthwise convolution is, and best_parts how they share its work.
#pragma once

#include <algorithm>
#include <cmath>

#include "../common/pack.h"
#include "../common/parallel.h"
#ifdef __CUDACC__
#include "../common/gpu/divisor.h"
#endif

namespace msops::depthwise {

// Axis is one spatial direction.
struct Axis {
  int64_t in, out, kernel, stride, dilation;
  int64_t pad, padding;  // before the first element, and altogether

  int64_t largest() const { return in + padding + dilation * kernel + stride; }

  // Returns where the window of output o begins in the input, which may be negative.
  template <typename I>
  MSOPS_BOTH I start(I o) const {
    return o * static_cast<I>(stride) - static_cast<I>(pad);
  }
};

struct Convolution {
  int64_t batch, channels, multiplier;
  Axis h, w;

  int64_t taps() const { return h.kernel * w.kernel; }
  // Returns this convolution with another number of samples.
  Convolution part(int64_t samples) const { return {samples, channels, multiplier, h, w}; }
  // Returns a bound for all indices of elements and all padded coordinates.
  int64_t largest(int64_t sizes) const { return std::max({sizes, h.largest(), w.largest()}); }
};

// Calls `f(Constant<K>{})` with the K that equals `k`; returns false if none does.
template <int... K, typename F>
bool with_constant(int64_t k, F&& f) {
  return ((k == K && (f(Constant<K>{}), true)) || ...);
}

#ifdef __CUDACC__

MSOPS_BOTH bool within(int i, int n) { return static_cast<unsigned>(i) < static_cast<unsigned>(n); }

// Sizes are the sizes of a convolution with multiplier 1, in 32 bits.
struct Sizes {
  int batch, channels, h_in, w_in, h_out, w_out, top, left;

  explicit Sizes(const Convolution& s)
      : batch(s.batch),
        channels(s.channels),
        h_in(s.h.in),
        w_in(s.w.in),
        h_out(s.h.out),
        w_out(s.w.out),
        top(s.h.pad),
        left(s.w.pad) {}
};

// Returns into how many parts, at most `most`, each channel's work is split. The work has `work` pieces, of which a
// block does `at_once`. With this number, few are idle in the last round of blocks, and in each block's last round.
inline int64_t best_parts(int64_t channels, int64_t work, int64_t at_once, int64_t most, int64_t blocks_at_once) {
  const auto share = [](double amount) { return amount / std::ceil(amount); };
  double best = 0;
  int64_t result = 1;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const double busy = share(static_cast<double>(channels * parts) / std::max<int64_t>(1, blocks_at_once)) *
                        share(static_cast<double>(work) / (parts * at_once));
    if (busy > best * 1.01) best = busy, result = parts;
  }
  return result;
}

#endif

}  // namespace msops::depthwise
