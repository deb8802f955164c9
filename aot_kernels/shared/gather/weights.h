// The gradient of an interpolation's weights is a sum over channels: dweight[b][m][k] = sum over c of dout[b][c][m]
// features[b][c][index[b][m][k]].
#pragma once

#include "../../common/sum.h"
#include "cpu.h"

namespace msops::gather {

// Computes the gradients of a run of a list's places, channel by channel.
template <int kTaps, typename T, typename Index>
struct WeightGradientOnCpu {
  using C = Compute<T>;
  static constexpr int64_t kChannels = 64;  // channels of a plain sum
  GatherSizes all;
  const T *features, *dout;
  const Index* index;
  T* dweight;

  int64_t items() const { return all.lists * runs(); }
  double cost() const { return static_cast<double>(4 * kTaps * all.channels * std::min(kRun, all.places)); }

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t list = item / runs(), first = item % runs() * kRun, count = std::min(kRun, all.places - first);
    const int64_t at = (list * all.places + first) * kTaps;
    RunOfTaps<kTaps, C> taps;
    taps.template read<Index, T>(count, index + at, nullptr);
    C sums[kTaps][kRun] = {};
    for (int64_t c = 0; c < all.channels; c += kChannels) {
      C plain[kTaps][kRun] = {};
      for (int64_t row = c; row < std::min(c + kChannels, all.channels); ++row) {
        const T* const from = features + (list * all.channels + row) * all.points;
        const T* const gradient = dout + (list * all.channels + row) * all.places + first;
        for (int k = 0; k < kTaps; ++k)
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) plain[k][j] += C(gradient[j]) * C(from[taps.index[k][j]]);
      }
      for (int k = 0; k < kTaps; ++k)
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) sums[k][j] += plain[k][j];
    }
    for (int64_t j = 0; j < count; ++j)
      for (int k = 0; k < kTaps; ++k) assign(dweight[at + j * kTaps + k], sums[k][j]);
  }

 private:
  MSOPS_CPU int64_t runs() const { return (all.places + kRun - 1) / kRun; }
};

}  // namespace msops::gather
