// What teams are made up of (see team.h), and the rows that their functions take.
#pragma once

#include <tuple>
#include <type_traits>

#include "call.h"
#include "pack.h"

namespace msops {

// Row is a row of a matrix. T is const where it is only read.
template <typename T>
struct Row {
  T* data;
  int64_t length;
};

// TeamShape says how a team is made up. Its lanes, which are threads of a block, keep kHeld packs of a row each. If
// kHeld is 0, rows may be longer, and each reduction reads them again. Up to 32 lanes are neighbours in a warp; more
// are a block, which may also have fewer warps. If kClustered, the blocks of a cluster share a row.
//
// If kHasEdges, rows may begin and end between aligned packs, all rows of a body at the same distance from one. Before
// the first aligned pack and after the last there are up to N - 1 elements each: each lane has one of these at most.
//
// If kKeepsParameters, all rows of a team have those packs at the same columns. Then each lane keeps its packs of
// parameters in shared memory.
template <int lanes, int width, int held, bool clustered = false, bool has_edges = false, bool keeps_parameters = false>
struct TeamShape {
  static constexpr int kLanes = lanes, kWidth = width, kHeld = held;
  static constexpr bool kClustered = clustered, kHasEdges = has_edges, kKeepsParameters = keeps_parameters;
  static constexpr bool kSends = false;
};

// SendingShape is a cluster whose blocks send their results of a reduction to each other, where other clusters have a
// barrier. That barrier also waits until all that the threads stored in global memory is visible.
template <int lanes, int width, int held, bool keeps_parameters = false>
struct SendingShape : TeamShape<lanes, width, held, true, false, keeps_parameters> {
  static constexpr bool kSends = true;
};

// Teams that keep parameters have so many places at most, each of these bytes.
constexpr int kMostPlaces = 2;
template <typename Shape>
MSOPS_BOTH int bytes_of_place(int threads) {
  return threads * Shape::kHeld * Shape::kWidth * static_cast<int>(sizeof(float));
}

// Edge is the index of a lane's element at the edges of a row, where a number is the index of a pack.
struct Edge {};

// kWidthAt is how many elements there are at an index of type I.
template <typename Shape, typename I>
constexpr int kWidthAt = std::is_same<I, Edge>::value ? 1 : Shape::kWidth;

template <typename Packs, typename Element, int kHeld>
struct PacksAndEdge {
  Packs packs[kHeld];
  Element edge;

  MSOPS_BOTH Packs& operator[](int i) { return packs[i]; }
  MSOPS_BOTH const Packs& operator[](int i) const { return packs[i]; }
  MSOPS_BOTH Element& operator[](Edge) { return edge; }
  MSOPS_BOTH const Element& operator[](Edge) const { return edge; }
};

// Held is what a lane keeps of a row in registers.
template <typename Packs, typename Element, typename Shape, int kHeld = (Shape::kHeld > 0 ? Shape::kHeld : 1)>
using Held = std::conditional_t<Shape::kHasEdges, PacksAndEdge<Packs, Element, kHeld>, Packs[kHeld]>;
template <typename C, typename Shape>
using HeldNumbers = Held<C[Shape::kWidth], C[1], Shape>;

// HeldRow is a row that the team keeps in registers.
template <typename T, typename Shape, typename U = std::remove_const_t<T>>
struct HeldRow {
  Row<T> row;
  Held<Pack<U, Shape::kWidth>, Pack<U, 1>, Shape> of;
};

// HeldValues is a row of numbers that the team keeps in registers.
template <typename C, typename Shape>
struct HeldValues {
  int64_t length;
  HeldNumbers<C, Shape> of;
};

// Computed is a row of numbers that are computed wherever they are read, since the team cannot keep them.
template <typename F, typename... In>
struct Computed {
  F f;
  std::tuple<In...> in;
};

using OnCpu = TeamShape<1, 16, 0>;

// Parameters are a number for each column, which all rows share, such as a weight. They are elements of T or, if
// `is_float`, of float. Functions of rows take them in place of a Row; if `data` is null, each is `otherwise`. Teams
// that keep parameters have room for those among the places of for_rows(), whose `place` is 0, or 1 for a second one,
// and for those of for_rows_with_sums(), whose `place` is 0. Parameters without a place are read again for each row.
template <typename T, int place = -1>
struct Parameters {
  const void* data;
  int64_t length;
  bool is_float;
  Compute<T> otherwise[OnCpu::kWidth];  // as many equal numbers as the CPU reads at once

  Parameters(const Tensor& tensor, int64_t columns, Compute<T> number)
      : data(tensor.data),
        length(columns),
        is_float(tensor.dtype && std::strcmp(tensor.dtype, dtype_name<float>()) == 0) {
    for (Compute<T>& each : otherwise) each = number;
  }
  MSOPS_BOTH Row<const T> row() const { return {static_cast<const T*>(data), length}; }
  MSOPS_BOTH Row<const float> row_of_float() const { return {static_cast<const float*>(data), length}; }

  MSOPS_BOTH bool has_row() const { return data && is_float == std::is_same<T, float>::value; }

  // Moves to a later row of parameters, if there are several.
  MSOPS_BOTH void advance(int64_t rows) {
    if (!data) return;
    const int64_t elements = rows * length;
    data = is_float ? static_cast<const void*>(row_of_float().data + elements) : row().data + elements;
  }
};

// SharedOfWarp has room for one result of a reduction.
struct alignas(16) SharedOfWarp {
  unsigned char bytes[32];
};

// SentResults are in the shared memory of each block of a SendingShape.
struct SentResults {
  float words[2][16][sizeof(SharedOfWarp) / sizeof(float)];  // (turn, block of the cluster, word of its result)
  uint64_t arrived[2];                                       // an mbarrier for each turn
};

}  // namespace msops
