// Operands are arrays that broadcast to the shape of one result, as NumPy's do. All of them are contiguous. After axes
// that are walked in one go have been merged, most calls have one axis or two.
#pragma once

#include <algorithm>

#include "../../common/pack.h"
#include "../../common/parallel.h"
#include "shapes.h"

namespace msops::broadcast {

// Operands of K arrays are rows, along each of which array k advances by 1 or stays (`step`), and contiguous rows of
// the result.
template <int K>
struct Operands {
  Axes<K> rows;
  int64_t length = 1, outputs = 0;
  int step[K] = {};
  int64_t size[K];                    // how many elements there are from in[k] + first[k] on
  int64_t first[K] = {}, output = 0;  // the first elements, in arrays and in the result
  const void* in[K];
  void* out;

  template <typename T>
  MSOPS_BOTH const T* input(int k) const {
    return static_cast<const T*>(in[k]) + first[k];
  }
};

// Returns the operands, or fails the call if the inputs do not broadcast to just the shape of `out`.
template <int K>
Operands<K> operands_of(Call& call, const Tensor (&inputs)[K], const Tensor& out) {
  Operands<K> all;
  int64_t strides[K][kMaxRank];
  require_broadcast(call, inputs, out, strides);
  if (!call.ok()) return all;
  for (int axis = 0; axis < out.rank; ++axis) {
    int64_t along[K];
    for (int k = 0; k < K; ++k) along[k] = strides[k][axis];
    all.rows.push(out.dim(axis), along);
  }
  if (all.rows.count > 0) {
    const int inner = --all.rows.count;
    all.length = all.rows.size[inner];
    for (int k = 0; k < K; ++k) all.step[k] = all.rows.stride[k][inner] != 0;
  }
  all.outputs = out.size, all.out = out.data;
  for (int k = 0; k < K; ++k) all.in[k] = inputs[k].data, all.size[k] = inputs[k].size;
  return all;
}

// Calls f with parts of the operands, in which 32-bit indices reach all elements: with halves, along the outermost axis
// that has two positions, of what is larger.
template <int K, typename F>
void in_parts(const Operands<K>& all, F&& f) {
  if (all.outputs <= kLargest32) return f(all);
  int axis = 0;
  while (axis < all.rows.count && all.rows.size[axis] == 1) ++axis;
  const bool is_within_row = axis == all.rows.count;
  const int64_t positions = is_within_row ? all.length : all.rows.size[axis], outputs = all.outputs / positions;
  const int64_t half = positions < 32 ? positions / 2 : positions / 32 * 16;  // packs stay aligned
  for (const int64_t first : {int64_t{0}, half}) {
    Operands<K> part = all;
    const int64_t count = first == 0 ? half : positions - half;
    (is_within_row ? part.length : part.rows.size[axis]) = count;
    part.outputs = count * outputs, part.output += first * outputs;
    for (int k = 0; k < K; ++k) {
      const int64_t offset = first * (is_within_row ? all.step[k] : all.rows.stride[k][axis]);
      part.first[k] += offset, part.size[k] -= offset;
    }
    in_parts(part, f);
  }
}

// On the CPU, index i is a run of at most kRun outputs.
template <int kRun, typename Operation>
struct CpuRun {
  static constexpr int K = Operation::kOperands;
  using First = typename Operation::First;
  using Rest = typename Operation::Rest;
  using Out = typename Operation::Out;
  const Operands<K>& all;
  const Operation& operation;

  MSOPS_CPU void operator()(int64_t i) const {
    const Operation prepared = operation.prepared();
    const int64_t end = std::min(all.outputs, (i + 1) * kRun);
    for (int64_t begin = i * kRun; begin < end;) {
      const int64_t row = begin / all.length, stop = std::min(end, (row + 1) * all.length);
      int64_t at[K];
      for (int k = 0; k < K; ++k) at[k] = all.rows.offset(k, row) + (begin - row * all.length) * all.step[k];
      for (; begin < stop; ++begin) {
        const Pack<First, 1> first{{all.template input<First>(0)[at[0]]}};
        Pack<Rest, 1> rest[K - 1];
        for (int k = 1; k < K; ++k) rest[k - 1].values[0] = all.template input<Rest>(k)[at[k]];
        static_cast<Out*>(all.out)[begin] = prepared(first, rest).values[0];
        for (int k = 0; k < K; ++k) at[k] += all.step[k];
      }
    }
  }
};

template <typename Operation>
void apply_on_cpu(Call& call, const Operands<Operation::kOperands>& all, const Operation& operation) {
  constexpr int kRun = 4096;
  on_cpu(call, (all.outputs + kRun - 1) / kRun, CpuRun<kRun, Operation>{all, operation}, 4 * kRun);
}

}  // namespace msops::broadcast
