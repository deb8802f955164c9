// out = x + y with broadcasting; each gradient is dout, summed over the axes that its input was broadcast along.

#include <algorithm>

#include "common/elementwise.h"
#include "common/sum.h"

using namespace msops;

namespace {

struct Plus {
  template <typename C>
  MSOPS_BOTH void operator()(C x, C y, C& out) const {
    out = x + y;
  }
};

// Index i is a run of N outputs within one row: along a row, x and y each advance by 1 or stay (`step`).
template <int N, typename T>
struct BroadcastAdd {
  Axes<2> rows;
  int64_t row_length;
  int step_x, step_y;
  T* out;
  const T *x, *y;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index length = static_cast<Index>(row_length), runs = (length + N - 1) / N;
    const Index row = runs == 1 ? i : i / runs, begin = (i - row * runs) * N;
    const T* from_x = x + rows.offset(0, row) + begin * step_x;
    const T* from_y = y + rows.offset(1, row) + begin * step_y;
    T* to = out + row * length + begin;
    if constexpr (N <= kPackWidth<T>) {
      const Pack<T, N> a = read(from_x, step_x), b = read(from_y, step_y);
      Pack<T, N> result;
      for (int j = 0; j < N; ++j) result.values[j] = T(Compute<T>(a.values[j]) + Compute<T>(b.values[j]));
      store(to, result);
    } else {
      const Index n = length - begin < N ? length - begin : N;
      if (step_x && step_y) {
        add_run<1, 1>(n, from_x, from_y, to);
      } else if (step_x) {
        add_run<1, 0>(n, from_x, from_y, to);
      } else {
        add_run<0, 1>(n, from_x, from_y, to);
      }
    }
  }

  // On the CPU, with steps that are known when it is compiled.
  template <int kStepX, int kStepY, typename Index>
  static MSOPS_BOTH void add_run(Index n, const T* from_x, const T* from_y, T* to) {
#pragma omp simd
    for (Index j = 0; j < n; ++j) assign(to[j], Compute<T>(from_x[j * kStepX]) + Compute<T>(from_y[j * kStepY]));
  }

  static MSOPS_BOTH Pack<T, N> read(const T* from, int step) {
    if (step) return load<N>(from);
    Pack<T, N> pack;
    for (T& value : pack.values) value = *from;
    return pack;
  }
};

// The length of `tensor` along an axis of `to`.
int64_t length_along(const Tensor& tensor, const Tensor& to, int axis) {
  const int own = axis - (to.rank - tensor.rank);
  return own < 0 ? 1 : tensor.dim(own);
}

// The stride of `tensor` along each axis of `to`, to whose shape it is broadcast; false if it can't be.
bool broadcast_strides(const Tensor& tensor, const Tensor& to, int64_t (&strides)[kMaxRank]) {
  int64_t stride = 1;
  for (int axis = to.rank - 1; axis >= 0; --axis) {
    const int64_t length = length_along(tensor, to, axis);
    if (length != to.dim(axis) && length != 1) return false;
    strides[axis] = length == 1 ? 0 : stride;
    stride *= length;
  }
  return tensor.rank <= to.rank;
}

}  // namespace

// (x, y) -> (out)
MSOPS_ENTRY(AddForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y"), out = call.tensor("out");
  int64_t stride_x[kMaxRank], stride_y[kMaxRank];
  call.require(out.rank <= kMaxRank, kBadRank, "out has rank %d, more than %d", out.rank, kMaxRank);
  if (call.ok()) {
    bool fits = broadcast_strides(x, out, stride_x) && broadcast_strides(y, out, stride_y);
    fits &= out.rank == std::max(x.rank, y.rank);
    for (int axis = 0; axis < out.rank; ++axis)
      fits &= out.dim(axis) == length_along(x, out, axis) || out.dim(axis) == length_along(y, out, axis);
    call.require(fits, kBadShape, "x and y do not broadcast to the shape of out");
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Axes<2> axes;
    for (int axis = 0; axis < out.rank; ++axis) axes.push(out.dim(axis), {stride_x[axis], stride_y[axis]});
    if (axes.count == 0 || (axes.count == 1 && axes.stride[0][0] && axes.stride[1][0])) {
      elementwise<T>(call, out.size, Plus{}, {x.as<T>(), y.as<T>()}, {out.as<T>()});
      return;
    }
    // All arrays are contiguous: along the innermost axis, what advances at all advances by 1.
    const int inner = --axes.count;
    const int64_t length = axes.size[inner];
    const int step_x = axes.stride[0][inner] != 0, step_y = axes.stride[1][inner] != 0;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const BroadcastAdd<N, T> body{axes, length, step_x, step_y, out.as<T>(), x.as<const T>(), y.as<const T>()};
      parallel_for(call, out.size == 0 ? 0 : axes.total() * ((length + N - 1) / N), out.size, body,
                   static_cast<double>(std::min<int64_t>(N, length)));
    };
    if (call.on_cpu()) {
      launch(Constant<1024>{});
    } else {
      with_width<T>(false, length, {out.as<T>(), x.as<const T>(), y.as<const T>()}, launch);
    }
  });
}

// (dout, x) -> (dx, partial): dx is dout summed to the shape of x, whose values are not read. `partial` is scratch,
// with a row for each of the parts that the sums are split into; (1, 1) if they are not.
MSOPS_ENTRY(AddBackward) {
  const Tensor dout = call.tensor("dout"), x = call.tensor("x"), dx = call.tensor("dx");
  const Tensor partial = call.scratch("partial", 2);
  const int64_t splits = partial.dim(0);
  call.require_same_shape(dx, x);
  int64_t stride_x[kMaxRank];
  call.require(dout.rank <= kMaxRank, kBadRank, "dout has rank %d, more than %d", dout.rank, kMaxRank);
  if (call.ok()) {
    call.require(broadcast_strides(x, dout, stride_x), kBadShape, "x does not broadcast to the shape of dout");
    call.require(splits >= 1, kBadShape, "partial has no rows");
    call.require_shape(partial, {splits, splits > 1 ? x.size : 1});
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Axes<2> axes;
    int64_t stride[kMaxRank], next = 1;
    for (int axis = dout.rank - 1; axis >= 0; next *= dout.dim(axis--)) stride[axis] = next;
    for (int axis = 0; axis < dout.rank; ++axis) axes.push(dout.dim(axis), {stride[axis], stride_x[axis]});
    Axes<1> kept, summed;
    for (int a = 0; a < axes.count; ++a) (axes.stride[1][a] ? kept : summed).push(axes.size[a], {axes.stride[0][a]});
    if (splits == 1) {
      sum(call, kept, summed, 1, dout.as<const T>(), dx.as<T>());
    } else {
      sum(call, kept, summed, splits, dout.as<const T>(), partial.as<Compute<T>>());
      sum_rows(call, splits, x.size, x.size, partial.as<const Compute<T>>(), dx.as<T>());
    }
  });
}
