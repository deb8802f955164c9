// (a, b) -> (a cos - b sin, b cos + a sin) for each pair of features; the gradient turns by the negative angles.

#include "common/parallel.h"
#include "rotary_embedding/gpu.h"
#include "rotary_embedding/rotation.h"

using namespace msops;
using rotary::Rotation;
using rotary::RotationByTables;

namespace {

// Turns one row on the CPU.
template <typename T, typename Table>
struct TurnRow {
  using C = Compute<T>;
  RotationByTables s;
  const T* x;
  const Table *cos, *sin;
  T* out;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t outer = row / s.length, inner = row / s.heads;
    const int64_t sample = (s.heads_first ? outer / s.heads : inner / s.length);
    const int64_t place = s.heads_first ? row - outer * s.length : inner - sample * s.length;
    const T* const from = x + row * s.width;
    T* const to = out + row * s.width;
    const int64_t angles = s.angles_at(sample, s.position(sample, place));
    const Table *const c = cos + angles, *const d = sin + angles;
    const C sign = s.inverse ? C(-1) : C(1);
    if (!s.interleaved) {
      turn<1, 1>(from, from + s.turned, c, d, sign, to, to + s.turned);
    } else if (s.is_twice) {
      turn<2, 2>(from, from + 1, c, d, sign, to, to + 1);
    } else {
      turn<2, 1>(from, from + 1, c, d, sign, to, to + 1);
    }
#pragma omp simd
    for (int64_t j = 2 * s.turned; j < s.width; ++j) to[j] = from[j];
  }

 private:
  template <int kStep, int kTableStep>
  MSOPS_CPU void turn(const T* first, const T* second, const Table* c, const Table* d, C sign, T* to_first,
                      T* to_second) const {
#pragma omp simd
    for (int64_t i = 0; i < s.turned; ++i) {
      C a = C(first[i * kStep]), b = C(second[i * kStep]);
      rotary::turn(a, b, C(c[i * kTableStep]), sign * C(d[i * kTableStep]));
      assign(to_first[i * kStep], a);
      assign(to_second[i * kStep], b);
    }
  }
};

// Requires, on the CPU, that each position is a row of the tables, and that copies of angles are equal in the rows that
// are read. The tables are small beside x.
template <typename Table>
void check_tables(Call& call, const RotationByTables& s, const Table* cos, const Table* sin) {
  const int64_t samples = s.table_of_batch || s.positions_of_batch ? s.batch : 1;
  for (int64_t i = 0; i < samples * s.length && call.ok(); ++i) {
    const int64_t sample = i / s.length, place = i - sample * s.length, position = s.position(sample, place);
    call.require(s.has_row(position), kBadValue, "position_ids has %lld, expected 0 to %lld",
                 static_cast<long long>(position), static_cast<long long>(s.table_rows - 1));
    if (!s.is_twice || !call.ok()) continue;
    const int64_t at = s.angles_at(sample, position), step = s.step(), gap = s.gap();
    bool differs = false;
    for (const Table* table : {cos, sin})
      for (int64_t j = at; j < at + s.turned * step; j += step) {
        const auto one = Compute<Table>(table[j]), other = Compute<Table>(table[j + gap]);
        differs |= one != other && (one == one || other == other);
      }
    call.require(!differs, kBadValue, "row %lld of cos or sin has different numbers for the two features of a pair",
                 static_cast<long long>(position));
  }
}

template <typename T, typename Table>
void turn(Call& call, const RotationByTables& s, const T* x, const Table* cos, const Table* sin, T* out) {
  if (call.is_on_cpu()) {
    check_tables(call, s, cos, sin);
    return on_cpu(call, s.rows(), TurnRow<T, Table>{s, x, cos, sin, out}, 2 * static_cast<double>(s.width));
  }
#ifdef __CUDACC__
  const bool is_plain = !s.is_twice && s.positions == nullptr;
  is_plain ? rotary::turn_on_gpu<T, Table, Rotation>(call, s, x, cos, sin, out)
           : rotary::turn_on_gpu(call, s, x, cos, sin, out);
#endif
}

// (x, cos, sin, position_ids?) -> (out), where x has the axes (batch, head, place, feature), with heads_first, or
// (batch, place, head, feature), or (place, head, feature). The tables are (row, angle) or (batch or 1, row, angle) or
// (batch or 1, 1, row, angle); a row has every angle twice where it is as long as a row of x.
int turn(Call& call, const char* from, const char* to, bool inverse) {
  const Tensor x = call.tensor(from);
  const Tensor cos = call.tensor_of("float32|common", "cos"), sin = call.tensor_of("float32|common", "sin");
  const Tensor positions = call.optional_of("index", "position_ids"), out = call.tensor(to);
  RotationByTables s{};
  s.interleaved = call.attribute("interleaved", 0, 1);
  s.heads_first = call.attribute("heads_first", 0, 1);
  const int rank = call.attribute("has_batch", 0, 1) || s.heads_first ? 4 : 3;
  s.inverse = inverse;
  call.require(x.rank == rank, kBadRank, "%s has rank %d, expected %d", from, x.rank, rank);
  call.require_same_shape(out, x);
  call.require_same_shape(sin, cos);
  call.require(2 <= cos.rank && cos.rank <= 4, kBadShape, "cos has rank %d, expected 2 to 4", cos.rank);
  if (!call.ok()) return call.status();
  call.require(!std::strcmp(sin.dtype, cos.dtype), kBadDtype, "sin is %s, cos is %s", sin.dtype, cos.dtype);
  s.batch = rank == 4 ? x.dim(0) : 1;
  s.heads = x.dim(s.heads_first ? 1 : -2);
  s.length = x.dim(s.heads_first ? -2 : -3);
  s.width = x.dim(-1);
  s.is_twice = cos.dim(-1) == s.width && s.width > 0;
  s.turned = s.is_twice ? s.width / 2 : cos.dim(-1);
  s.table_rows = cos.dim(-2);
  s.table_of_batch = cos.rank > 2 && cos.dim(0) != 1;
  call.require(!s.table_of_batch || cos.dim(0) == s.batch, kBadShape, "cos is for %lld samples, %s has %lld",
               static_cast<long long>(cos.dim(0)), from, static_cast<long long>(s.batch));
  call.require(cos.rank < 4 || cos.dim(1) == 1, kBadShape, "cos has %lld heads, expected 1",
               static_cast<long long>(cos.dim(1)));
  call.require(2 * s.turned == s.width || (!s.is_twice && 2 * s.turned < s.width), kBadShape,
               "cos has %lld columns for %lld features", static_cast<long long>(cos.dim(-1)),
               static_cast<long long>(s.width));
  if (positions.dtype) {
    s.positions = positions.data;
    s.positions_are_wide = !std::strcmp(positions.dtype, "int64");
    s.positions_of_batch = positions.rank == 2 && positions.dim(0) != 1;
    if (s.positions_of_batch) {
      call.require_shape(positions, {s.batch, s.length});
    } else if (positions.rank == 2) {
      call.require_shape(positions, {1, s.length});
    } else {
      call.require_shape(positions, {s.length});
    }
  } else {
    call.require(s.table_rows == s.length, kBadShape, "cos has %lld rows, expected %lld",
                 static_cast<long long>(s.table_rows), static_cast<long long>(s.length));
  }
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    if (x.size == 0) return;
    if (!std::strcmp(cos.dtype, dtype_name<T>())) {
      turn(call, s, x.as<const T>(), cos.as<const T>(), sin.as<const T>(), out.as<T>());
    } else if constexpr (!std::is_same<T, float>::value) {
      turn(call, s, x.as<const T>(), cos.as<const float>(), sin.as<const float>(), out.as<T>());
    }
  });
}

}  // namespace

MSOPS_ENTRY(RotaryEmbeddingForward) { return turn(call, "x", "out", false); }

MSOPS_ENTRY(RotaryEmbeddingBackward) { return turn(call, "dout", "dx", true); }
