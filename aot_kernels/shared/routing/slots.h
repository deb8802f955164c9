// A token has a slot for each of the experts that it chose, and a slot has a row: its position, or -1 if it has none.
#pragma once

#include "../../common/numbers.h"
#include "../../common/pack.h"
#include "../../common/parallel.h"
#include "../gather/indices.h"

namespace msops::routing {

constexpr int64_t kRunOfCpu = 2048;  // columns that a CPU thread takes at once: their sums stay in the first cache
constexpr int kVector = 16;          // numbers that a CPU thread computes at once

// Calls f(first, n) for parts of `count` numbers. n is the constant kVector, so that loops over it need no memory, but
// for the last part.
template <typename F>
MSOPS_CPU void for_vectors(int64_t count, const F& f) {
  int64_t first = 0;
  for (; first + kVector <= count; first += kVector) f(first, Constant<kVector>{});
  if (first < count) f(first, static_cast<int>(count - first));
}

struct Slots {
  int64_t tokens, choices, columns, rows;
  Integers positions;  // (tokens, choices)

  // `positions` are (tokens,) or (tokens, choices), `rows` are rows of the length of the last axis.
  Slots(const Tensor& positions_, const Tensor& rows_)
      : tokens(positions_.dim(0)),
        choices(positions_.rank > 1 ? positions_.dim(1) : 1),
        columns(rows_.dim(-1)),
        rows(1),
        positions(positions_) {
    for (int i = 0; i + 1 < rows_.rank; ++i) rows *= rows_.dim(i);
  }

  // Returns the row of a slot, or -1. On a GPU a position out of range names no row; on the CPU there is none.
  MSOPS_BOTH int64_t row(int64_t slot) const {
    const int64_t position = positions[slot];
    return 0 <= position && position < rows ? position : -1;
  }

  // Returns where the run of columns begins that a CPU thread reads after that of a slot, so that it may fetch it
  // ahead: rows are pages of memory apart, which no processor foresees. Without one it returns `otherwise`.
  template <typename T>
  MSOPS_CPU const T* run_after(int64_t slot, const T* rows_, int64_t column, const T* otherwise) const {
    const int64_t next = slot + 1 < tokens * choices ? row(slot + 1) : -1;
    return next < 0 ? otherwise : rows_ + next * columns + column;
  }

  // Requires the ranks (tokens,) or (tokens, choices), and (rows, columns) or (experts, capacity, columns).
  static void require_ranks(Call& call, const Tensor& positions, const Tensor& rows) {
    call.require(positions.rank == 1 || positions.rank == 2, kBadShape, "%s has rank %d, expected 1 or 2",
                 positions.name, positions.rank);
    call.require(rows.rank == 2 || rows.rank == 3, kBadShape, "%s has rank %d, expected 2 or 3", rows.name, rows.rank);
  }

  // Requires on the CPU that each position is a row or -1.
  void require_positions(Call& call, const Tensor& positions_, const Tensor& rows_) const {
    if (!call.is_on_cpu()) return;
    with_type<int32_t, int64_t>(positions_, [&](auto index) {
      using Index = typename decltype(index)::type;
      gather::require_indices<Index>(call, positions_, rows_, rows, "rows", -1);
    });
  }
};

// Run is W neighbouring columns of the token that index i of a loop over tokens and runs belongs to.
template <int W>
struct Run {
  int64_t token, column;

  template <typename I>
  MSOPS_BOTH Run(I i, int64_t columns) {
    const I runs = static_cast<I>(columns / W);
    token = i / runs, column = (i - static_cast<I>(token) * runs) * int64_t{W};
  }
};

}  // namespace msops::routing
