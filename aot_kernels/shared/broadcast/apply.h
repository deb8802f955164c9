// apply() computes each output from the elements of K operands with broadcasting, by an operation on packs:
//
//   struct Plus {
//     static constexpr int kOperands = 2;
//     using First = float;  // the elements of the first operand
//     using Rest = float;   // the elements of the others
//     using Out = float;
//     MSOPS_BOTH Plus prepared() const { return *this; }  // a thread calls this once, to read what all outputs need
//     template <int N>
//     MSOPS_BOTH Pack<float, N> operator()(const Pack<float, N>& x, const Pack<float, N> (&rest)[1]) const;
//   };
//
// Which kernel runs:
//
// | operands                                                          | kernel | why                               |
// |-------------------------------------------------------------------|--------|-----------------------------------|
// | whole, single, or rows that whole packs tile, and all are aligned | tiled  | all loads are packs or one number |
// | others                                                            | ragged | packs of the result end anywhere  |
#pragma once

#include "operands.h"

#ifdef __CUDACC__
#include "../../common/gpu/divisor.h"
#endif

namespace msops::broadcast {

#ifdef __CUDACC__

constexpr int kThreads = 128;

enum Kind : int {
  kWhole,    // has the shape of the result
  kSingle,   // one element
  kRows,     // a row of the result takes a row of it
  kNumbers,  // a row of the result takes one element of it
};

// Layout tells the kernels where the elements are that an output takes.
template <int K>
struct Layout {
  int outputs = 0, packs = 0;
  bool has_rows = false;
  Divisor row;             // by how many packs a row has or, in the ragged kernel, how many outputs
  int outer = 0;           // how many axes the rows have
  Divisor axes[kMaxRank];  // by the length of each
  int strides[K][kMaxRank] = {};
  Kind kinds[K];
  const void* in[K];
  int sizes[K];
  void* out;

  __device__ __forceinline__ bool is_number(int k) const { return kinds[k] == kSingle || kinds[k] == kNumbers; }
  // Returns where array k's elements for a row begin.
  __device__ __forceinline__ int offset(int k, int row_index) const {
    int sum = 0;
#pragma unroll 1
    for (int axis = outer - 1; axis > 0; --axis) {
      int position;
      row_index = axes[axis].divide(row_index, &position);
      sum += position * strides[k][axis];
    }
    return sum + row_index * strides[k][0];
  }
};

// A Place is that of the first of a pack's outputs, in a row.
struct Place {
  int pack, row, column;
};

// Words are a pack, or its first element, as a load left it in registers. A thread loads all that it needs before it
// looks at elements: their order would else be changed in the branch of a load, which would wait for it.
template <typename T, int N>
struct Words {
  static constexpr int kBytes = sizeof(T) * N, kCount = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t words[kCount];

  __device__ __forceinline__ void load_pack(const T* from) {
    if constexpr (kBytes < 4) {
      words[0] = *reinterpret_cast<const uint16_t*>(from);
    } else {
      const auto loaded = load<kCount>(reinterpret_cast<const uint32_t*>(from));
#pragma unroll
      for (int w = 0; w < kCount; ++w) words[w] = loaded.values[w];
    }
  }
  __device__ __forceinline__ void load_number(const T* from) {
#pragma unroll
    for (int w = 0; w < kCount; ++w) words[w] = 0;
    if constexpr (sizeof(T) == 1) words[0] = *reinterpret_cast<const uint8_t*>(from);
    if constexpr (sizeof(T) == 2) words[0] = *reinterpret_cast<const uint16_t*>(from);
    if constexpr (sizeof(T) == 4) words[0] = *reinterpret_cast<const uint32_t*>(from);
    if constexpr (sizeof(T) == 8) {
      const uint2 number = *reinterpret_cast<const uint2*>(from);
      words[0] = number.x, words[1] = number.y;
    }
  }
  // Repeats the number that was loaded.
  __device__ __forceinline__ void repeat() {
    if constexpr (sizeof(T) == 1) words[0] *= 0x01010101;
    if constexpr (sizeof(T) == 2) words[0] |= words[0] << 16;
    constexpr int kOfNumber = sizeof(T) < 4 ? 1 : sizeof(T) / 4;
#pragma unroll
    for (int w = kOfNumber; w < kCount; ++w) words[w] = words[w - kOfNumber];
  }
  __device__ __forceinline__ Pack<T, N> pack() const {
    Pack<T, N> result;
    memcpy(&result, words, sizeof result);
    return result;
  }
};

// Loads what operand k has for the outputs at a place.
template <typename T, int N, int K>
__device__ __forceinline__ void read(Words<T, N>& to, const Layout<K>& layout, int k, const Place& place) {
  const T* const from = static_cast<const T*>(layout.in[k]);
  const Kind kind = layout.kinds[k];
  int offset = kind == kWhole ? place.pack * N : 0;
  if (kind == kRows || kind == kNumbers) offset = layout.offset(k, place.row);
  if (kind == kRows) offset += place.column * N;
  if (kind == kWhole || kind == kRows) {
    to.load_pack(from + offset);
  } else {
    to.load_number(from + offset);
  }
}

template <typename Operation>
constexpr int kWidth =
    16 / (sizeof(typename Operation::First) > sizeof(typename Operation::Rest) ? sizeof(typename Operation::First)
                                                                               : sizeof(typename Operation::Rest));

// A thread computes a pack. Inputs are not marked as constant, so that the result may be stored in place of an operand
// of its shape.
template <typename Operation>
__global__ void __launch_bounds__(kThreads)
    tiled_kernel(const __grid_constant__ Layout<Operation::kOperands> layout, const Operation operation) {
  constexpr int K = Operation::kOperands, N = kWidth<Operation>;
  using Out = typename Operation::Out;
  Place place{static_cast<int>(blockIdx.x * kThreads + threadIdx.x), 0, 0};
  if (place.pack >= layout.packs) return;
  if (layout.has_rows) place.row = layout.row.divide(place.pack, &place.column);
  Words<typename Operation::First, N> x;
  Words<typename Operation::Rest, N> rest[K - 1];
  read(x, layout, 0, place);
#pragma unroll
  for (int k = 1; k < K; ++k) read(rest[k - 1], layout, k, place);
  const Operation prepared = operation.prepared();
  Pack<typename Operation::Rest, N> others[K - 1];
  if (layout.is_number(0)) x.repeat();
#pragma unroll
  for (int k = 1; k < K; ++k) {
    if (layout.is_number(k)) rest[k - 1].repeat();
    others[k - 1] = rest[k - 1].pack();
  }
  store_at_once(static_cast<Out*>(layout.out) + place.pack * N, prepared(x.pack(), others));
}

// Ragged holds what a thread of the ragged kernel has loaded of an operand.
template <typename T, int N>
struct Ragged {
  static constexpr int kWords = Words<T, N>::kCount;
  enum Way { kPack, kShifted, kTwoNumbers } way = kPack;
  Words<T, N> words[2];
  int from = 0;  // at which byte of two packs the pack begins, or from which output on the second number is taken

  __device__ __forceinline__ Pack<T, N> pack() {
    if constexpr (sizeof(T) * N >= 4)
      if (way == kShifted) {
        uint32_t both[2 * kWords];
        memcpy(both, words, sizeof both);
        return pack_within<T, N>(both, static_cast<unsigned>(from));
      }
    if (way == kPack) return words[0].pack();
    words[0].repeat(), words[1].repeat();
    Pack<T, N> first = words[0].pack();
    const Pack<T, N> second = words[1].pack();
#pragma unroll
    for (int j = 0; j < N; ++j) first.values[j] = j < from ? first.values[j] : second.values[j];
    return first;
  }
};

// Loads operand k for `count` outputs from `begin` on, in which rows may begin and end anywhere.
template <typename T, int N, int K>
__device__ __forceinline__ Ragged<T, N> read_ragged(const Layout<K>& layout, int k, int begin, int count, Place place) {
  Ragged<T, N> to;
  const T* const from = static_cast<const T*>(layout.in[k]);
  const Kind kind = layout.kinds[k];
  const int length = layout.row.value();
  if (kind == kSingle || (kind == kNumbers && length >= N)) {
    const bool has_next = kind == kNumbers && place.column + count > length;
    to.way = Ragged<T, N>::kTwoNumbers, to.from = has_next ? length - place.column : N;
    const int offset = kind == kSingle ? 0 : layout.offset(k, place.row);
    to.words[0].load_number(from + offset);
    to.words[1].load_number(from + (has_next ? layout.offset(k, place.row + 1) : offset));
    return to;
  }
  int at = kind == kWhole ? begin : layout.offset(k, place.row) + (kind == kRows ? place.column : 0);
  if (count == N && (kind == kWhole || (kind == kRows && place.column + N <= length))) {
    if (is_aligned<N>(from + at)) {
      to.words[0].load_pack(from + at);
      return to;
    }
    if constexpr (sizeof(T) * N >= 4)
      if (packs_around<N>(from + at, from, layout.sizes[k])) {
        to.way = Ragged<T, N>::kShifted, to.from = reinterpret_cast<uintptr_t>(from + at) % sizeof(Pack<T, N>);
        const T* const first = from + at - to.from / sizeof(T);
        to.words[0].load_pack(first), to.words[1].load_pack(first + N);
        return to;
      }
  }
  Pack<T, N> pack = {};
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j < count) pack.values[j] = from[at];
    if (kind != kNumbers) ++at;
    if (++place.column == length && kind != kWhole && j + 1 < count)
      place.column = 0, at = layout.offset(k, ++place.row);
  }
  memcpy(to.words[0].words, &pack, sizeof pack);
  return to;
}

// A thread computes a pack of the result.
template <typename Operation>
__global__ void __launch_bounds__(kThreads)
    ragged_kernel(const __grid_constant__ Layout<Operation::kOperands> layout, const Operation operation) {
  constexpr int K = Operation::kOperands, N = kWidth<Operation>;
  using Out = typename Operation::Out;
  Place place{static_cast<int>(blockIdx.x * kThreads + threadIdx.x), 0, 0};
  if (place.pack >= layout.packs) return;
  const int begin = place.pack * N, count = ::min(N, layout.outputs - begin);
  place.row = layout.row.divide(begin, &place.column);
  auto x = read_ragged<typename Operation::First, N>(layout, 0, begin, count, place);
  Ragged<typename Operation::Rest, N> rest[K - 1];
#pragma unroll
  for (int k = 1; k < K; ++k) rest[k - 1] = read_ragged<typename Operation::Rest, N>(layout, k, begin, count, place);
  const Operation prepared = operation.prepared();
  Pack<typename Operation::Rest, N> others[K - 1];
#pragma unroll
  for (int k = 1; k < K; ++k) others[k - 1] = rest[k - 1].pack();
  const Pack<Out, N> z = prepared(x.pack(), others);
  Out* const to = static_cast<Out*>(layout.out) + begin;
  if (count == N && is_aligned<N>(to)) return store_at_once(to, z);
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (j < count) to[j] = z.values[j];
}

// Launches a kernel for a part of the operands.
template <typename Operation>
void apply_on_gpu(Call& call, const Operands<Operation::kOperands>& part, const Operation& operation) {
  constexpr int K = Operation::kOperands, N = kWidth<Operation>;
  Layout<K> layout;
  layout.out = static_cast<typename Operation::Out*>(part.out) + part.output;
  layout.outputs = static_cast<int>(part.outputs), layout.packs = static_cast<int>((part.outputs + N - 1) / N);
  bool is_tiled = part.outputs % N == 0 && is_aligned<N>(static_cast<typename Operation::Out*>(layout.out));
  for (int k = 0; k < K; ++k) {
    const auto see = [&](auto* from) {
      layout.in[k] = from, layout.sizes[k] = static_cast<int>(std::min<int64_t>(part.size[k], INT32_MAX));
      is_tiled &= is_aligned<N>(from) || (layout.kinds[k] != kWhole && layout.kinds[k] != kRows);
    };
    bool is_whole = part.step[k] || part.length == 1, is_single = !part.step[k] || part.length == 1;
    int64_t stride = part.length;
    for (int axis = part.rows.count - 1; axis >= 0; stride *= part.rows.size[axis--]) {
      const bool is_one = part.rows.size[axis] == 1;
      is_whole &= is_one || part.rows.stride[k][axis] == stride;
      is_single &= is_one || part.rows.stride[k][axis] == 0;
      layout.strides[k][axis] = static_cast<int>(is_one ? 0 : part.rows.stride[k][axis]);
    }
    layout.kinds[k] = is_single ? kSingle : is_whole ? kWhole : part.step[k] ? kRows : kNumbers;
    layout.has_rows |= !is_single && !is_whole;
    k == 0 ? see(part.template input<typename Operation::First>(k))
           : see(part.template input<typename Operation::Rest>(k));
  }
  is_tiled &= !layout.has_rows || part.length % N == 0;
  layout.row = Divisor(is_tiled ? std::max<int64_t>(1, part.length / N) : part.length);
  layout.outer = part.rows.count;
  for (int axis = 0; axis < part.rows.count; ++axis) layout.axes[axis] = Divisor(part.rows.size[axis]);
  const auto kernel = is_tiled ? tiled_kernel<Operation> : ragged_kernel<Operation>;
  launch(call, kernel, (layout.packs + kThreads - 1) / kThreads, kThreads, 0, layout, operation);
}

#endif

template <typename Operation>
void apply(Call& call, const Operands<Operation::kOperands>& all, const Operation& operation) {
  if (all.outputs == 0) return;
  if (call.is_on_cpu()) return apply_on_cpu(call, all, operation);
#ifdef __CUDACC__
  in_parts(all, [&](const Operands<Operation::kOperands>& part) { apply_on_gpu(call, part, operation); });
#endif
}

}  // namespace msops::broadcast
