// out[n, l, f] = sum over the corners c around points[n] in the grid of level l of share(c) * table[entry(l, c), f].
// `hash_encoding/grid.h` tells where corners and their entries are.

#include "hash_encoding/interpolate.h"
#include "hash_encoding/table.h"

using namespace msops;
using namespace msops::hash_encoding;

namespace {

Tensor coordinates(Call& call, const char* name) { return call.tensor_of("float16|float32|float64", name, 2); }

// Requires float16 coordinates to be beside a float16 table.
void require_coordinates(Call& call, const Tensor& coordinates, const Tensor& table) {
  call.require(!call.ok() || Coordinates::of(coordinates).bytes > 2 || Coordinates::of(table).bytes == 2, kBadDtype,
               "%s is float16, the others are wider", coordinates.name);
}

// Requires tensors to be as the points are.
void require_as_points(Call& call, const Tensor& tensor, const Tensor& points) {
  call.require_same_shape(tensor, points);
  call.require(!call.ok() || std::strcmp(tensor.dtype, points.dtype) == 0, kBadDtype, "%s is %s, points are %s",
               tensor.name, tensor.dtype, points.dtype);
}

// Requires tensors whose sizes fit: rows of `levels` times `features` numbers.
void require_rows(Call& call, const Tensor& rows, const Grids& grids, int64_t count, int64_t features) {
  call.require_shape(rows, {count, size_of({grids.levels, features})});
}

// Returns the features of an entry, given a row of all levels.
int64_t features_of(Call& call, const Tensor& rows, const Grids& grids) {
  call.require(!call.ok() || rows.dim(1) % grids.levels == 0, kBadShape, "%s has %lld columns for %d levels", rows.name,
               static_cast<long long>(rows.dim(1)), grids.levels);
  return call.ok() ? rows.dim(1) / grids.levels : 0;
}

// Calls f(Constant<D>{}) with the number of axes.
template <typename F>
void with_axes(int64_t axes, F&& f) {
  if (axes == 2) f(Constant<2>{});
  if (axes == 3) f(Constant<3>{});
  if (axes == 4) f(Constant<4>{});
}

template <typename T>
Problem<T> problem_of(const Grids& grids, int64_t features, const Tensor& points, const Tensor& along, const T* table) {
  const int64_t count = points.dim(0), axes = points.dim(1);
  return {grids, count, features, 1 << axes, Coordinates::of(points), Coordinates::of(along), table};
}

// (points, table) -> (out), or (points, table, ddpoints) -> (ddout): the derivative along ddpoints
template <bool kAlong>
int forward(Call& call) {
  const Tensor points = coordinates(call, "points"), table = call.tensor("table", 2);
  const Tensor along = kAlong ? coordinates(call, "ddpoints") : Tensor{}, out = call.tensor("out", 2);
  const Grids grids = grids_of(call, points.dim(1));
  const int64_t count = points.dim(0), features = table.dim(1);
  require_coordinates(call, points, table);
  if (kAlong) require_as_points(call, along, points);
  call.require_shape(table, {grids.entries, features});
  require_rows(call, out, grids, count, features);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto all = problem_of(grids, features, points, along, table.as<const T>());
    with_axes(points.dim(1), [&](auto axes) { interpolate<axes, kAlong>(call, all, out.as<T>()); });
  });
}

// (points, table, dout) -> (dpoints), or (points, table, dout, ddpoints) -> (dpoints): the derivative along ddpoints
template <bool kAlong>
int gradient_of_points(Call& call) {
  const Tensor points = coordinates(call, "points"), table = call.tensor("table", 2), dout = call.tensor("dout", 2);
  const Tensor along = kAlong ? coordinates(call, "ddpoints") : Tensor{}, dpoints = coordinates(call, "dpoints");
  const Grids grids = grids_of(call, points.dim(1));
  const int64_t count = points.dim(0), features = table.dim(1);
  require_coordinates(call, points, table);
  if (kAlong) require_as_points(call, along, points);
  require_as_points(call, dpoints, points);
  call.require_shape(table, {grids.entries, features});
  require_rows(call, dout, grids, count, features);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto all = problem_of(grids, features, points, along, table.as<const T>());
    const CoordinatesOut to{dpoints.data, Coordinates::of(dpoints).bytes};
    with_axes(points.dim(1),
              [&](auto axes) { hash_encoding::gradient_of_points<axes, kAlong>(call, all, dout.as<const T>(), to); });
  });
}

Shapes scratch_shapes(Call& call, const Grids& grids, const Tensor& points, int64_t features, const Tensor& dout) {
  if (!call.ok()) return {{0}};
  return {table_scratch(grids, points.dim(1), points.dim(0), features, Coordinates::of(dout).bytes)};
}

// (points, dout) -> (dtable), or (points, dout, ddpoints) -> (dtable): the derivative along ddpoints
template <bool kAlong>
int gradient_of_table(Call& call) {
  const Tensor points = coordinates(call, "points"), dout = call.tensor("dout", 2);
  const Tensor along = kAlong ? coordinates(call, "ddpoints") : Tensor{}, dtable = call.tensor("dtable", 2);
  const Tensor scratch = call.tensor_of("int32", "scratch", 1);
  const Grids grids = grids_of(call, points.dim(1));
  const int64_t count = points.dim(0), features = features_of(call, dout, grids);
  require_coordinates(call, points, dout);
  if (kAlong) require_as_points(call, along, points);
  require_rows(call, dout, grids, count, features);
  call.require_shape(dtable, {grids.entries, features});
  require_shapes(call, {scratch}, scratch_shapes(call, grids, points, features, dout));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto all = problem_of<T>(grids, features, points, along, nullptr);
    with_axes(points.dim(1), [&](auto axes) {
      hash_encoding::gradient_of_table<axes, kAlong>(call, all, dout.as<const T>(), scratch.data, dtable.as<T>());
    });
  });
}

Shapes scratch_of(Call& call) {
  const Tensor points = coordinates(call, "points"), dout = call.tensor("dout", 2);
  const Grids grids = grids_of(call, points.dim(1));
  return scratch_shapes(call, grids, points, features_of(call, dout, grids), dout);
}

}  // namespace

MSOPS_ENTRY(HashEncodingForward) { return forward<false>(call); }
MSOPS_ENTRY(HashEncodingBackwardPoints) { return gradient_of_points<false>(call); }
MSOPS_ENTRY(HashEncodingBackwardTable) { return gradient_of_table<false>(call); }
MSOPS_SCRATCH(HashEncodingBackwardTable) { return scratch_of(call); }

// The derivatives of these along directions at the points, which are the gradient of BackwardPoints.
MSOPS_ENTRY(HashEncodingAlongForward) { return forward<true>(call); }
MSOPS_ENTRY(HashEncodingAlongPoints) { return gradient_of_points<true>(call); }
MSOPS_ENTRY(HashEncodingAlongTable) { return gradient_of_table<true>(call); }
MSOPS_SCRATCH(HashEncodingAlongTable) { return scratch_of(call); }
