// The gradient of a table: each entry's sum over the points in whose cells it is.
//
//   CPU  a thread owns some levels, or parts of them, and goes over all points in their order
//   GPU  a block owns a slice of a level (slices.h)
#pragma once

#include "interpolate.h"
#include "slices.h"

namespace msops::hash_encoding {

// Adds up whole levels or, if there are more threads, slices of levels. Each entry's sum has the order of the points.
template <int D, bool kAlong, typename T>
struct TableOnCpu {
  using C = Compute<T>;
  using Points = Tile<D, kAlong, C>;
  static constexpr int kPoints = Points::kPoints, kCorners = 1 << D, kRun = 8;  // features at once
  const Problem<T>& all;
  const T* dout;
  C* sums;  // of all entries; dtable itself, if that has elements of C
  T* dtable;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t slices = (parts + all.grids.levels - 1) / all.grids.levels;
    for (int64_t i = part; i < slices * all.grids.levels; i += parts) {
      const int l = static_cast<int>(i / slices);
      const int64_t size = all.grids.level[l].size;
      add(l, part_begin(size, i % slices, slices), part_begin(size, i % slices + 1, slices));
    }
  }

 private:
  // Returns n numbers in C, which are in `room` if they have another type.
  static MSOPS_CPU const C* widened(const T* from, C* room, int64_t n) {
    if constexpr (std::is_same<C, T>::value) {
      return from;
    } else {
      widen(from, room, n);
      return room;
    }
  }

  // Computes the gradients of a level's entries from `begin` to `end`.
  MSOPS_CPU void add(int l, int64_t begin, int64_t end) const {
    const Level& level = all.grids.level[l];
    const int64_t features = all.features, first = (level.first + begin) * features, size = (end - begin) * features;
    C* const to = sums + first;
    for (int64_t i = 0; i < size; ++i) to[i] = 0;
    for (int64_t n = 0; n < all.count; n += kPoints) {
      const int count = static_cast<int>(std::min<int64_t>(kPoints, all.count - n));
      Points points;
      points.locate(all.grids, level, all.points, all.along, n, count);
      uint32_t entries[kCorners][kPoints];
      C weights[kCorners][kPoints];
      for (int c = 0; c < all.corners; ++c) points.entries(c, entries[c]), points.shares(c, -1, weights[c]);
      for (int j = 0; j < count; ++j) {
        const T* const gradient = dout + (n + j) * all.width() + l * features;
        for (int64_t f = 0; f < features; f += kRun) {
          const int64_t run = std::min<int64_t>(kRun, features - f);
          C wide[kRun];
          const C* const d = widened(gradient + f, wide, run);
          for (int c = 0; c < all.corners; ++c) {
            const int64_t entry = entries[c][j] - begin;
            if (entry < 0 || entry >= end - begin) continue;
            C* const sum = to + entry * features + f;
            for (int64_t k = 0; k < run; ++k) sum[k] += weights[c][j] * d[k];
          }
        }
      }
    }
    if constexpr (!std::is_same<C, T>::value) narrow(to, dtable + first, size);
  }
};

// Returns the shape of the scratch: on the CPU, sums in float beside float16; on the GPU, what Layout says.
inline std::vector<int64_t> table_scratch(const Grids& grids, int64_t axes, int64_t count, int64_t features,
                                          int bytes) {
  const int64_t on_gpu = Layout(grids, axes, count, features, bytes).words;
  return {std::max(on_gpu, bytes == 2 ? size_of({grids.entries, features}) : 1)};
}

template <int D, bool kAlong, typename T>
void gradient_of_table(Call& call, const Problem<T>& all, const T* dout, void* scratch, T* dtable) {
  if (all.features == 0) return;
  if (call.is_on_cpu()) {
    Compute<T>* sums = static_cast<Compute<T>*>(scratch);
    if constexpr (std::is_same<Compute<T>, T>::value) sums = dtable;
    const int64_t entries = all.grids.entries;
    const double work = (static_cast<double>(all.count * all.grids.levels) * (4 << D) + static_cast<double>(entries)) *
                        static_cast<double>(all.features);
    return on_threads(call, std::min(entries, all.grids.levels * int64_t{64}), work,
                      TableOnCpu<D, kAlong, T>{all, dout, sums, dtable});
  }
#ifdef __CUDACC__
  if (all.count == 0) {
    cudaMemsetAsync(dtable, 0, all.grids.entries * all.features * sizeof(T), call.stream());
    return call.check_launch();
  }
  add_slices<D, kAlong>(call, all, dout, static_cast<uint32_t*>(scratch), dtable);
#endif
}

}  // namespace msops::hash_encoding
