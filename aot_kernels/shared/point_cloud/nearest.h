// The nearest points of a cloud to queries, which knn and three_nn find, and the gradient of their distances.
#pragma once

#include "cells.h"

namespace msops::points {

// Neighbour is a point and its squared distance. Equally near ones are ordered by their indices.
template <typename C>
struct Neighbour {
  C distance;
  int32_t index;

  MSOPS_BOTH bool is_nearer(const Neighbour& other) const {
    return distance < other.distance || (distance == other.distance && index < other.index);
  }
};

// A distance that is NaN is infinite.
template <typename C>
MSOPS_BOTH C or_infinite(C distance) {
  return distance < kInfinity<C> ? distance : kInfinity<C>;
}

// Nearest describes a call: for each query, the `k` nearest points of its cloud, nearest first. All points count, and
// a cloud has at least k.
template <typename T>
struct Nearest {
  using C = Compute<T>;
  using Clouds = CellsOfClouds<T>;
  static constexpr bool kAny = false;
  const T *points, *queries;  // (clouds, size, 3), (clouds, number, 3)
  int64_t clouds, size, number, k;
  int32_t* indices;  // (clouds, number, k)
  T* distances;      // (clouds, number, k)

  MSOPS_BOTH int64_t length(int64_t) const { return size; }
  MSOPS_BOTH int64_t found(int64_t) const { return k; }
  MSOPS_BOTH Point<C> query(int64_t i) const { return point_at(queries, i); }
  MSOPS_BOTH void write(int64_t query, int64_t i, const Neighbour<C>& found) const {
    indices[query * k + i] = found.index;
    assign(distances[query * k + i], sqrt(found.distance));
  }
};

// AnyPoint is a point of any number of coordinates: its projection, and those after the third.
template <typename C>
struct AnyPoint : Point<C> {
  C further[kMostAxes - 3];
};

// AnyNearest is a Nearest of clouds with lengths, and of points of any number of coordinates.
template <typename T>
struct AnyNearest : Nearest<T> {
  using C = Compute<T>;
  using Clouds = CellsOfAny<T>;
  static constexpr bool kAny = true;
  const int32_t *lengths, *new_lengths;  // how many points and queries of each cloud count, or null: all
  int64_t axes;

  MSOPS_BOTH int64_t length(int64_t cloud) const { return length_of(lengths, cloud, this->size); }
  // Returns how many points are found for a query.
  MSOPS_BOTH int64_t found(int64_t query) const {
    const int64_t cloud = query / this->number, most = length(cloud);
    if (query % this->number >= length_of(new_lengths, cloud, this->number)) return 0;
    return most < this->k ? most : this->k;
  }
  MSOPS_BOTH AnyPoint<C> query(int64_t i) const {
    const T* const from = this->queries + i * axes;
    AnyPoint<C> query{projection_of(from, axes), {}};
    for (int axis = 3; axis < kMostAxes; ++axis)
      if (axis < axes) query.further[axis - 3] = C(from[axis]);
    return query;
  }
  // Returns the squared distance of point i of a cloud, given that of its projection.
  MSOPS_BOTH C whole(C square, int64_t cloud, int64_t i, const AnyPoint<C>& query) const {
    if (axes <= 3) return square;
    const T* const point = this->points + (cloud * this->size + i) * axes;
    for (int axis = 3; axis < kMostAxes; ++axis) {
      const C difference = axis < axes ? C(point[axis]) - query.further[axis - 3] : C(0);
      square = product_sum(difference, difference, square);
    }
    return square;
  }
  MSOPS_BOTH void write_missing(int64_t query, int64_t i) const {
    this->indices[query * this->k + i] = -1;
    assign(this->distances[query * this->k + i], C(0));
  }
};

// Held holds the nearest points of those offered, as a heap with the furthest on top.
template <typename C>
struct Held {
  static constexpr int kMost = 256;
  Neighbour<C> heap[kMost];
  int most, count = 0;
  Neighbour<C> floor;  // only points after this one are held

  MSOPS_CPU Held(int size, const Neighbour<C>& before) : most(size), floor(before) {}

  MSOPS_CPU bool is_full() const { return count == most; }
  MSOPS_CPU void offer(const Neighbour<C>& found) {
    if (!floor.is_nearer(found)) return;
    if (count < most) {
      int at = count++;
      for (; at > 0 && heap[(at - 1) / 2].is_nearer(found); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
      heap[at] = found;
    } else if (found.is_nearer(heap[0])) {
      replace_top(found, count);
    }
  }
  // Puts the held points in order.
  MSOPS_CPU void sort() {
    for (int last = count - 1; last > 0; --last) {
      const Neighbour<C> top = heap[0];
      replace_top(heap[last], last);
      heap[last] = top;
    }
  }

 private:
  MSOPS_CPU void replace_top(const Neighbour<C>& by, int size) {
    int at = 0;
    for (int below = 1; below < size; below = 2 * at + 1) {
      if (below + 1 < size && heap[below].is_nearer(heap[below + 1])) ++below;
      if (!by.is_nearer(heap[below])) break;
      heap[at] = heap[below];
      at = below;
    }
    heap[at] = by;
  }
};

template <typename Task>
struct NearestOnCpu {
  using C = typename Task::C;
  Task all;
  typename Task::Clouds clouds;
  bool sorted;  // whether `clouds` are there

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t cloud = i / all.number, number = all.found(i);
    const auto query = all.query(i);
    Neighbour<C> last{-1, 0};
    for (int64_t first = 0; first < number; first += Held<C>::kMost) {
      Held<C> held(static_cast<int>(std::min<int64_t>(Held<C>::kMost, number - first)), last);
      if (sorted) {
        search(cloud, query, held);
      } else {
        const auto at = [&](int64_t j) { return clouds.point(cloud, j); };
        for_distances(query, 0, all.length(cloud), at, [&](int64_t from, const C* distances, int count) {
          offer(cloud, query, held, distances, count, [&](int j) { return static_cast<int32_t>(from + j); });
        });
      }
      held.sort();
      for (int j = 0; j < held.count; ++j) all.write(i, first + j, held.heap[j]);
      last = held.heap[held.count - 1];
    }
    if constexpr (Task::kAny)
      for (int64_t j = number; j < all.k; ++j) all.write_missing(i, j);
  }

 private:
  // Visits the cells around the query, twice as far each time, until `held` is full; then all cells that may have
  // points as near as those.
  template <typename Query>
  MSOPS_CPU void search(int64_t cloud, const Query& query, Held<C>& held) const {
    const Cells<C> cells = clouds[cloud];
    CellBox done = no_cells(), next = cells_around(cells.lattice, query, 1);
    bool is_last = false;
    for (int32_t steps = 1;;) {
      for_box(cells, query, next, done, [&](int64_t from, const C* distances, int count) {
        offer(cloud, query, held, distances, count, [&](int j) { return cells.order[from + j]; });
      });
      if (is_last || next.covers(cells.lattice.counts)) return;
      done = next;
      if (held.is_full()) {
        next = cells_within(cells.lattice, query, held.heap[0].distance);
        if (done.has(next)) return;
        is_last = true;
      } else {
        next = cells_around(cells.lattice, query, steps *= 2);
      }
    }
  }

  template <typename Query, typename IndexOf>
  MSOPS_CPU void offer(int64_t cloud, const Query& query, Held<C>& held, const C* distances, int count,
                       const IndexOf& index_of) const {
    const C furthest = held.is_full() ? held.heap[0].distance : kInfinity<C>;
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int j = 0; j < count; ++j) any |= !(distances[j] > furthest);
    for (int j = 0; any && j < count; ++j) {
      if (distances[j] > furthest) continue;
      C distance = or_infinite(distances[j]);
      if constexpr (Task::kAny) distance = or_infinite(all.whole(distance, cloud, index_of(j), query));
      held.offer({distance, index_of(j)});
    }
  }
};

#ifdef __CUDACC__
template <typename Task>
void find_on_gpu(Call& call, const Task& all, const typename Task::Clouds& cells);  // nearest_gpu.h
#endif

template <typename Task>
void find_nearest(Call& call, const Task& all, const typename Task::Clouds& cells) {
#ifdef __CUDACC__
  if (!call.is_on_cpu()) return find_on_gpu(call, all, cells);
#endif
  const bool sorted = pays_to_sort(all.size, all.number);
  if (sorted) sort_on_cpu(call, cells);
  const double visited = sorted ? 1000 + 40 * static_cast<double>(all.k) : static_cast<double>(all.size);
  on_cpu(call, all.clouds * all.number, NearestOnCpu<Task>{all, cells, sorted}, visited);
}

}  // namespace msops::points
