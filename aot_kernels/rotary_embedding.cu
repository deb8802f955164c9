// (a, b) -> (a cos - b sin, b cos + a sin) for each pair of features; the gradient turns by the negative angles.

#include "common/parallel.h"
#include "rotary_embedding/gpu.h"
#include "rotary_embedding/rotation.h"

using namespace msops;
using rotary::Rotation;

namespace {

// Turns one row on the CPU.
template <typename T, typename Table>
struct TurnRow {
  using C = Compute<T>;
  Rotation s;
  const T* x;
  const Table *cos, *sin;
  T* out;

  MSOPS_CPU void operator()(int64_t row) const {
    const int64_t outer = row / s.length, inner = row / s.heads;
    const int64_t sample = (s.heads_first ? outer / s.heads : inner / s.length);
    const int64_t place = s.heads_first ? row - outer * s.length : inner - sample * s.length;
    const T* const from = x + row * s.width;
    T* const to = out + row * s.width;
    const Table *const c = cos + s.angles(sample, place), *const d = sin + s.angles(sample, place);
    const C sign = s.inverse ? C(-1) : C(1);
    if (s.interleaved) {
      turn<2>(from, from + 1, c, d, sign, to, to + 1);
    } else {
      turn<1>(from, from + s.turned, c, d, sign, to, to + s.turned);
    }
#pragma omp simd
    for (int64_t j = 2 * s.turned; j < s.width; ++j) to[j] = from[j];
  }

 private:
  template <int kStep>
  MSOPS_CPU void turn(const T* first, const T* second, const Table* c, const Table* d, C sign, T* to_first,
                      T* to_second) const {
#pragma omp simd
    for (int64_t i = 0; i < s.turned; ++i) {
      C a = C(first[i * kStep]), b = C(second[i * kStep]);
      rotary::turn(a, b, C(c[i]), sign * C(d[i]));
      assign(to_first[i * kStep], a);
      assign(to_second[i * kStep], b);
    }
  }
};

template <typename T, typename Table>
void turn(Call& call, const Rotation& s, const T* x, const Table* cos, const Table* sin, T* out) {
  if (call.is_on_cpu())
    return on_cpu(call, s.rows(), TurnRow<T, Table>{s, x, cos, sin, out}, 2 * static_cast<double>(s.width));
#ifdef __CUDACC__
  rotary::turn_on_gpu(call, s, x, cos, sin, out);
#endif
}

int turn(Call& call, const char* from, const char* to, bool inverse) {
  const Tensor x = call.tensor(from, 4);
  const Tensor cos = call.tensor_of("float32|common", "cos"), sin = call.tensor_of("float32|common", "sin");
  const Tensor out = call.tensor(to, 4);
  Rotation s{};
  s.interleaved = call.attribute("interleaved", 0, 1);
  s.heads_first = call.attribute("heads_first", 0, 1);
  s.inverse = inverse;
  call.require_same_shape(out, x);
  call.require_same_shape(sin, cos);
  call.require(cos.rank == 2 || cos.rank == 3, kBadShape, "cos has rank %d, expected 2 or 3", cos.rank);
  if (!call.ok()) return call.status();
  call.require(!std::strcmp(sin.dtype, cos.dtype), kBadDtype, "sin is %s, cos is %s", sin.dtype, cos.dtype);
  s.batch = x.dim(0);
  s.heads = x.dim(s.heads_first ? 1 : 2);
  s.length = x.dim(s.heads_first ? 2 : 1);
  s.width = x.dim(3);
  s.turned = cos.dim(-1);
  s.table_of_batch = cos.rank == 3;
  s.table_of_batch ? call.require_shape(cos, {s.batch, s.length, s.turned})
                   : call.require_shape(cos, {s.length, s.turned});
  call.require(s.turned <= s.width / 2, kBadShape, "cos has %lld angles for %lld features",
               static_cast<long long>(s.turned), static_cast<long long>(s.width));
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
