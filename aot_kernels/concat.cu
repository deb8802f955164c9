// These entries serve patch_mindspore alone. They join pieces along an axis, and cut a tensor into pieces, as
// MindSpore's kernels do: the addresses of the pieces, and perhaps their lengths along the axis, are in device memory.
// Since an entry cannot check addresses, no operator of custom_op calls these.
//
// A row of the whole has all pieces side by side; a row of a piece has `length` elements. Elements are moved as they
// are, by their size alone.

#include "common/pack.h"
#include "common/parallel.h"
#ifdef __CUDACC__
#include "common/gpu/divisor.h"
#endif

using namespace msops;

namespace {

struct Shape {
  int64_t rows, row;  // a row's number of elements, all pieces together
  int count;          // of the pieces
  int64_t length;     // of each piece, if `lengths` is null
  const int32_t* lengths;
  int64_t inner;  // by which the lengths are multiplied

  MSOPS_BOTH int64_t length_of(int piece) const { return lengths ? lengths[piece] * inner : length; }
};

template <typename T>
struct JoinRow {
  Shape s;
  const int64_t* pieces;
  T* whole;

  MSOPS_CPU void operator()(int64_t row) const {
    T* to = whole + row * s.row;
    for (int p = 0; p < s.count; ++p) {
      const int64_t length = s.length_of(p);
      const T* const from = reinterpret_cast<const T*>(pieces[p]) + row * length;
      for (int64_t j = 0; j < length; ++j) *to++ = from[j];
    }
  }
};

template <typename T>
struct CutRow {
  Shape s;
  const T* whole;
  const int64_t* pieces;

  MSOPS_CPU void operator()(int64_t row) const {
    for (int p = 0; p < s.count; ++p) {
      T* const to = reinterpret_cast<T*>(pieces[p]) + row * s.length;
      for (int64_t j = 0; j < s.length; ++j) to[j] = whole[row * s.row + p * s.length + j];
    }
  }
};

#ifdef __CUDACC__
// Loads N neighbours at any address of an array of `size` elements.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_any(const T* from, const T* array, int64_t size) {
  if (is_aligned<N>(from)) return load<N>(from);
  if constexpr (N * sizeof(T) == 16)
    if (packs_around<N>(from, array, size)) return load_shifted<N>(from);
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.values[j] = from[j];
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store_any(T* to, const Pack<T, N>& pack, int64_t count) {
  if (count >= N && is_aligned<N>(to)) return store_at_once(to, pack);
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < count) to[j] = pack.values[j];
}

// Index i is a pack of the whole, in which pieces may begin and end.
template <int N, typename T>
struct Join {
  Shape s;
  Divisor row, length;
  const int64_t* pieces;
  T* whole;
  int size;

  template <typename Index>
  __device__ void operator()(Index i) const {
    const int begin = static_cast<int>(i) * N;
    int column;
    int64_t at = row.divide(begin, &column);
    int piece = 0, in_piece = column;
    if (s.lengths) {
      while (piece + 1 < s.count && in_piece >= s.length_of(piece)) in_piece -= static_cast<int>(s.length_of(piece++));
    } else {
      piece = length.divide(column, &in_piece);
    }
    int64_t own = s.length_of(piece);
    const T* array = reinterpret_cast<const T*>(pieces[piece]);
    Pack<T, N> pack = {};
    if (in_piece + N <= own) {
      pack = load_any<N>(array + at * own + in_piece, array, s.rows * own);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (begin + j >= size) break;
        while (in_piece >= own) {  // pieces may be empty
          in_piece = 0;
          if (++piece == s.count) piece = 0, ++at;
          own = s.length_of(piece), array = reinterpret_cast<const T*>(pieces[piece]);
        }
        pack.values[j] = array[at * own + in_piece++];
      }
    }
    store_any<N>(whole + begin, pack, size - begin);
  }
};

// Index i is a pack of a piece, in which rows may begin and end. All pieces have one length.
template <int N, typename T>
struct Cut {
  Shape s;
  Divisor packs, length;  // packs of a piece
  const T* whole;
  const int64_t* pieces;

  template <typename Index>
  __device__ void operator()(Index i) const {
    int pack_of_piece, column;
    const int piece = packs.divide(static_cast<int>(i), &pack_of_piece), begin = pack_of_piece * N;
    int64_t at = length.divide(begin, &column);
    const int64_t left = s.rows * s.length - begin;
    const T* const from = whole + piece * s.length;
    Pack<T, N> pack = {};
    if (column + N <= s.length) {
      pack = load_any<N>(from + at * s.row + column, whole, s.rows * s.row);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (j >= left) break;
        pack.values[j] = from[at * s.row + column];
        if (++column == s.length) column = 0, ++at;
      }
    }
    store_any<N>(reinterpret_cast<T*>(pieces[piece]) + begin, pack, left);
  }
};
#endif

// Calls f(Type<unit>) with the unit of the elements' size.
template <typename F>
int run_by_size(Call& call, const F& f) {
  return call.run<Half, float, double, bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>(
      [&](auto type) { f(Type<Unit<sizeof(typename decltype(type)::type)>>{}); });
}

// Requires rows of `s.row` elements, and sets how many there are.
void require_rows(Call& call, const Tensor& whole, Shape* s) {
  call.require(s->row > 0 ? whole.size % s->row == 0 : whole.size == 0, kBadShape,
               "%s has %lld elements, not rows of %lld", whole.name, static_cast<long long>(whole.size),
               static_cast<long long>(s->row));
  call.require(call.is_on_cpu() || whole.size <= kLargest32, kBadShape, "%s is too large for a kernel of 32 bits",
               whole.name);
  s->rows = call.ok() && s->row > 0 ? whole.size / s->row : 0;
}

int join(Call& call, const Shape& s, const Tensor& pieces, const Tensor& whole) {
  return run_by_size(call, [&](auto type) {
    using T = typename decltype(type)::type;
    if (whole.size == 0) return;
    const int64_t* const from = pieces.as<const int64_t>();
    if (call.is_on_cpu()) return on_cpu(call, s.rows, JoinRow<T>{s, from, whole.as<T>()}, static_cast<double>(s.row));
#ifdef __CUDACC__
    constexpr int N = kPackWidth<T>;
    const Join<N, T> body{s,    Divisor(s.row), Divisor(s.lengths ? 1 : s.length),
                          from, whole.as<T>(),  static_cast<int>(whole.size)};
    on_gpu_with<uint32_t>(call, (whole.size + N - 1) / N, body);
#endif
  });
}

}  // namespace

// (pieces, lengths) -> (whole): piece p has rows of lengths[p] * inner elements, and the whole has rows of `row`.
MSOPS_ENTRY(ConcatForward) {
  const Tensor pieces = call.tensor_of("int64", "pieces", 1), lengths = call.tensor_of("int32", "lengths", 1);
  const Tensor whole = call.tensor("whole");
  Shape s{0, call.attribute("row", 0, INT32_MAX), static_cast<int>(pieces.size),
          0, lengths.as<const int32_t>(),         call.attribute("inner", 0, INT32_MAX)};
  call.require_same_shape(lengths, pieces);
  require_rows(call, whole, &s);
  call.require(whole.size == 0 || s.count > 0, kBadShape, "there are no pieces");
  return join(call, s, pieces, whole);
}

// (pieces) -> (whole): all pieces have rows of `length` elements.
MSOPS_ENTRY(StackForward) {
  const Tensor pieces = call.tensor_of("int64", "pieces", 1), whole = call.tensor("whole");
  const int64_t length = call.attribute("length", 0, INT32_MAX), count = std::min<int64_t>(pieces.size, INT32_MAX);
  Shape s{0, count * length, static_cast<int>(count), length, nullptr, 1};
  require_rows(call, whole, &s);
  return join(call, s, pieces, whole);
}

// (whole, pieces): writes pieces with rows of `length` elements.
MSOPS_ENTRY(SplitForward) {
  const Tensor whole = call.tensor("whole"), pieces = call.tensor_of("int64", "pieces", 1);
  const int64_t length = call.attribute("length", 0, INT32_MAX), count = std::min<int64_t>(pieces.size, INT32_MAX);
  Shape s{0, count * length, static_cast<int>(count), length, nullptr, 1};
  require_rows(call, whole, &s);
  return run_by_size(call, [&](auto type) {
    using T = typename decltype(type)::type;
    if (whole.size == 0) return;
    const int64_t* const to = pieces.as<const int64_t>();
    if (call.is_on_cpu())
      return on_cpu(call, s.rows, CutRow<T>{s, whole.as<const T>(), to}, static_cast<double>(s.row));
#ifdef __CUDACC__
    constexpr int N = kPackWidth<T>;
    const int64_t packs = (s.rows * length + N - 1) / N;
    const Cut<N, T> body{s, Divisor(packs), Divisor(length), whole.as<const T>(), to};
    on_gpu_with<uint32_t>(call, packs * s.count, body);
#endif
  });
}
