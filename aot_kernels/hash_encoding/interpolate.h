// The value of an encoding at points, and the gradient of the points: sums over the corners around each point.
//
//   CPU  tiles of points, for which loops over corners vectorize
//   GPU  for the value, two lanes have some levels of a point, whose results they store at once; for the gradient, a
//        thread has all levels of a point
#pragma once

#include "../common/pack.h"
#include "tile.h"

namespace msops::hash_encoding {

// Problem has what all entries take. Rows of `out` and `dout` have the levels one after the other.
template <typename T>
struct Problem {
  Grids grids;
  int64_t count, features;  // points; of an entry
  int corners;              // of a cell. As no compiler knows it, CPU loops over it stay loops.
  Coordinates points, along;
  const T* table;

  MSOPS_BOTH int64_t width() const { return grids.levels * features; }
  MSOPS_BOTH const T* entries(const Level& level) const { return table + level.first * features; }
};

// Interpolates at a part of the points. Levels are the outer loop, so that one at a time is in the caches.
template <int D, bool kAlong, typename T>
struct ForwardOnCpu {
  using C = Compute<T>;
  using Points = Tile<D, kAlong, C>;
  const Problem<T>& all;
  T* out;

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const int64_t end = part_begin(all.count, part + 1, parts);
    for (int l = 0; l < all.grids.levels; ++l)
      for (int64_t n = part_begin(all.count, part, parts); n < end; n += Points::kPoints)
        run(l, n, static_cast<int>(std::min<int64_t>(Points::kPoints, end - n)));
  }

 private:
  MSOPS_CPU void run(int l, int64_t n, int count) const {
    constexpr int kCorners = 1 << D, kPoints = Points::kPoints;
    const Level& level = all.grids.level[l];
    const int64_t features = all.features, width = all.width();
    const T* const table = all.entries(level);
    Points points;
    points.locate(all.grids, level, all.points, all.along, n, count);
    uint32_t entries[kCorners][kPoints];
    C weights[kCorners][kPoints];
    for (int c = 0; c < all.corners; ++c) points.entries(c, entries[c]), points.shares(c, -1, weights[c]);
    for (int64_t f = 0; f < features; ++f) {
      C sums[kPoints] = {};
      for (int c = 0; c < all.corners; ++c)
        for (int j = 0; j < count; ++j) sums[j] += weights[c][j] * C(table[entries[c][j] * features + f]);
      T* const to = out + n * width + l * features + f;
      for (int j = 0; j < count; ++j) assign(to[j * width], sums[j]);
    }
  }
};

// Computes the gradient of tiles of points.
template <int D, bool kAlong, typename T>
struct PointsOnCpu {
  using C = Compute<T>;
  using Points = Tile<D, kAlong, C>;
  static constexpr int kPoints = Points::kPoints;
  const Problem<T>& all;
  const T* dout;
  CoordinatesOut dpoints;

  MSOPS_CPU void operator()(int64_t tile) const {
    const int64_t n = tile * kPoints;
    const int count = static_cast<int>(std::min<int64_t>(kPoints, all.count - n));
    C sums[D][kPoints] = {};
    for (int l = 0; l < all.grids.levels; ++l) add_level(l, n, count, sums);
    for (int j = 0; j < count; ++j)
      for (int d = 0; d < D; ++d) dpoints.set((n + j) * D + d, sums[d][j]);
  }

 private:
  MSOPS_CPU void add_level(int l, int64_t n, int count, C (&sums)[D][kPoints]) const {
    const Level& level = all.grids.level[l];
    const int64_t features = all.features, width = all.width();
    const T* const table = all.entries(level);
    Points points;
    points.locate(all.grids, level, all.points, all.along, n, count);
    for (int c = 0; c < all.corners; ++c) {
      uint32_t entries[kPoints];
      points.entries(c, entries);
      C products[kPoints] = {};  // of dout and the corner's features
      for (int64_t f = 0; f < features; ++f) {
        const T* const from = dout + n * width + l * features + f;
        for (int j = 0; j < count; ++j) products[j] += C(from[j * width]) * C(table[entries[j] * features + f]);
      }
      for (int d = 0; d < D; ++d) {
        C weights[kPoints];
        points.shares(c, d, weights);
#pragma omp simd
        for (int j = 0; j < count; ++j) sums[d][j] += weights[j] * products[j];
      }
    }
  }
};

#ifdef __CUDACC__
// A point's results of some levels, which are collected in shared memory and stored as a whole sector.
template <typename T>
struct Row {
  // No two rows of a warp meet in a bank, except of doubles, which need even words.
  static constexpr int kBytes = 32, kWords = kBytes / 4, kPitch = kWords + (sizeof(T) == 8 ? 2 : 1);
  alignas(sizeof(T) == 8 ? 8 : 4) uint32_t words[kPitch];
};

// Blocks are (runs of points, groups of levels). Lanes 2i and 2i + 1 have the corners on the near and on the far side
// of the first axis, which are neighbours in the table nearly always, so that one lookup in the L1 cache finds both: a
// warp's lookups bound the speed. A pack of N features is loaded at once, and a lane stores one half of the results.
template <int D, bool kAlong, int N, typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Problem<T> all, int levels_of_group, bool is_whole, T* out) {
  using C = Compute<T>;
  constexpr int kCorners = 1 << (D - 1), kPoints = kThreads / 2, kOwn = N == 1 ? 1 : N / 2;
  __shared__ Row<T> rows[kPoints];
  const int side = static_cast<int>(threadIdx.x % 2);
  const int64_t own = blockIdx.x * int64_t{kPoints} + threadIdx.x / 2;
  const bool stores = own < all.count;
  const int64_t n = stores ? own : all.count - 1;
  const uint32_t features = static_cast<uint32_t>(all.features);
  const int first = static_cast<int>(blockIdx.y) * levels_of_group;
  const int last = min(first + levels_of_group, all.grids.levels);
  T* const row = reinterpret_cast<T*>(rows[threadIdx.x / 2].words);
  T* const to = out + n * all.width() + first * all.features;
  const Point<D, kAlong, C> point(all.grids, all.points, all.along, n);
  for (int l = first; l < last; ++l) {
    const Level& level = all.grids.level[l];
    Cell<D> cell;
    Axis<C> axes[D];
    point.locate(level, cell, axes);
    uint32_t entries[kCorners];
    cell.entries(level, side ? cell.far[0] : cell.near[0], entries);
    const T* const table = all.entries(level);
    for (uint32_t f = 0; f < features; f += N) {
      Pack<T, N> values[kCorners];
#pragma unroll
      for (int c = 0; c < kCorners; ++c) values[c] = load<N>(table + (uint64_t{entries[c]} * features + f));
      C sums[N] = {};
#pragma unroll
      for (int c = 0; c < kCorners; ++c) {
        const C weight = share<D, kAlong>(axes, 2 * c + side);
        for (int k = 0; k < N; ++k) sums[k] += weight * C(values[c].values[k]);
      }
      C totals[kOwn];
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        const C mine = side ? sums[N - kOwn + k] : sums[k], others = side ? sums[k] : sums[N - kOwn + k];
        totals[k] = mine + __shfl_xor_sync(~0u, others, 1);
      }
      const Pack<T, kOwn> results = rounded_pack<T>(totals);
      const int64_t at = (l - first) * all.features + f + side * (N - kOwn);
      if (is_whole) {
        for (int k = 0; k < kOwn; ++k) row[at + k] = results.values[k];  // a row is not aligned to packs
      } else if (stores && side < N) {
        store(to + at, results);
      }
    }
  }
  if (!is_whole) return;
  __syncwarp();
  const uint32_t* const words = rows[threadIdx.x / 2].words + side * 4;
  if (stores) reinterpret_cast<Pack<uint32_t, 4>*>(to)[side] = {words[0], words[1], words[2], words[3]};
}

template <int D, bool kAlong, int N, typename T>
void forward_on_gpu(Call& call, const Problem<T>& all, T* out) {
  const int64_t of_level = all.features * static_cast<int64_t>(sizeof(T)), levels = all.grids.levels;
  const int64_t of_group = std::clamp<int64_t>(Row<T>::kBytes / of_level, 1, levels);
  const bool is_whole =
      of_group * of_level == Row<T>::kBytes && levels % of_group == 0 && is_aligned<kPackWidth<T>>(out);
  const Grid grid((all.count + kThreads / 2 - 1) / (kThreads / 2), (levels + of_group - 1) / of_group);
  launch(call, forward_kernel<D, kAlong, N, T>, grid, kThreads, 0, all, static_cast<int>(of_group), is_whole, out);
}

// Adds how the corners' products grow with the coordinate of each axis from kAxis on.
template <int D, bool kAlong, int kAxis, typename C>
__device__ void add_axes(const Axis<C> (&axes)[D], const C (&products)[1 << D], C (&sums)[D]) {
#pragma unroll
  for (int c = 0; c < 1 << D; ++c) sums[kAxis] += share<D, kAlong, kAxis>(axes, c) * products[c];
  if constexpr (kAxis + 1 < D) add_axes<D, kAlong, kAxis + 1>(axes, products, sums);
}

template <int D, bool kAlong, int N, typename T>
__global__ void __launch_bounds__(kThreads) points_kernel(const Problem<T> all, const T* dout, CoordinatesOut dpoints) {
  using C = Compute<T>;
  constexpr int kCorners = 1 << D;
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= all.count) return;
  const int64_t features = all.features, width = all.width();
  C sums[D] = {};
  const Point<D, kAlong, C> point(all.grids, all.points, all.along, n);
  for (int l = 0; l < all.grids.levels; ++l) {
    const Level& level = all.grids.level[l];
    const T* const table = all.entries(level);
    Cell<D> cell;
    Axis<C> axes[D];
    point.locate(level, cell, axes);
    uint32_t entries[2][kCorners / 2];  // on the near and the far side of the first axis
    cell.entries(level, cell.near[0], entries[0]);
    cell.entries(level, cell.far[0], entries[1]);
    C products[kCorners] = {};
    for (int64_t f = 0; f < features; f += N) {
      Pack<T, N> values[kCorners];
#pragma unroll
      for (int c = 0; c < kCorners; ++c) values[c] = load<N>(table + entries[c % 2][c / 2] * features + f);
      const Pack<T, N> gradient = load<N>(dout + n * width + l * features + f);
#pragma unroll
      for (int c = 0; c < kCorners; ++c)
        for (int k = 0; k < N; ++k) products[c] += C(gradient.values[k]) * C(values[c].values[k]);
    }
    add_axes<D, kAlong, 0>(axes, products, sums);
  }
  for (int d = 0; d < D; ++d) dpoints.set(n * D + d, sums[d]);
}

template <int D, bool kAlong, int N, typename T>
void points_on_gpu(Call& call, const Problem<T>& all, const T* dout, CoordinatesOut dpoints) {
  launch(call, points_kernel<D, kAlong, N, T>, (all.count + kThreads - 1) / kThreads, kThreads, 0, all, dout, dpoints);
}
#endif

// Calls f(Constant<N>{}) with a width of packs that tile the entries. Second order, which is rarer, has no packs.
template <bool kAlong, typename T, typename F>
void with_packs(const Problem<T>& all, const T* row, F&& f) {
  constexpr int kWidest = kAlong ? 1 : sizeof(T) == 8 ? 2 : 4;
  with_width<T, kWidest>(false, all.features, {all.table, row}, static_cast<F&&>(f));
}

template <int D, bool kAlong, typename T>
void interpolate(Call& call, const Problem<T>& all, T* out) {
  if (all.count * all.features == 0) return;
  if (call.is_on_cpu()) {
    const double work = static_cast<double>(all.count) * static_cast<double>(all.width()) * (4 << D);
    return on_threads(call, (all.count + 63) / 64, work, ForwardOnCpu<D, kAlong, T>{all, out});
  }
#ifdef __CUDACC__
  with_packs<kAlong>(all, out, [&](auto width) { forward_on_gpu<D, kAlong, width>(call, all, out); });
#endif
}

template <int D, bool kAlong, typename T>
void gradient_of_points(Call& call, const Problem<T>& all, const T* dout, CoordinatesOut dpoints) {
  if (all.count == 0) return;
  if (call.is_on_cpu()) {
    using Body = PointsOnCpu<D, kAlong, T>;
    const double work = static_cast<double>(Body::kPoints * all.width() * (8 << D));
    return on_cpu(call, (all.count + Body::kPoints - 1) / Body::kPoints, Body{all, dout, dpoints}, work);
  }
#ifdef __CUDACC__
  with_packs<kAlong>(all, dout, [&](auto width) { points_on_gpu<D, kAlong, width>(call, all, dout, dpoints); });
#endif
}

}  // namespace msops::hash_encoding
