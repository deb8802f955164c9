// The search of balls on the CPU.
#pragma once

#include "balls.h"

namespace msops::points {

template <typename Task, typename T>
struct BallOnCpu {
  using C = Compute<T>;
  Task balls;
  CellsOfClouds<T> clouds;
  bool sorted;  // whether `clouds` are there

  MSOPS_CPU void operator()(int64_t i) const {
    const Point<C> query = point_at(balls.queries, i);
    const int64_t cloud = i / balls.number;
    int32_t* const out = balls.indices + i * balls.samples;
    const int64_t found = !balls.has_query(i) ? 0 : sorted ? search(cloud, query, out) : scan(cloud, query, out);
    const int32_t fill = found > 0 ? out[0] : 0;
    std::fill(out + found, out + balls.samples, fill);
    balls.counts[i] = static_cast<int32_t>(found);
  }

 private:
  MSOPS_CPU int64_t search(int64_t cloud, const Point<C>& query, int32_t* out) const {
    const Cells<C> cells = clouds[cloud];
    const CellBox box = cells_within(cells.lattice, query, balls.outer);
    int64_t visited = 0;
    for (int64_t row = 0, rows = box.rows(); row < rows; ++row) visited += points_of_row(cells, box, row);
    if (!balls.takes_cells(visited)) return scan(cloud, query, out);
    // The lowest indices are a heap with the highest on top.
    int64_t found = 0;
    for_box(cells, query, box, no_cells(), [&](int64_t first, const C* distances, int count) {
      for (int k = 0; k < count; ++k) {
        if (!balls.has(distances[k])) continue;
        const int32_t index = cells.order[first + k];
        if (found < balls.samples) {
          out[found++] = index;
          if (found == balls.samples) std::make_heap(out, out + found);
        } else if (index < out[0]) {
          std::pop_heap(out, out + found);
          out[found - 1] = index;
          std::push_heap(out, out + found);
        }
      }
    });
    std::sort(out, out + found);
    return found;
  }

  // Visits the points in their order.
  MSOPS_CPU int64_t scan(int64_t cloud, const Point<C>& query, int32_t* out) const {
    int64_t found = 0;
    const int64_t length = balls.length(cloud);
    const T* const points = balls.points + cloud * balls.size * 3;
    for (int64_t first = 0; first < length && found < balls.samples; first += kRun) {
      const int count = static_cast<int>(std::min<int64_t>(kRun, length - first));
      bool inside[kRun];
      int any = 0;
#pragma omp simd reduction(| : any)
      for (int k = 0; k < count; ++k) {
        inside[k] = balls.has(squared_distance(point_at(points, first + k), query));
        any |= inside[k];
      }
      for (int k = 0; any && k < count && found < balls.samples; ++k)
        if (inside[k]) out[found++] = static_cast<int32_t>(first + k);
    }
    return found;
  }
};

}  // namespace msops::points
