// out = x + y with broadcasting; each gradient is dout, summed over the axes that its input was broadcast along.

#include <algorithm>

#include "common/elementwise.h"
#include "common/scratch.h"
#include "common/sum.h"
#include "shared/broadcast/shapes.h"

using namespace msops;
using namespace msops::broadcast;

namespace {

struct Plus {
  template <typename C>
  MSOPS_BOTH void operator()(C x, C y, C& out) const {
    out = x + y;
  }
};

// Operands are rows of x and y, along each of which x and y advance by 1 or stay (`step`), and contiguous rows of the
// output.
template <typename T>
struct Operands {
  Axes<2> rows;
  int64_t length, outputs;
  int step[2];
  int64_t size[2];  // how many elements there are from in[k] on
  const T* in[2];
  T* out;

  template <typename Index>
  MSOPS_BOTH const T* row(int k, Index row) const {
    return in[k] + rows.offset(k, row);
  }
};

// On the CPU, index i is a run of at most kRun outputs within one row, with steps that are known at compile time.
template <int kRun, typename T>
struct BroadcastRun : Operands<T> {
  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t runs = (this->length + kRun - 1) / kRun, row = i / runs, begin = (i - row * runs) * kRun;
    const int64_t n = std::min<int64_t>(kRun, this->length - begin);
    const T *x = this->row(0, row) + begin * this->step[0], *y = this->row(1, row) + begin * this->step[1];
    T* to = this->out + row * this->length + begin;
    if (this->step[0] && this->step[1]) {
      add<1, 1>(n, x, y, to);
    } else if (this->step[0]) {
      add<1, 0>(n, x, y, to);
    } else {
      add<0, 1>(n, x, y, to);
    }
  }

  template <int kStepX, int kStepY>
  static MSOPS_CPU void add(int64_t n, const T* x, const T* y, T* to) {
    using C = Compute<T>;
    if constexpr (std::is_same<T, C>::value) {
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) to[j] = x[j * kStepX] + y[j * kStepY];
    } else {
      C wide_x[kRun], wide_y[kRun], sums[kRun];
      widen(x, wide_x, kStepX ? n : 1), widen(y, wide_y, kStepY ? n : 1);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) sums[j] = wide_x[j * kStepX] + wide_y[j * kStepY];
      narrow(sums, to, n);
    }
  }
};

template <int N, typename T>
MSOPS_BOTH Pack<T, N> sum_of(const Pack<T, N>& x, const Pack<T, N>& y) {
  Pack<T, N> sum;
  for (int j = 0; j < N; ++j) sum.values[j] = T(Compute<T>(x.values[j]) + Compute<T>(y.values[j]));
  return sum;
}

template <int N, typename T>
MSOPS_BOTH Pack<T, N> repeat(T value) {
  Pack<T, N> pack;
  for (T& each : pack.values) each = value;
  return pack;
}

// On the GPU, where packs of N tile the rows, index i is a pack.
template <int N, typename T>
struct BroadcastTiled : Operands<T> {
  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index packs = static_cast<Index>(this->length) / N, row = packs == 1 ? i : i / packs;
    const Index column = (i - row * packs) * N;
    store(this->out + i * N, sum_of(read(0, row, column), read(1, row, column)));
  }

  template <typename Index>
  MSOPS_BOTH Pack<T, N> read(int k, Index row, Index column) const {
    const T* from = this->row(k, row) + column * this->step[k];
    return this->step[k] ? load<N>(from) : repeat<N>(*from);
  }
};

// On the GPU, where packs do not tile the rows, index i is a pack of N outputs, in which rows may begin and end
// anywhere. The outputs after the last whole pack are the last index. If kFlat, x has the shape of the output.
template <int N, bool kFlat, typename T>
struct BroadcastFlat : Operands<T> {
  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index begin = i * N, end = static_cast<Index>(this->outputs);
    if (begin + N <= end) {
      const Pack<T, N> x = kFlat ? load<N>(this->in[0] + begin) : read(0, begin);
      store(this->out + begin, sum_of(x, read(1, begin)));
    } else {
      const Pack<T, N> sum = sum_of(read(0, begin), read(1, begin));
      for (int j = 0; j < N; ++j)
        if (begin + j < end) this->out[begin + j] = sum.values[j];
    }
  }

  template <typename Index>
  MSOPS_BOTH Pack<T, N> read(int k, Index begin) const {
    const Index length = static_cast<Index>(this->length);
    Index row = begin / length, column = begin - row * length;
    const T* from = this->row(k, row);
    if (column + N <= length) {
      if (!this->step[k]) return repeat<N>(*from);
      if constexpr (N > 1)
        if (packs_around<N>(from + column, this->in[k], this->size[k])) return load_shifted<N>(from + column);
    }
    Pack<T, N> pack = {};
    for (int j = 0; j < N && begin + j < static_cast<Index>(this->outputs); ++j) {
      pack.values[j] = from[column * this->step[k]];
      if (++column == length) column = 0, from = this->row(k, ++row);
    }
    return pack;
  }
};

// Launches the sum on the GPU. Beyond 32-bit indices, it takes halves of the outermost axis that has two positions. If
// `flat`, x has the shape of the output.
template <typename T>
void launch_sum(Call& call, const Operands<T>& all, bool flat) {
  constexpr int N = kPackWidth<T>;
  if (all.outputs > kLargest32) {
    int axis = 0;
    while (axis < all.rows.count && all.rows.size[axis] == 1) ++axis;
    const bool within_row = axis == all.rows.count;
    const int64_t positions = within_row ? all.length : all.rows.size[axis], outputs = all.outputs / positions;
    const int64_t half = positions < 2 * N ? positions / 2 : positions / 2 / N * N;  // packs stay aligned
    for (const int64_t first : {int64_t{0}, half}) {
      Operands<T> part = all;
      const int64_t count = first == 0 ? half : positions - half;
      (within_row ? part.length : part.rows.size[axis]) = count;
      part.outputs = count * outputs, part.out += first * outputs;
      for (int k = 0; k < 2; ++k) {
        const int64_t offset = first * (within_row ? all.step[k] : all.rows.stride[k][axis]);
        part.in[k] += offset, part.size[k] -= offset;
      }
      launch_sum(call, part, flat);
    }
    return;
  }
  const auto launch = [&](const auto& body, int64_t width) {
    on_gpu_with<uint32_t>(call, (all.outputs + width - 1) / width, body);
  };
  const auto aligned = [&](int k) { return is_aligned<N>(all.in[k]); };
  const bool packs = is_aligned<N>(all.out);
  if (packs && all.length % N == 0 && (aligned(0) || !all.step[0]) && (aligned(1) || !all.step[1])) {
    launch(BroadcastTiled<N, T>{all}, N);
  } else if (packs && flat && aligned(0)) {
    launch(BroadcastFlat<N, true, T>{all}, N);
  } else if (packs) {
    launch(BroadcastFlat<N, false, T>{all}, N);
  } else {
    launch(BroadcastFlat<1, false, T>{all}, 1);
  }
}

}  // namespace

// (x, y) -> (out)
MSOPS_ENTRY(AddForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y"), out = call.tensor("out");
  int64_t strides[2][kMaxRank];
  require_broadcast(call, {x, y}, out, strides);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    Axes<2> axes;
    for (int axis = 0; axis < out.rank; ++axis) axes.push(out.dim(axis), {strides[0][axis], strides[1][axis]});
    if (axes.count == 0 || (axes.count == 1 && axes.stride[0][0] && axes.stride[1][0])) {
      elementwise<T>(call, out.size, Plus{}, {x.as<T>(), y.as<T>()}, {out.as<T>()});
      return;
    }
    // All arrays are contiguous: along the innermost axis, what advances at all advances by 1.
    const int inner = --axes.count;
    const int64_t length = axes.size[inner];
    Operands<T> operands{axes, length, out.size, {}, {}, {}, out.as<T>()};
    const bool swap = x.size < y.size;  // since x may have the shape of the output
    for (int k = 0; k < 2; ++k) {
      const Tensor& tensor = (k == 0) == swap ? y : x;
      operands.in[k] = tensor.as<const T>(), operands.size[k] = tensor.size;
      operands.step[k] = axes.stride[swap ? 1 - k : k][inner] != 0;
      std::copy_n(axes.stride[swap ? 1 - k : k], kMaxRank, operands.rows.stride[k]);
    }
    if (call.is_on_cpu()) {
      constexpr int kRun = 1024;
      const int64_t runs = out.size == 0 ? 0 : axes.total() * ((length + kRun - 1) / kRun);
      return on_cpu(call, runs, BroadcastRun<kRun, T>{operands}, static_cast<double>(std::min<int64_t>(kRun, length)));
    }
    launch_sum(call, operands, operands.size[0] == out.size);
  });
}

// (dout, x) -> (dx, partial): dx is dout summed to the shape of x, whose values are not read. `partial` is scratch,
// with a row for each of the parts that the sums are split into; it is (1, 1) if they are not split.
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
    // On the GPU, kPack rows together are whole packs, however long one is; each is a part of its own.
    constexpr int64_t kPack = kPackWidth<T>;
    const bool matrix = kept.count == 1 && kept.contiguous() && summed.count == 1;
    if (!call.is_on_cpu() && matrix && x.size % kPack != 0 && splits > kPack) {
      const int64_t rows = summed.total(), tall = rows / kPack, rest = rows % kPack;
      const int64_t parts = (splits - 1) / kPack * kPack;
      const T* from = dout.as<const T>();
      Axes<1> wide, down, last;
      wide.push(kPack * x.size, {1}), down.push(tall, {kPack * x.size}), last.push(rest, {x.size});
      Compute<T>* to = partial.as<Compute<T>>();
      sum(call, wide, down, parts / kPack, from, to);
      if (rest) sum(call, kept, last, 1, from + tall * kPack * x.size, to + parts * x.size);
      sum_rows(call, parts + (rest > 0), x.size, x.size, partial.as<const Compute<T>>(), dx.as<T>());
    } else if (splits == 1) {
      sum(call, kept, summed, 1, dout.as<const T>(), dx.as<T>());
    } else {
      sum(call, kept, summed, splits, dout.as<const T>(), partial.as<Compute<T>>());
      sum_rows(call, splits, x.size, x.size, partial.as<const Compute<T>>(), dx.as<T>());
    }
  });
}

// The sums are split into enough parts to fill a GPU, but each part has at least `share` terms. It has more if the
// terms are neighbours in memory, since a warp then shares them.
MSOPS_SCRATCH(AddBackward) {
  const Tensor dout = call.tensor("dout"), x = call.tensor("x");
  const bool are_neighbours = dout.dim(-1) != x.dim(-1);
  const int64_t share = are_neighbours ? 2048 : 512, most = are_neighbours ? 4096 : 2048;
  const int64_t sums = std::max<int64_t>(1, x.size);
  const int64_t parts = std::max<int64_t>(1, std::min({dout.size / sums / share, most, (1 << 19) / sums}));
  return {{parts, parts > 1 ? x.size : 1}};
}
