// On the CPU, a thread takes some channels of a list at once, so that it reads the list's indices once for them.
#pragma once

#include <algorithm>

#include "../../common/parallel.h"
#include "gather.h"
#include "indices.h"

namespace msops::gather {

constexpr int64_t kRun = 1024;  // places whose indices are kept in the first cache

// Channels says which channels of which list an item works on: up to kChannels neighbours.
template <int kChannels>
struct Channels {
  int64_t list, first, count;

  static int64_t groups(const GatherSizes& all) { return (all.channels + kChannels - 1) / kChannels; }
  static int64_t items(const GatherSizes& all) { return all.lists * groups(all); }

  MSOPS_CPU Channels(const GatherSizes& all, int64_t item) {
    const int64_t of_list = (all.channels + kChannels - 1) / kChannels;
    list = item / of_list;
    first = item % of_list * kChannels;
    count = std::min<int64_t>(kChannels, all.channels - first);
  }
};

// RunOfTaps holds the indices, and the weights, of a run of places: one array for each tap.
template <int kTaps, typename C>
struct RunOfTaps {
  int32_t index[kTaps][kRun];
  C weight[kTaps][kTaps > 1 ? kRun : 1];

  template <typename Index, typename T>
  MSOPS_CPU void read(int64_t count, const Index* from, const T* weights) {
    for (int k = 0; k < kTaps; ++k)
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) index[k][j] = static_cast<int32_t>(from[j * kTaps + k]);
    if (kTaps > 1 && weights)
      for (int k = 0; k < kTaps; ++k)
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) weight[k][j] = C(weights[j * kTaps + k]);
  }
};

// Computes some channels of a part of a list's places.
template <int kTaps, typename T, typename Index>
struct GatherOnCpu {
  using C = Compute<T>;
  using Own = Channels<8>;
  static constexpr int64_t kPart = 16 * kRun;
  GatherSizes all;
  const T* features;
  const Index* index;
  const T* weight;  // null if there is one tap
  T* out;

  int64_t parts() const { return (all.places + kPart - 1) / kPart; }
  int64_t items() const { return Own::items(all) * parts(); }
  double cost() const { return static_cast<double>(8 * kTaps * std::min(kPart, all.places)); }

  MSOPS_CPU void operator()(int64_t item) const {
    const int64_t of_list = (all.places + kPart - 1) / kPart, begin = item % of_list * kPart;
    const int64_t end = std::min(begin + kPart, all.places);
    const Own own(all, item / of_list);
    RunOfTaps<kTaps, C> taps;
    for (int64_t first = begin; first < end; first += kRun) {
      const int64_t count = std::min(kRun, end - first), at = (own.list * all.places + first) * kTaps;
      taps.read(count, index + at, kTaps > 1 ? weight + at : nullptr);
      for (int64_t c = 0; c < own.count; ++c) {
        const int64_t row = own.list * all.channels + own.first + c;
        take(taps, count, features + row * all.points, out + row * all.places + first);
      }
    }
  }

 private:
  static MSOPS_CPU void take(const RunOfTaps<kTaps, C>& taps, int64_t count, const T* from, T* to) {
    if constexpr (kTaps == 1) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) to[j] = from[taps.index[0][j]];
    } else {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) {
        C sum = 0;
        for (int k = 0; k < kTaps; ++k) sum += taps.weight[k][j] * C(from[taps.index[k][j]]);
        assign(to[j], sum);
      }
    }
  }
};

// Adds to some channels of a list's points what their places have. Sums of float16 are in float32, for kBlock points at
// a time, whose sums fit the cache; other sums are in `out`, for all points at once.
template <int kTaps, typename T, typename Index>
struct ScatterOnCpu {
  using C = Compute<T>;
  using Own = Channels<4>;
  static constexpr bool kInPlace = std::is_same<T, C>::value;
  static constexpr int64_t kBlock = 8192;
  GatherSizes all;
  const T* dout;
  const Index* index;
  const T* weight;  // null if there is one tap
  T* out;

  int64_t items() const { return Own::items(all); }
  double cost() const { return static_cast<double>(8 * (kTaps * all.places + all.points)); }

  MSOPS_CPU void operator()(int64_t item) const {
    const Own own(all, item);
    const int64_t block = kInPlace ? all.points : kBlock;
    for (int64_t first = 0; first < all.points; first += block) {
      const int64_t count = std::min(block, all.points - first);
      own.count == 4 ? add<4>(own, first, count) : add_each(own, first, count);
    }
  }

 private:
  MSOPS_CPU void add_each(const Own& own, int64_t first, int64_t count) const {
    for (int64_t c = 0; c < own.count; ++c) {
      Own one = own;
      one.first += c;
      add<1>(one, first, count);
    }
  }

  // Adds up kRows channels for `count` points from `first` on.
  template <int kRows>
  MSOPS_CPU void add(const Own& own, int64_t first, int64_t count) const {
    constexpr int64_t kRoom = kInPlace ? 1 : kBlock + 1;  // the last sum takes what belongs to other points
    C held[kRows][kRoom];
    C* sums[kRows];
    const T* from[kRows];
    T* to[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = own.list * all.channels + own.first + r;
      from[r] = dout + row * all.places, to[r] = out + row * all.points + first;
      if constexpr (kInPlace) {
        sums[r] = to[r];
      } else {
        sums[r] = held[r];
      }
      std::fill_n(sums[r], count, C(0));
    }
    const int64_t indices = own.list * all.places * kTaps;
    for (int64_t begin = 0; begin < all.places; begin += kRun) {
      const int64_t run = std::min(kRun, all.places - begin);
      C terms[kRows][kRun];
      for (int r = 0; r < kRows; ++r) widen(from[r] + begin, terms[r], run);
      for (int64_t j = 0; j < run; ++j) {
        for (int k = 0; k < kTaps; ++k) {
          const int64_t i = indices + (begin + j) * kTaps + k;
          uint32_t at = static_cast<uint32_t>(index[i]);
          if constexpr (!kInPlace) at = std::min(at - static_cast<uint32_t>(first), static_cast<uint32_t>(count));
          for (int r = 0; r < kRows; ++r) {
            if constexpr (kTaps == 1) {
              sums[r][at] += terms[r][j];
            } else {
              sums[r][at] += C(weight[i]) * terms[r][j];
            }
          }
        }
      }
    }
    if constexpr (!kInPlace)
      for (int r = 0; r < kRows; ++r) narrow(held[r], to[r], count);
  }
};

}  // namespace msops::gather
