// Sampling on the CPU. A cloud is sorted into cells of some tens of points. A new point changes distances only in those
// cells that are nearer to it than their points' largest distance so far, which are few after the first samples.
#pragma once

#include "../shared/point_cloud/cells.h"
#include "clouds.h"

namespace msops::points {

// Buckets are a cloud's cells that have points.
template <typename C>
struct Buckets {
  int64_t most;
  C* bounds;          // (7, most): low x, y, z; high x, y, z; the largest distance
  int32_t* furthest;  // (3, most): where points begin and end, and the index of the first one of that distance

  MSOPS_CPU C* low(int axis) const { return bounds + axis * most; }
  MSOPS_CPU C* high(int axis) const { return bounds + (3 + axis) * most; }
  MSOPS_CPU C* distance() const { return bounds + 6 * most; }
  MSOPS_CPU int32_t* begin() const { return furthest; }
  MSOPS_CPU int32_t* end() const { return furthest + most; }
  MSOPS_CPU int32_t* index() const { return furthest + 2 * most; }
};

template <typename Task, typename T>
struct SampleOnCpu {
  using C = Compute<T>;
  Task sampling;
  CellsOfClouds<T> all;
  C* distances;       // (clouds, size), in the order of the sorted points
  C* bounds;          // (clouds, 7, most)
  int32_t* furthest;  // (clouds, 3, most)

  MSOPS_CPU void operator()(int64_t cloud) const {
    int32_t* const out = sampling.of_cloud(cloud);
    std::fill(out, out + sampling.samples, 0);
    if (sampling.length(cloud) == 0) return;
    SortCloudOnCpu<CellsOfClouds<T>>{all}(cloud);
    const Cells<C> cells = all[cloud];
    C* const distance = distances + cloud * all.size;
    const Buckets<C> buckets{all.most, bounds + cloud * 7 * all.most, furthest + cloud * 3 * all.most};
    const int64_t count = make_buckets(cells, distance, buckets);
    int32_t last = out[0] = sampling.start(cloud);
    for (int64_t s = 1; s < sampling.samples; ++s) {
      const Point<C> taken = sampling.point(cloud, last);
      const int64_t best = update(cells, distance, buckets, count, taken);
      out[s] = last = buckets.index()[best];
    }
  }

 private:
  static MSOPS_CPU int64_t make_buckets(const Cells<C>& cells, C* distance, const Buckets<C>& buckets) {
    int64_t count = 0;
    for (int64_t cell = 0, number = cells.lattice.size(); cell < number; ++cell) {
      const int32_t begin = cells.begin(cell), end = cells.ends[cell];
      if (begin == end) continue;
      C low[3] = {kInfinity<C>, kInfinity<C>, kInfinity<C>}, high[3] = {-low[0], -low[1], -low[2]};
      for (int64_t i = begin; i < end; ++i) {
        distance[i] = first_distance(cells[i]);
        if (distance[i] > 0) grow(low, high, cells[i]);
      }
      for (int axis = 0; axis < 3; ++axis) {
        buckets.low(axis)[count] = low[axis];
        buckets.high(axis)[count] = high[axis];
      }
      buckets.begin()[count] = begin;
      buckets.end()[count] = end;
      find_furthest(cells, distance, buckets, count++);
    }
    return count;
  }

  // Takes a point, and returns the bucket of the next one.
  MSOPS_CPU int64_t update(const Cells<C>& cells, C* distance, const Buckets<C>& buckets, int64_t count,
                           const Point<C>& taken) const {
    const C *low_x = buckets.low(0), *low_y = buckets.low(1), *low_z = buckets.low(2);
    const C *high_x = buckets.high(0), *high_y = buckets.high(1), *high_z = buckets.high(2);
    C* const of_buckets = buckets.distance();
    Candidate<C> best{-1, 0};
    int64_t of_best = 0;
    for (int64_t first = 0; first < count; first += kRun) {
      const int here = static_cast<int>(std::min<int64_t>(kRun, count - first));
      bool nearer[kRun];
#pragma omp simd
      for (int k = 0; k < here; ++k) {
        const int64_t b = first + k;
        const C bound = square_of(beyond(low_x[b], high_x[b], taken.x), beyond(low_y[b], high_y[b], taken.y),
                                  beyond(low_z[b], high_z[b], taken.z));
        nearer[k] = bound < of_buckets[b];
      }
      for (int k = 0; k < here; ++k) {
        const int64_t b = first + k;
        if (nearer[k]) {
          const int64_t begin = buckets.begin()[b], points = buckets.end()[b] - begin;
          const C *x = cells.x + begin, *y = cells.y + begin, *z = cells.z + begin;
          C* const of_points = distance + begin;
#pragma omp simd
          for (int64_t i = 0; i < points; ++i) {
            const C d = squared_distance({x[i], y[i], z[i]}, taken);
            of_points[i] = d < of_points[i] ? d : of_points[i];
          }
          find_furthest(cells, distance, buckets, b);
        }
        const Candidate<C> of_bucket{of_buckets[b], buckets.index()[b]};
        if (of_bucket.is_further(best)) {
          best = of_bucket;
          of_best = b;
        }
      }
    }
    return of_best;
  }

  // How far a coordinate is outside [low, high].
  static MSOPS_CPU C beyond(C low, C high, C at) {
    const C below = low - at, above = at - high, most = below > above ? below : above;
    return most > 0 ? most : C(0);
  }

  static MSOPS_CPU void find_furthest(const Cells<C>& cells, const C* distance, const Buckets<C>& buckets, int64_t b) {
    const int64_t begin = buckets.begin()[b], end = buckets.end()[b];
    C most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = begin; i < end; ++i) most = distance[i] > most ? distance[i] : most;
    int64_t i = begin;
    for (constexpr int kWidth = 16; i + kWidth <= end; i += kWidth) {
      int any = 0;
#pragma omp simd reduction(| : any)
      for (int w = 0; w < kWidth; ++w) any |= distance[i + w] == most;
      if (any) break;
    }
    while (distance[i] != most) ++i;
    buckets.distance()[b] = most;
    buckets.index()[b] = cells.order[i];
  }
};

}  // namespace msops::points
