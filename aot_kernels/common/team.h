// Team is the threads that share a row: this is what it offers to the body of for_rows (see rows.h), on both devices.
#pragma once

#include "team_reductions.h"

namespace msops {

// Elements have the computing type C. On the GPU whole packs tile the rows, and are aligned; packs may be of one
// element.
template <typename C, typename Shape>
class Team : public TeamReductions<C, Shape> {
  using Reductions = TeamReductions<C, Shape>;
  using Reductions::at;
  using Reductions::compute_pack;
  using Reductions::element;
  using Reductions::for_packs;
  using Reductions::lane_;
  using Reductions::length_of;
  using Reductions::N;
  using Reductions::read;
  using Reductions::write;
  using typename Reductions::Index;
#ifdef __CUDACC__
  using Reductions::prefetch;
#endif

 public:
  using Reductions::kKeepsPacks;
  using Reductions::Reductions;

  // Returns the row for the functions below, which take it in place of a Row. It is read once, where the team can keep
  // it.
  template <typename T>
  MSOPS_BOTH auto load(Row<T> row) const {
    if constexpr (Shape::kHeld == 0) {
      return row;
    } else {
      HeldRow<T, Shape> held;
      held.row = row;
      for_packs(row.length,
                [&](auto i, Index j) { held.of[i] = msops::load<kWidthAt<Shape, decltype(i)>>(row.data + j); });
#ifdef __CUDA_ARCH__
      if constexpr (Shape::kHasEdges) prefetch(row);
#endif
      return held;
    }
  }

  // Returns the row of f(a_j, b_j, ...) for the functions below. It is computed once, where the team can keep it.
  template <typename F, typename First, typename... In>
  MSOPS_BOTH auto compute(const F& f, const First& first, const In&... in) const {
    if constexpr (!kKeepsNumbers) {
      return Computed<F, First, In...>{f, {first, in...}};
    } else {
      HeldValues<C, Shape> held;
      held.length = length_of(first);
      for_packs(held.length, [&](auto i, Index j) {
        this->compute_pack(held.of[i], f, j, this->read(first, i, j), this->read(in, i, j)...);
      });
      return held;
    }
  }
  // Returns the row converted to C once, where the team can keep it.
  template <typename In>
  MSOPS_BOTH auto compute(const In& in) const {
    if constexpr (!kKeepsNumbers) {
      return in;
    } else {
      return compute([](C v) { return v; }, in);
    }
  }

  // Calls f with parameters, or with rows of T where all of them are that: without branches for their kind nvcc loads
  // several packs at once.
  template <typename F, typename... P>
  MSOPS_BOTH void with_rows(const F& f, const P&... parameters) const {
#ifdef __CUDA_ARCH__
    if constexpr (kKeepsPacks && !Shape::kKeepsParameters)
      if ((parameters.has_row() && ...)) return f(parameters.row()...);
#endif
    f(parameters...);
  }

  // out_j = f(a_j, b_j, ...) for all j, where `out` may be one of the inputs.
  template <typename F, typename T, typename... In>
  MSOPS_BOTH void map(const F& f, Row<T> out, const In&... in) const {
#ifdef __CUDA_ARCH__
    for_packs(out.length, [&](auto i, Index j) { this->write(out, f, i, j, this->read(in, i, j)...); });
#else
    const int64_t whole = out.length / N * N;
    for (int64_t j = 0; j < whole; j += N) write(out, f, 0, j, this->read(in, 0, j)...);
    if (whole == out.length) return;
    if (whole > 0) return Reductions::write_rest(out, f, out.length - whole, this->read(in, 0, out.length - N)...);
    for (int64_t j = 0; j < out.length; ++j) assign(out.data[j], at(f, j, element(in, j)...));
#endif
  }

  // Maps rows as map does, and returns `out` as load would, but does not read it.
  template <typename F, typename T, typename... In>
  MSOPS_BOTH auto map_and_load(const F& f, Row<T> out, const In&... in) const {
    if constexpr (Shape::kHeld == 0) {
      map(f, out, in...);
      return Row<const T>{out.data, out.length};
    } else {
      HeldRow<const T, Shape> held;
      held.row = {out.data, out.length};
      // If the first pack had no check, nvcc would compute it before it loads the last packs of other rows.
      this->template for_packs<false>(out.length, [&](auto i, Index j) {
        held.of[i] = Reductions::template pack_of<T, kWidthAt<Shape, decltype(i)>>(f, j, this->read(in, i, j)...);
        store_at_once(out.data + j, held.of[i]);
      });
      return held;
    }
  }

  // LaneSums are this lane's elements of a row of sums.
  struct LaneSums {
    HeldNumbers<C, Shape> of = {};
  };

  // Calls f(i, from) for each pack i of a row that this lane keeps, and with an Edge for its element at the edges.
  template <typename T, typename F>
  MSOPS_BOTH void each_pack(Row<T> row, const F& f) const {
    for_packs(row.length, [&](auto i, Index j) { f(i, row.data + j); });
  }

  // sums_j += f(a_j, b_j, ...) for all j, where `sums` is a row in memory, or in the lanes' registers.
  template <typename F, typename First, typename... In>
  MSOPS_BOTH void add(LaneSums& sums, const F& f, const First& first, const In&... in) const {
    for_packs(length_of(first), [&](auto i, Index j) {
      Reductions::template add_pack<kWidthAt<Shape, decltype(i)>>(sums.of[i], f, j, this->read(first, i, j),
                                                                  this->read(in, i, j)...);
    });
  }
  template <typename F, typename First, typename... In>
  MSOPS_BOTH void add(Row<C> sums, const F& f, const First& first, const In&... in) const {
#ifdef __CUDA_ARCH__
    for_packs(sums.length, [&](int, Index j) {
      for (int k = 0; k < N; ++k) sums.data[j + k] += at(f, j + k, element(first, j + k), element(in, j + k)...);
    });
#else
    const int64_t whole = sums.length / N * N;
    for (int64_t j = 0; j < whole; j += N)
      Reductions::template add_pack<N>(sums.data + j, f, j, this->read(first, 0, j), this->read(in, 0, j)...);
    const int64_t rest = sums.length - whole, last = sums.length - N;
    if (rest > 0 && whole > 0)
      return Reductions::add_rest(sums.data + last, f, last, rest, this->read(first, 0, last),
                                  this->read(in, 0, last)...);
    for (int64_t j = whole; j < sums.length; ++j) sums.data[j] += at(f, j, element(first, j), element(in, j)...);
#endif
  }

  // Copies the lanes' sums to a row in global or shared memory.
  MSOPS_BOTH void store(Row<C> to, const LaneSums& sums) const {
    for_packs(to.length, [&](auto i, Index j) {
      constexpr int kWidth = kWidthAt<Shape, decltype(i)>;
      if constexpr (Shape::kHasEdges) {  // the sums of a row may begin at another distance from an aligned pack
        for (int k = 0; k < kWidth; ++k) to.data[j + k] = sums.of[i][k];
      } else {
        Pack<C, kWidth> pack;
        for (int k = 0; k < kWidth; ++k) pack.values[k] = sums.of[i][k];
        msops::store(to.data + j, pack);
      }
    });
  }

  // Stores one number for the whole row.
  template <typename T>
  MSOPS_BOTH void store(T* to, Compute<T> value) const {
    if (lane_ == 0) assign(*to, value);
  }

 private:
  // Numbers of a row are kept if registers are enough for those of several rows; blocks of a cluster have few, and
  // twice as many where they keep parameters (see rows_with_sums_kernel).
  static constexpr int kMostNumbers = !Shape::kClustered ? 32 : Shape::kKeepsParameters ? 16 : 0;
  static constexpr bool kKeepsNumbers = Shape::kHeld > 0 && Shape::kHeld* N <= kMostNumbers;
};

}  // namespace msops
