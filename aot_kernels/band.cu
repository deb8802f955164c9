// This operator serves patch_mindspore alone: msops has no public name for it.
//
// y = x in the upper or the lower triangle of each matrix, from a diagonal on, and 0 elsewhere. Elements are moved as
// they are, by their size alone.

#include "common/pack.h"
#include "common/parallel.h"
#ifdef __CUDACC__
#include "common/gpu/divisor.h"
#endif

using namespace msops;

namespace {

struct Matrices {
  int64_t rows, columns, diagonal;
  bool upper;

  MSOPS_BOTH bool keeps(int64_t row, int64_t column) const {
    return upper ? row + diagonal <= column : row + diagonal >= column;
  }
};

template <typename T>
struct Row {
  Matrices m;
  const T* x;
  T* y;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t row = i % m.rows;
    for (int64_t j = 0; j < m.columns; ++j) y[i * m.columns + j] = m.keeps(row, j) ? x[i * m.columns + j] : T(0);
  }
};

#ifdef __CUDACC__
// Index i is a pack of N elements of y, in which rows may begin and end. What is not kept is not read.
template <int N, typename T>
struct Packs {
  Matrices m;
  Divisor rows, columns;  // where the array has indices of 32 bits
  int64_t size;
  const T* x;
  T* y;

  template <typename Index>
  __device__ void operator()(Index i) const {
    const int64_t begin = static_cast<int64_t>(i) * N;
    int64_t row, column;
    if constexpr (sizeof(Index) == 4) {
      int at_row, at_column;
      rows.divide(columns.divide(static_cast<int>(begin), &at_column), &at_row);
      row = at_row, column = at_column;
    } else {
      const int64_t line = begin / m.columns;
      row = line % m.rows, column = begin - line * m.columns;
    }
    bool kept[N], any = false;
    if (column + N <= m.columns && begin + N <= size) {  // the pack is in one row, whose limit is at one element
      const int64_t limit = row + m.diagonal - column;
      const int at = static_cast<int>(limit < -1 ? -1 : limit > N ? N : limit);
      any = m.upper ? at < N : at >= 0;
#pragma unroll
      for (int j = 0; j < N; ++j) kept[j] = m.upper ? j >= at : j <= at;
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        any |= kept[j] = m.keeps(row, column) && begin + j < size;
        if (++column == m.columns) column = 0, row = row + 1 == m.rows ? 0 : row + 1;
      }
    }
    Pack<T, N> pack = {};
    if (begin + N <= size) {
      if (any) pack = load<N>(x + begin);
#pragma unroll
      for (int j = 0; j < N; ++j) pack.values[j] = kept[j] ? pack.values[j] : T(0);
      return store_at_once(y + begin, pack);
    }
    for (int64_t j = begin; j < size; ++j) y[j] = kept[j - begin] ? x[j] : T(0);
  }
};

template <typename T>
void copy_on_gpu(Call& call, const Matrices& m, int64_t size, const T* x, T* y) {
  constexpr int kPack = kPackWidth<T>;
  const auto run = [&](auto width) {
    constexpr int N = width;
    const bool small = size <= kLargest32;
    const Packs<N, T> body{m, Divisor(small ? m.rows : 1), Divisor(small ? m.columns : 1), size, x, y};
    on_gpu(call, (size + N - 1) / N, size, body);
  };
  is_aligned<kPack>(x) && is_aligned<kPack>(y) ? run(Constant<kPack>{}) : run(Constant<1>{});
}
#endif

}  // namespace

// (x) -> (y)
MSOPS_ENTRY(BandForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  const bool upper = call.attribute("upper", 0, 1) != 0;
  const int64_t diagonal = call.attribute("diagonal", INT32_MIN, INT32_MAX);
  call.require(x.rank >= 2, kBadShape, "x has %d axes, expected at least 2", x.rank);
  call.require_same_shape(y, x);
  return call.run<Half, float, double, bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>(
      [&](auto type) {
        using T = Unit<sizeof(typename decltype(type)::type)>;
        if (x.size == 0) return;
        const Matrices m{x.dim(-2), x.dim(-1), diagonal, upper};
        if (call.is_on_cpu())
          return on_cpu(call, x.size / m.columns, Row<T>{m, x.as<const T>(), y.as<T>()},
                        static_cast<double>(m.columns));
#ifdef __CUDACC__
        copy_on_gpu(call, m, x.size, x.as<const T>(), y.as<T>());
#endif
      });
}
