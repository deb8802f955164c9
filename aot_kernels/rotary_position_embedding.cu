// This operator serves patch_mindspore alone: msops has no public name for it.
//
// (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b) for each pair of features, by tables that have numbers for both.
// The gradient is (a, b) -> (a cos_a + b sin_b, b cos_b - a sin_a).

#include "common/pack.h"
#include "common/parallel.h"

using namespace msops;

namespace {

// Rows are the features of x (n0, n1, n2, width). The tables have the same axes, or 1 in place of some.
struct TableRotation {
  int64_t n0, n1, n2, width;
  int64_t table0, table1, table2;  // rows of the tables from one index to the next, 0 where they have 1
  bool interleaved;                // pairs are (2i, 2i + 1), else (i, i + width / 2)
  bool inverse;                    // computes the gradient

  int64_t rows() const { return n0 * n1 * n2; }

  // Returns where the table's row for a row of x begins.
  template <typename Index>
  MSOPS_BOTH int64_t table_of(Index row) const {
    const Index outer = row / static_cast<Index>(n2), first = outer / static_cast<Index>(n1);
    return (first * table0 + (outer - first * n1) * table1 + (row - outer * n2) * table2) * width;
  }
};

// Holds the numbers of a pair in the tables.
template <typename C>
struct Angle {
  C cos_a, cos_b, sin_a, sin_b;

  MSOPS_BOTH void turn(C& a, C& b, bool inverse) const {
    const C before = a;
    a = before * cos_a + b * (inverse ? sin_b : -sin_a);
    b = b * cos_b + before * (inverse ? -sin_a : sin_b);
  }
};

// Turns a row on the CPU.
template <typename T>
struct TurnRow {
  using C = Compute<T>;
  TableRotation s;
  const T *x, *cos, *sin;
  T* out;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t table = s.table_of(row);
    s.interleaved ? turn<2>(row * s.width, table, 1) : turn<1>(row * s.width, table, s.width / 2);
  }

 private:
  template <int kStep>
  MSOPS_CPU void turn(int64_t at, int64_t table, int64_t gap) const {
    const T *const from = x + at, *const c = cos + table, *const d = sin + table;
    T* const to = out + at;
#pragma omp simd
    for (int64_t i = 0; i < s.width / 2; ++i) {
      const int64_t first = i * kStep, second = first + gap;
      C a = C(from[first]), b = C(from[second]);
      const Angle<C> angle{C(c[first]), C(c[second]), C(d[first]), C(d[second])};
      angle.turn(a, b, s.inverse);
      assign(to[first], a);
      assign(to[second], b);
    }
  }
};

// Turns N pairs of a row on the GPU, which stand in two packs: the halves of the pairs or, with kPairsInPack, the pairs
// themselves. One pair that is interleaved has its elements one after the other.
template <typename T, int N, bool kPairsInPack>
struct TurnPacks {
  using C = Compute<T>;
  TableRotation s;
  const T *x, *cos, *sin;
  T* out;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index units = static_cast<Index>(s.width / (2 * N)), row = i / units, unit = i - row * units;
    const bool neighbours = kPairsInPack || s.interleaved;
    const int64_t first = static_cast<int64_t>(unit) * (neighbours ? 2 * N : N);
    const int64_t second = first + (neighbours ? N : s.width / 2);
    const int64_t at = static_cast<int64_t>(row) * s.width, table = s.table_of(row);
    const auto x_a = load<N>(x + at + first), x_b = load<N>(x + at + second);
    const auto cos_a = load<N>(cos + table + first), cos_b = load<N>(cos + table + second);
    const auto sin_a = load<N>(sin + table + first), sin_b = load<N>(sin + table + second);
    Pack<T, N> out_a, out_b;
    if constexpr (kPairsInPack) {
      for (int j = 0; j < N; j += 2) {
        turn(x_a.values[j], x_a.values[j + 1], cos_a.values[j], cos_a.values[j + 1], sin_a.values[j],
             sin_a.values[j + 1], out_a.values[j], out_a.values[j + 1]);
        turn(x_b.values[j], x_b.values[j + 1], cos_b.values[j], cos_b.values[j + 1], sin_b.values[j],
             sin_b.values[j + 1], out_b.values[j], out_b.values[j + 1]);
      }
    } else {
      for (int j = 0; j < N; ++j)
        turn(x_a.values[j], x_b.values[j], cos_a.values[j], cos_b.values[j], sin_a.values[j], sin_b.values[j],
             out_a.values[j], out_b.values[j]);
    }
    store_at_once(out + at + first, out_a);
    store_at_once(out + at + second, out_b);
  }

 private:
  MSOPS_BOTH void turn(T from_a, T from_b, T cos_a, T cos_b, T sin_a, T sin_b, T& to_a, T& to_b) const {
    C a = C(from_a), b = C(from_b);
    Angle<C>{C(cos_a), C(cos_b), C(sin_a), C(sin_b)}.turn(a, b, s.inverse);
    assign(to_a, a);
    assign(to_b, b);
  }
};

template <typename T>
void turn_on_gpu(Call& call, const TableRotation& s, const T* x, const T* cos, const T* sin, T* out) {
  constexpr int N = kPackWidth<T>;
  const bool packs = is_aligned<N>(x) && is_aligned<N>(cos) && is_aligned<N>(sin) && is_aligned<N>(out);
  const int64_t units = s.rows() * (s.width / 2), size = 2 * units;
  if (!packs || s.width % (2 * N) != 0) {
    on_gpu(call, units, size, TurnPacks<T, 1, false>{s, x, cos, sin, out});
  } else if (s.interleaved) {
    on_gpu(call, units / N, size, TurnPacks<T, N, true>{s, x, cos, sin, out});
  } else {
    on_gpu(call, units / N, size, TurnPacks<T, N, false>{s, x, cos, sin, out});
  }
}

int turn(Call& call, const char* from, const char* to, bool inverse) {
  const Tensor x = call.tensor(from, 4), cos = call.tensor("cos", 4), sin = call.tensor("sin", 4);
  const Tensor out = call.tensor(to, 4);
  const bool interleaved = call.attribute("interleaved", 0, 1);
  call.require_same_shape(out, x);
  call.require_same_shape(sin, cos);
  if (!call.ok()) return call.status();
  for (int axis = 0; axis < 4; ++axis)
    call.require(cos.dim(axis) == x.dim(axis) || (axis < 3 && cos.dim(axis) == 1), kBadShape,
                 "axis %d of cos has length %lld, expected %lld%s", axis, static_cast<long long>(cos.dim(axis)),
                 static_cast<long long>(x.dim(axis)), axis < 3 ? " or 1" : "");
  call.require(x.dim(3) % 2 == 0, kBadShape, "%s has %lld features, expected an even number", from,
               static_cast<long long>(x.dim(3)));
  const int64_t table2 = cos.dim(2) > 1, table1 = cos.dim(1) > 1 ? cos.dim(2) : 0;
  const int64_t table0 = cos.dim(0) > 1 ? cos.dim(1) * cos.dim(2) : 0;
  const TableRotation s{x.dim(0), x.dim(1), x.dim(2), x.dim(3), table0, table1, table2, interleaved, inverse};
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const T *const in = x.as<const T>(), *const c = cos.as<const T>(), *const d = sin.as<const T>();
    if (x.size == 0) return;
    if (call.is_on_cpu()) {
      on_cpu(call, s.rows(), TurnRow<T>{s, in, c, d, out.as<T>()}, 3 * static_cast<double>(s.width));
    } else {
      turn_on_gpu(call, s, in, c, d, out.as<T>());
    }
  });
}

}  // namespace

MSOPS_ENTRY(RotaryPositionEmbeddingForward) { return turn(call, "x", "out", false); }

MSOPS_ENTRY(RotaryPositionEmbeddingBackward) { return turn(call, "dout", "dx", true); }
