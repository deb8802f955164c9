// Products of tokens, which are vectors, with the rows of a matrix on the CPU. Tokens are lanes: a panel of P tokens
// has a row of P numbers for each feature, so that the product of a panel with a matrix is a panel again, and all that
// is done to features by themselves runs along vectors. P is kMostLanes, or what the last panel needs: a multiple of a
// vector's width. A single token has P = 1, and then vectors run along the columns of the matrix.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "../../common/dtype.h"
#include "../../common/parallel.h"

namespace msops::product {

template <typename C>
constexpr int kWidth = 32 / sizeof(C);  // of a vector
constexpr int kVectors = 3;             // twelve vectors of sums hide the latency of multiply-add
template <typename C>
constexpr int kMostLanes = kVectors * kWidth<C>;
constexpr int kRows = 8;        // that share what is read of a panel of one vector; of wider ones, half as many
constexpr int64_t kBlock = 32;  // rows of a matrix that a thread multiplies at once

// Lanes says where panels have their tokens.
template <typename C>
struct Lanes {
  int64_t tokens;

  MSOPS_CPU int64_t panels() const { return tokens / kMostLanes<C> + (tokens % kMostLanes<C> > 0); }

  // Returns the tokens that all panels have room for.
  MSOPS_CPU int64_t places() const {
    return tokens == 1 ? 1 : (tokens / kWidth<C> + (tokens % kWidth<C> > 0)) * kWidth<C>;
  }

  // Returns the distance of features in token t's panel.
  MSOPS_CPU int64_t pitch(int64_t t) const {
    return std::min<int64_t>(kMostLanes<C>, places() - t / kMostLanes<C> * kMostLanes<C>);
  }

  // Returns where the panel of token t has its first feature.
  MSOPS_CPU C* at(C* panels, int64_t t, int64_t deep) const {
    return panels + t / kMostLanes<C> * kMostLanes<C> * deep + t % kMostLanes<C>;
  }
};

// Shares hands items to threads, in several phases. A thread takes those of its own share, one after another, so that
// it reads one stream, and then what others have left, so that a thread whose core has other work holds none up.
class Shares {
 public:
  explicit Shares(int64_t phases)
      : threads_(omp_get_max_threads()), taken_(new std::atomic<int64_t>[phases * threads_]) {
    for (int64_t i = 0; i < phases * threads_; ++i) taken_[i] = 0;
  }

  // Sets `item` to one of the phase's n items that nobody has taken. Returns false if there is none.
  MSOPS_CPU bool take(int64_t phase, int64_t thread, int64_t threads, int64_t n, int64_t& item) {
    for (int64_t i = 0; i < threads; ++i) {
      const int64_t of = (thread + i) % threads, begin = part_begin(n, of, threads),
                    end = part_begin(n, of + 1, threads);
      std::atomic<int64_t>& taken = taken_[phase * threads_ + of];
      if (taken >= end - begin) continue;
      item = begin + taken.fetch_add(1);
      if (item < end) return true;
    }
    return false;
  }

 private:
  const int64_t threads_;
  std::unique_ptr<std::atomic<int64_t>[]> taken_;
};

// Calls f in a function of its own. In a function with too much else, GCC would not keep sums in registers.
template <typename F>
__attribute__((noinline)) void run_apart(const F& f) {
  f();
}

// sums[r][l] = sum over k of rows[r][k] panel[k][l] for as many rows as `count` and a multiple of kCount after it
template <int kCount, int kV, typename C>
struct PanelProduct {
  static constexpr int kW = kWidth<C>, kLanes = kV * kW;
  const C* rows;
  int64_t count, depth;
  const C* panel;
  C* sums;

  MSOPS_CPU void operator()() const {
    const PanelProduct p = *this;
    for (int64_t r = 0; r < p.count; r += kCount) p.multiply(p.rows + r * p.depth, p.sums + r * kLanes);
  }

 private:
  MSOPS_CPU void multiply(const C* row, C* to) const {
    constexpr int kLine = 64 / sizeof(C);
    C total[kCount][kV][kW] = {};
    for (int64_t line = 0; line < depth; line += kLine) {
      for (int r = 0; r < kCount; ++r) __builtin_prefetch(row + (kCount + r) * depth + line);  // the next rows
      for (int64_t k = line; k < std::min(depth, line + kLine); ++k)
        for (int r = 0; r < kCount; ++r)
          for (int v = 0; v < kV; ++v)
#pragma omp simd
            for (int w = 0; w < kW; ++w) total[r][v][w] += row[r * depth + k] * panel[k * kLanes + v * kW + w];
    }
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kV; ++v)
#pragma omp simd
        for (int w = 0; w < kW; ++w) to[r * kLanes + v * kW + w] = total[r][v][w];
  }
};

// sums[r] = sum over k of rows[r * stride + k] vector[k], for a matrix of any type. Each row has kV vectors of sums.
template <int kCount, int kV, typename T, typename C = Compute<T>>
MSOPS_CPU void multiply_vector(const T* rows, int64_t stride, int64_t depth, const C* vector, C* sums) {
  constexpr int kW = kWidth<C>;
  C total[kCount][kV][kW] = {}, rest[kCount] = {};
  int64_t k = 0;
  for (; k + kV * kW <= depth; k += kV * kW)
    for (int r = 0; r < kCount; ++r)
      for (int v = 0; v < kV; ++v)
#pragma omp simd
        for (int w = 0; w < kW; ++w) total[r][v][w] += C(rows[r * stride + k + v * kW + w]) * vector[k + v * kW + w];
  for (; k < depth; ++k)
    for (int r = 0; r < kCount; ++r) rest[r] += C(rows[r * stride + k]) * vector[k];
  for (int r = 0; r < kCount; ++r) {
    C sum = rest[r];
    for (int w = 0; w < kW; ++w) {
      C of_lane = total[r][0][w];
      for (int v = 1; v < kV; ++v) of_lane += total[r][v][w];
      sum += of_lane;
    }
    sums[r] = sum;
  }
}

// Processors do not foresee which rows are read if there is something else between them. These are fetched so many rows
// ahead, kApart at once; addresses after the last row do no harm.
constexpr int kAhead = 16, kApart = 4;
template <typename T>
MSOPS_CPU void fetch(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}

// sums[r] = sum over k of rows[r * stride + k] vector[k]
template <typename T>
struct VectorProduct {
  const T* rows;
  int64_t stride, count, depth;
  const Compute<T>* vector;
  Compute<T>* sums;

  MSOPS_CPU void operator()() const {
    const VectorProduct p = *this;
    int64_t r = 0;
    if (p.stride > p.depth)
      for (; r + kApart <= p.count; r += kApart) {
        for (int i = 0; i < kApart; ++i) fetch(p.rows + (r + kAhead + i) * p.stride, p.depth);
        multiply_vector<kApart, 2>(p.rows + r * p.stride, p.stride, p.depth, p.vector, p.sums + r);
      }
    // Processors foresee a single stream best: four rows at once were read at half the rate.
    for (; r < p.count; ++r) multiply_vector<1, 4>(p.rows + r * p.stride, p.stride, p.depth, p.vector, p.sums + r);
  }
};

// Multiplies as many rows at once as share what is read of a panel.
template <typename C>
MSOPS_CPU void multiply_panel(int64_t lanes, const C* rows, int64_t count, int64_t depth, const C* panel, C* sums) {
  switch (lanes / kWidth<C>) {
    case 1:
      return run_apart(PanelProduct<kRows, 1, C>{rows, count, depth, panel, sums});
    case 2:
      return run_apart(PanelProduct<kRows / 2, 2, C>{rows, count, depth, panel, sums});
    default:
      return run_apart(PanelProduct<kRows / 2, 3, C>{rows, count, depth, panel, sums});
  }
}

// Returns n rows as numbers of type C, with zeros up to a multiple of kRows. They may lie in `space`, which has room
// for kBlock rows.
template <typename T, typename C = Compute<T>>
MSOPS_CPU const C* in_whole_groups(const T* rows, int64_t n, int64_t deep, C* space) {
  if constexpr (std::is_same<T, C>::value)
    if (n % kRows == 0) return rows;
  widen(rows, space, n * deep);
  std::fill_n(space + n * deep, (kRows - n % kRows) % kRows * deep, C(0));
  return space;
}

// Tile is what some rows of a matrix make of a panel of tokens.
template <typename C>
struct Tile {
  int64_t row, rows;      // the first row of the matrix, and how many
  int64_t token, tokens;  // the panel's first token, and how many
  int64_t pitch;
  const C* sums;  // (rows, pitch)
};

// TokenProduct multiplies up to kBlock rows of a matrix by all tokens.
template <typename T>
struct TokenProduct {
  using C = Compute<T>;
  Lanes<C> lanes;
  int64_t deep;
  const C* panels;    // (deep, pitch), one after another
  C *weights, *sums;  // a thread's own: (kBlock, deep) and (kBlock, kMostLanes)

  // Calls f with the tiles of all panels and the n rows from `first` on.
  template <typename F>
  MSOPS_CPU void operator()(const T* matrix, int64_t first, int64_t n, const F& f) const {
    const T* const rows = matrix + first * deep;
    if (lanes.tokens == 1) {
      run_apart(VectorProduct<T>{rows, deep, n, deep, panels, sums});
      return f(Tile<C>{first, n, 0, 1, 1, sums});
    }
    multiply(in_whole_groups(rows, n, deep, weights), first, n, f);
  }

  // Does so with rows of type C, and zeros up to a multiple of kRows.
  template <typename F>
  MSOPS_CPU void multiply(const C* whole, int64_t first, int64_t n, const F& f) const {
    for (int64_t t = 0; t < lanes.tokens; t += kMostLanes<C>) {
      const int64_t pitch = lanes.pitch(t);
      multiply_panel(pitch, whole, n, deep, panels + t * deep, sums);
      f(Tile<C>{first, n, t, std::min(pitch, lanes.tokens - t), pitch, sums});
    }
  }
};

}  // namespace msops::product
