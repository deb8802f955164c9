// A Table names the arrays of a launch over many tensors. It is an argument of the kernel, of less than 4 KiB.
#pragma once

#include <algorithm>

#include "../common/parallel.h"

namespace msops::optimizer {

constexpr int kMost = 72;            // tensors of a launch; optimizer.py has this number, too
constexpr int64_t kPiece = 1 << 14;  // elements that a block takes

// A Piece is a part of a tensor. All but a tensor's last have kPiece elements.
struct Piece {
  int tensor;
  int64_t begin, size;
};

template <int kArrays>
struct Table {
  int tensors = 0, pieces = 0;
  int first[kMost];  // the first piece of each tensor
  int64_t sizes[kMost];
  void* arrays[kArrays][kMost];

  // Returns a piece. Tensors without elements have none.
  MSOPS_BOTH Piece piece(int i) const {
    int low = 0, high = tensors;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first[middle] <= i ? low : high) = middle;
    }
    const int64_t begin = (i - first[low]) * kPiece, rest = sizes[low] - begin;
    return {low, begin, rest < kPiece ? rest : kPiece};
  }
  // Returns an array's elements from the beginning of a piece.
  template <typename T>
  MSOPS_BOTH T* at(int array, const Piece& piece) const {
    return static_cast<T*>(arrays[array][piece.tensor]) + piece.begin;
  }

  // Adds a tensor, and returns its place. Its arrays are set afterwards.
  MSOPS_CPU int add(Call& call, int64_t size) {
    first[tensors] = pieces;
    sizes[tensors] = size;
    const int64_t more = (size + kPiece - 1) / kPiece;
    call.require(more <= INT32_MAX - pieces, kBadShape, "has too many elements for one launch");
    if (call.ok()) pieces += static_cast<int>(more);
    return tensors++;
  }
};

#ifdef __CUDACC__
constexpr int kTableThreads = 256;

template <int kArrays, typename Body>
__global__ void __launch_bounds__(kTableThreads)
    table_kernel(const __grid_constant__ Table<kArrays> table, const __grid_constant__ Body body) {
  const int i = static_cast<int>(blockIdx.x);
  body.on_gpu(table, table.piece(i), i);
}
#endif

template <int kArrays, typename Body>
struct OnCpu {
  const Table<kArrays>& table;
  const Body& body;

  MSOPS_CPU void operator()(int64_t i) const {
    body.on_cpu(table, table.piece(static_cast<int>(i)), static_cast<int>(i));
  }
};

// Calls the body for each piece: on_gpu in all threads of a block, or on_cpu. `cost` is the work of an element.
template <int kArrays, typename Body>
void for_pieces(Call& call, const Table<kArrays>& table, const Body& body, [[maybe_unused]] double cost) {
  if (call.is_on_cpu()) {
    int64_t elements = 0;
    for (int i = 0; i < table.tensors; ++i) elements += table.sizes[i];
    const double each = static_cast<double>(elements) / std::max(table.pieces, 1);
    return on_cpu(call, table.pieces, OnCpu<kArrays, Body>{table, body}, cost * each);
  }
#ifdef __CUDACC__
  launch(call, table_kernel<kArrays, Body>, table.pieces, kTableThreads, 0, table, body);
#endif
}

}  // namespace msops::optimizer
