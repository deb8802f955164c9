// A cloud's points, sorted by the cells of a uniform grid. A search visits the cells near a point, so that it computes
// few distances, and finds exactly what a search of all points finds: all bounds hold after rounding, too.
//
// The grid is of cubes, as many along each axis as the cloud is long, which a bound of their number allows. If all
// points are in one cell, as equal points are, or most points beside an outlier, a search visits each point once. No
// search visits a point twice, or more rows of cells than there are points.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../common/parallel.h"
#include "../../common/scratch.h"
#include "distance.h"
#include "lengths.h"

namespace msops::points {

// Lattice says where cells are.
template <typename C>
struct Lattice {
  C low[3];           // the corner of the first cell
  C inverse;          // 1 / the length of a cell
  int32_t counts[3];  // cells along each axis

  // Chooses cells for points from `low` to `high`: at most `most`, of at least the length `least`.
  static MSOPS_BOTH Lattice of(const C (&low)[3], const C (&high)[3], int64_t most, C least) {
    Lattice all{{low[0], low[1], low[2]}, C(0), {1, 1, 1}};
    if (!all.is_divided(low, high)) return all;
    for (C length = all.least_length(low, high, most, least);; length *= kGrowth)
      if (all.divide(high, length) <= static_cast<double>(most)) return all;
  }

  // `of` tries lengths from this one on, each kGrowth times the one before.
  static constexpr C kGrowth = C(1.26);
  static MSOPS_BOTH C extent(const C (&low)[3], const C (&high)[3]) {
    C most = 0;
    for (int axis = 0; axis < 3; ++axis) most = high[axis] - low[axis] > most ? high[axis] - low[axis] : most;
    return most;
  }
  static MSOPS_BOTH bool is_divided(const C (&low)[3], const C (&high)[3]) {
    return extent(low, high) > 0 && extent(low, high) < kInfinity<C>;
  }
  static MSOPS_BOTH C least_length(const C (&low)[3], const C (&high)[3], int64_t most, C least) {
    const C length = extent(low, high) / static_cast<C>(most);
    return length > least ? length : least;
  }
  // Sets cells of this length, from `low` to `high`, and returns how many there are.
  MSOPS_BOTH double divide(const C (&high)[3], C length) {
    double cells = 1;
    for (int axis = 0; axis < 3; ++axis) {
      const C along = (high[axis] - low[axis]) / length;
      const double count = along < C(1e9) ? floor(static_cast<double>(along)) + 1 : 1e9;  // NaN, if low > high
      counts[axis] = static_cast<int32_t>(count);
      cells *= count;
    }
    inverse = 1 / length;
    return cells;
  }

  // Returns the cell along an axis of a coordinate. It never falls as the coordinate grows; NaN has the first cell.
  MSOPS_BOTH int32_t along(int axis, C coordinate) const {
    const C cell = (coordinate - low[axis]) * inverse;
    if (!(cell > 0)) return 0;
    return cell < static_cast<C>(counts[axis] - 1) ? static_cast<int32_t>(cell) : counts[axis] - 1;
  }
  MSOPS_BOTH int64_t number(int32_t x, int32_t y, int32_t z) const {
    return (int64_t{z} * counts[1] + y) * counts[0] + x;
  }
  MSOPS_BOTH int64_t number_of(const Point<C>& p) const { return number(along(0, p.x), along(1, p.y), along(2, p.z)); }
  MSOPS_BOTH int64_t size() const { return int64_t{counts[0]} * counts[1] * counts[2]; }
};

constexpr int kLatticeNumbers = 8;  // of scratch: room for a Lattice

// CellBox is a box of cells, with both ends.
struct CellBox {
  int32_t low[3], high[3];

  MSOPS_BOTH int64_t rows() const { return int64_t{high[1] - low[1] + 1} * (high[2] - low[2] + 1); }
  // Whether the box is all of a lattice with these numbers of cells.
  MSOPS_BOTH bool covers(const int32_t (&counts)[3]) const {
    bool all = true;
    for (int axis = 0; axis < 3; ++axis) all &= low[axis] == 0 && high[axis] == counts[axis] - 1;
    return all;
  }
  MSOPS_BOTH bool has(const CellBox& other) const {
    bool inside = true;
    for (int axis = 0; axis < 3; ++axis) inside &= low[axis] <= other.low[axis] && other.high[axis] <= high[axis];
    return inside;
  }
};

// Returns the cells up to `steps` cells away from the point's own.
template <typename C>
MSOPS_BOTH CellBox cells_around(const Lattice<C>& lattice, const Point<C>& p, int32_t steps) {
  const C center[3] = {p.x, p.y, p.z};
  CellBox box;
  for (int axis = 0; axis < 3; ++axis) {
    const int32_t cell = lattice.along(axis, center[axis]), last = lattice.counts[axis] - 1;
    box.low[axis] = cell > steps ? cell - steps : 0;
    box.high[axis] = last - cell > steps ? cell + steps : last;
  }
  return box;
}

// Returns the cells of all points whose squared distance, as rounded, may be at most `square`. Where it underflows, the
// square of the smallest normal number is a bound.
template <typename C>
MSOPS_BOTH CellBox cells_within(const Lattice<C>& lattice, const Point<C>& p, C square) {
  constexpr C kLeast = std::numeric_limits<C>::min();
  const C center[3] = {p.x, p.y, p.z};
  const C radius = sqrt(square > kLeast ? square : kLeast) * C(1.00001);
  CellBox box;
  for (int axis = 0; axis < 3; ++axis) {
    const bool all = !(radius < kInfinity<C>);
    box.low[axis] = all ? 0 : lattice.along(axis, center[axis] - radius);
    box.high[axis] = all ? lattice.counts[axis] - 1 : lattice.along(axis, center[axis] + radius);
  }
  return box;
}

// Cells is a cloud, sorted: cell after cell. The order of the points of a cell is theirs in the cloud on the CPU, and
// any on the GPU.
template <typename C>
struct Cells {
  Lattice<C> lattice;
  const int32_t* ends;  // where each cell's points end
  const int32_t* order;
  const C *x, *y, *z;

  MSOPS_BOTH int32_t begin(int64_t cell) const { return cell > 0 ? ends[cell - 1] : 0; }
  MSOPS_BOTH Point<C> operator[](int64_t i) const { return {x[i], y[i], z[i]}; }

  // Finds the points of cells from x to x_end of row `row` of a box, without the cells of `done`. Side 0 is what is
  // left of `done`, side 1 what is right of it.
  MSOPS_BOTH void run(const CellBox& box, const CellBox& done, int64_t row, int side, int32_t& from,
                      int32_t& to) const {
    const int32_t width = box.high[1] - box.low[1] + 1;
    const int32_t row_y = box.low[1] + static_cast<int32_t>(row % width);
    const int32_t row_z = box.low[2] + static_cast<int32_t>(row / width);
    int32_t first = box.low[0], last = box.high[0];
    if (done.low[1] <= row_y && row_y <= done.high[1] && done.low[2] <= row_z && row_z <= done.high[2]) {
      if (side == 0) last = last < done.low[0] - 1 ? last : done.low[0] - 1;
      if (side == 1) first = first > done.high[0] + 1 ? first : done.high[0] + 1;
    } else if (side == 1) {
      last = first - 1;
    }
    from = to = 0;
    if (first > last) return;
    from = begin(lattice.number(first, row_y, row_z));
    to = ends[lattice.number(last, row_y, row_z)];
  }
};

// The box without cells.
MSOPS_BOTH CellBox no_cells() { return {{0, 0, 0}, {-1, -1, -1}}; }

// CellsOfClouds has the Cells of each cloud, in scratch.
template <typename T>
struct CellsOfClouds {
  using C = Compute<T>;
  const T* points;         // (clouds, size, 3)
  const int32_t* lengths;  // how many points of each cloud count, or null: all
  int64_t clouds, size, most;
  C least;         // the least length of a cell
  C* lattices;     // (clouds, kLatticeNumbers)
  C* sorted;       // (clouds, 3, size)
  int32_t* ends;   // (clouds, most)
  int32_t* order;  // (clouds, size)

  MSOPS_BOTH int64_t length(int64_t cloud) const { return length_of(lengths, cloud, size); }
  MSOPS_BOTH Point<C> point(int64_t cloud, int64_t i) const { return point_at(points, cloud * size + i); }
  MSOPS_BOTH Lattice<C>& lattice(int64_t cloud) const {
    return *reinterpret_cast<Lattice<C>*>(lattices + cloud * kLatticeNumbers);
  }
  MSOPS_BOTH C* x(int64_t cloud) const { return sorted + cloud * 3 * size; }
  MSOPS_BOTH Cells<C> operator[](int64_t cloud) const {
    const C* const of_cloud = x(cloud);
    return {lattice(cloud), ends + cloud * most, order + cloud * size, of_cloud, of_cloud + size, of_cloud + 2 * size};
  }
};

// CellsOfAny sorts points of any number of coordinates by the cells of their projections.
template <typename T>
struct CellsOfAny : CellsOfClouds<T> {
  int64_t axes;  // `points` are (clouds, size, axes)

  MSOPS_BOTH Point<Compute<T>> point(int64_t cloud, int64_t i) const {
    return projection_of(this->points + (cloud * this->size + i) * axes, axes);
  }
};

// Puts point i of a cloud at a place of the sorted ones.
template <typename Clouds>
MSOPS_BOTH void place(const Clouds& all, int64_t cloud, int64_t i, int64_t at) {
  const Point<typename Clouds::C> p = all.point(cloud, i);
  typename Clouds::C* const to = all.x(cloud) + at;
  to[0] = p.x;
  to[all.size] = p.y;
  to[2 * all.size] = p.z;
  all.order[cloud * all.size + at] = static_cast<int32_t>(i);
}

// Makes a box hold a point.
template <typename C>
MSOPS_BOTH void grow(C (&low)[3], C (&high)[3], const Point<C>& p) {
  const C of_point[3] = {p.x, p.y, p.z};
  for (int axis = 0; axis < 3; ++axis) {
    low[axis] = of_point[axis] < low[axis] ? of_point[axis] : low[axis];
    high[axis] = of_point[axis] > high[axis] ? of_point[axis] : high[axis];
  }
}

// Sorts a cloud on the CPU.
template <typename Clouds>
struct SortCloudOnCpu {
  using C = typename Clouds::C;
  Clouds all;

  MSOPS_CPU void operator()(int64_t cloud) const {
    const int64_t length = all.length(cloud);
    C low[3] = {kInfinity<C>, kInfinity<C>, kInfinity<C>}, high[3] = {-low[0], -low[1], -low[2]};
    for (int64_t i = 0; i < length; ++i) {
      const Point<C> p = all.point(cloud, i);
      if (is_finite(p)) grow(low, high, p);
    }
    const Lattice<C> lattice = Lattice<C>::of(low, high, all.most, all.least);
    all.lattice(cloud) = lattice;
    int32_t* const ends = all.ends + cloud * all.most;
    const int64_t cells = lattice.size();
    std::fill(ends, ends + cells, 0);
    for (int64_t i = 0; i < length; ++i) ++ends[lattice.number_of(all.point(cloud, i))];
    int32_t before = 0;
    for (int64_t cell = 0; cell < cells; ++cell) {
      const int32_t count = ends[cell];
      ends[cell] = before;
      before += count;
    }
    for (int64_t i = 0; i < length; ++i) place(all, cloud, i, ends[lattice.number_of(all.point(cloud, i))]++);
  }
};

// CellScratch takes the scratch of a search from a call: points, lattices, ends(..., dtype=int32) and order(...,
// dtype=int32).
struct CellScratch {
  Tensor sorted, lattices, ends, order;

  explicit CellScratch(Call& call)
      : sorted(call.scratch("points", 3)),
        lattices(call.scratch("lattices", 2)),
        ends(call.tensor_of("int32", "ends", 2)),
        order(call.tensor_of("int32", "order", 2)) {}

  static Shapes shapes(int64_t clouds, int64_t size) {
    return {{clouds, 3, size}, {clouds, kLatticeNumbers}, {clouds, size + 1}, {clouds, size}};
  }

  void check(Call& call, int64_t clouds, int64_t size) const {
    call.require(size <= INT32_MAX, kBadShape, "more than 2^31 - 1 points in a cloud");
    require_shapes(call, {sorted, lattices, ends, order}, shapes(clouds, size));
  }

  // Returns the cells for clouds (clouds, size, axes) of `lengths`, of at least the length `least`, in which queries
  // look for `wanted` points. On a GPU, where a warp finds the points of 32 rows at once, cells are smaller.
  template <typename T>
  CellsOfClouds<T> clouds(const Call& call, const Tensor& of, int64_t wanted, Compute<T> least = 0,
                          const int32_t* lengths = nullptr) const {
    using C = Compute<T>;
    const int64_t points = call.is_on_cpu() ? std::max<int64_t>(4, wanted / 4) : std::max<int64_t>(1, wanted / 8);
    const int64_t most = of.dim(1) / points + 1;
    return {of.as<T>(), lengths,          of.dim(0),      of.dim(1),          most,
            least,      lattices.as<C>(), sorted.as<C>(), ends.as<int32_t>(), order.as<int32_t>()};
  }
};

template <typename Clouds>
void sort_on_cpu(Call& call, const Clouds& all) {
  on_cpu(call, all.clouds, SortCloudOnCpu<Clouds>{all}, 16 * static_cast<double>(all.size));
}

// Whether it pays on the CPU to sort a cloud for this many queries.
inline bool pays_to_sort(int64_t size, int64_t queries) { return size >= 512 && queries >= 32; }

constexpr int kRun = 64;  // distances that are computed together

// Calls f(i, distances, count) for points at(i) of [from, to), kRun at a time: `distances` are the squared distances of
// points i, i + 1, ... It is inlined, so that loops over at(i) vectorize.
template <typename C, typename At, typename F>
MSOPS_CPU __attribute__((always_inline)) void for_distances(const Point<C>& query, int64_t from, int64_t to,
                                                            const At& at, const F& f) {
  C distances[kRun];
  for (int64_t i = from; i < to; i += kRun) {
    const int count = static_cast<int>(std::min<int64_t>(kRun, to - i));
#pragma omp simd
    for (int k = 0; k < count; ++k) distances[k] = squared_distance(at(i + k), query);
    f(i, distances, count);
  }
}

// Calls f for the distances of all points in cells of `box`, without those of `done`. It is inlined, too.
template <typename C, typename F>
MSOPS_CPU __attribute__((always_inline)) void for_box(const Cells<C>& cells, const Point<C>& query, const CellBox& box,
                                                      const CellBox& done, const F& f) {
  for (int64_t row = 0, rows = box.rows(); row < rows; ++row)
    for (int side = 0; side < 2; ++side) {
      int32_t from, to;
      cells.run(box, done, row, side, from, to);
      if (from < to) for_distances(query, from, to, [&](int64_t i) { return cells[i]; }, f);
    }
}

}  // namespace msops::points
