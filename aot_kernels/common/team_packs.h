// The packs of a row that a lane of a Team has, and what it reads of rows and parameters (see team.h).
#pragma once

#include "team_functions.h"
#include "team_lanes.h"
#ifdef __CUDACC__
#include "gpu/cp_async_bulk.h"
#endif

namespace msops {

template <typename C, typename Shape>
class TeamPacks : public TeamLanes<Shape>, protected TeamFunctions<C, Shape> {
  using Lanes = TeamLanes<Shape>;
  using Functions = TeamFunctions<C, Shape>;

 public:
  static constexpr bool kKeepsPacks = Shape::kHeld > 0 && Shape::kWidth > 1, kHasEdges = Shape::kHasEdges;

  using Lanes::Lanes;

 protected:
  using Functions::at;
  using Functions::compute_pack;
  using Functions::N;
  using Lanes::edges_;
  using Lanes::kept_;
  using Lanes::lane_;
  using Lanes::lanes_;
  using typename Functions::Index;

 private:
  // Teams of a warp or more are chosen for rows of which each lane has a first pack: without a check of it nvcc folds
  // the zeros that sums begin with. In clusters registers for more than 4 packs spill then.
  static constexpr bool kHasFirst = kKeepsPacks && Shape::kLanes >= 32 && Shape::kHeld > 1 &&
                                    (Shape::kHeld <= 4 || !Shape::kClustered);
  template <int kWidth = N>
  struct Values {
    C of[kWidth];
  };
  struct InPlace {  // Values on the CPU where they need no conversion; a copy would not vectorize
    const C* of;
  };

 protected:
  template <typename T>
  static MSOPS_BOTH int64_t length_of(const Row<T>& row) {
    return row.length;
  }
  template <typename T>
  static MSOPS_BOTH int64_t length_of(const HeldRow<T, Shape>& held) {
    return held.row.length;
  }
  static MSOPS_BOTH int64_t length_of(const HeldValues<C, Shape>& held) { return held.length; }
  template <typename F, typename... In>
  static MSOPS_BOTH int64_t length_of(const Computed<F, In...>& computed) {
    return length_of(std::get<0>(computed.in));
  }

  template <typename T>
  static MSOPS_BOTH C element(const Row<T>& row, int64_t j) {
    return C(row.data[j]);
  }
  template <typename T>
  static MSOPS_BOTH C element(const HeldRow<T, Shape>& held, int64_t j) {
    return C(held.row.data[j]);
  }
  template <typename T, int place>
  static MSOPS_BOTH C element(const Parameters<T, place>& in, int64_t j) {
    return in.data == nullptr ? in.otherwise[0] : in.is_float ? C(in.row_of_float().data[j]) : C(in.row().data[j]);
  }
  static MSOPS_BOTH C element(const HeldValues<C, Shape>& held, int64_t) {
    return held.of[0][0];  // for its type: the number is in another lane
  }
  template <typename F, typename... In>
  static MSOPS_BOTH C element(const Computed<F, In...>& computed, int64_t j) {
    return std::apply([&](const In&... in) { return C(at(computed.f, j, element(in, j)...)); }, computed.in);
  }

  // Calls f(i, j) for each of this lane's packs, where pack i begins at element j, and f(Edge(), j) for its element at
  // the edges.
  template <bool kFirst = kHasFirst, typename F>
  MSOPS_BOTH void for_packs(int64_t length, const F& f) const {
    if constexpr (Shape::kHasEdges) {
      const int tail = (static_cast<int>(length) - edges_.head) % N, packs_end = static_cast<int>(length) - tail;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int i = 0; i < Shape::kHeld; ++i) {
        const Index j = edges_.head + (i * lanes_ + lane_) * N;
        if ((kFirst && i == 0) || j < packs_end) f(i, j);
      }
      if (lane_ < edges_.head + tail) f(Edge(), lane_ < edges_.head ? lane_ : packs_end - edges_.head + lane_);
    } else if constexpr (Shape::kHeld > 0) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
      for (int i = 0; i < Shape::kHeld; ++i) {
        const Index j = (i * lanes_ + lane_) * N;
        if ((kFirst && i == 0) || j < static_cast<Index>(length)) f(i, j);
      }
    } else {
      for (int64_t j = int64_t{lane_} * N; j < length; j += int64_t{lanes_} * N) f(0, j);
    }
  }

#ifdef __CUDA_ARCH__
  template <typename T>
  static MSOPS_BOTH Values<> read(const Row<T>& row, int, Index j) {
    Values<> values;
    const auto pack = msops::load<N>(row.data + j);
    for (int k = 0; k < N; ++k) values.of[k] = C(pack.values[k]);
    return values;
  }
  template <typename T>
  static MSOPS_BOTH Values<1> read(const Row<T>& row, Edge, Index j) {
    return {{ element(row, j) }};
  }
  template <typename T, int place>
  static MSOPS_BOTH Values<1> read(const Parameters<T, place>& in, Edge, Index j) {
    return {{ element(in, j) }};
  }
#else
  template <typename T>
  static MSOPS_BOTH auto read(const Row<T>& row, int, Index j) {
    const T* from = row.data + j;
    if constexpr (std::is_same<std::remove_const_t<T>, C>::value) {
      return InPlace{from};
    } else {
      Values<> values;
      widen(from, values.of, N);
      return values;
    }
  }
#endif
  template <typename T, typename I>
  static MSOPS_BOTH auto read(const HeldRow<T, Shape>& held, I i, Index) {
    Values<kWidthAt<Shape, I>> values;
    for (int k = 0; k < kWidthAt<Shape, I>; ++k) values.of[k] = C(held.of[i].values[k]);
    return values;
  }

  template <typename I>
  static MSOPS_BOTH auto read(const HeldValues<C, Shape>& held, I i, Index) {
    Values<kWidthAt<Shape, I>> values;
    for (int k = 0; k < kWidthAt<Shape, I>; ++k) values.of[k] = held.of[i][k];
    return values;
  }
  template <typename I, typename F, typename... In>
  MSOPS_BOTH auto read(const Computed<F, In...>& computed, I i, Index j) const {
    Values<kWidthAt<Shape, I>> values;
    std::apply([&](const In&... in) { compute_pack(values.of, computed.f, j, read(in, i, j)...); }, computed.in);
    return values;
  }

  template <typename T, int place>
  MSOPS_BOTH auto read(const Parameters<T, place>& in, [[maybe_unused]] int i, Index j) const {
#ifdef __CUDA_ARCH__
    if constexpr (Shape::kKeepsParameters && place >= 0) return kept(in, i, j);
#endif
    return read_parameters(in, j);
  }

#ifdef __CUDACC__
  // Begins to bring the packs of the team's next row near. They are neighbours, of which one thread takes all.
  template <typename T>
  __device__ void prefetch(const Row<T>& row) const {
    const int elements = (static_cast<int>(row.length) - edges_.head) / N * N;
    if (lane_ == 0 && edges_.to_next)
      cp_async_bulk_prefetch_L2(row.data + edges_.to_next + edges_.head, elements * static_cast<int>(sizeof(T)));
  }

  // Returns how many elements of a row the lanes from `first` keep.
  __device__ int elements_of(int64_t length, int first, int lanes) const {
    int edges = 0;
    if constexpr (Shape::kHasEdges) edges = edges_.head + (static_cast<int>(length) - edges_.head) % N;
    const auto after = [&](int of_all) { return ::min(::max(of_all - first, 0), lanes); };
    int packs = 0;
    for (int i = 0; i < Shape::kHeld; ++i) packs += after((static_cast<int>(length) - edges) / N - i * lanes_);
    return packs * N + after(edges);
  }
#endif

 private:
  template <typename T, int place>
  static MSOPS_BOTH auto read_parameters(const Parameters<T, place>& in, Index j) {
#ifndef __CUDA_ARCH__
    if constexpr (std::is_same<T, float>::value)
      return InPlace{in.data ? in.row().data + j : in.otherwise};
    else
#endif
    {
      if (in.data && in.is_float && !std::is_same<T, float>::value)
        return as_values(read_between_packs(in.row_of_float(), j));
      if (in.data) return as_values(read_between_packs(in.row(), j));
      Values<> values;
#pragma omp simd
      for (int k = 0; k < N; ++k) values.of[k] = in.otherwise[0];
      return values;
    }
  }
  // Reads a pack of parameters, whose distance from aligned packs is their own, out of the aligned packs around it.
  template <typename U>
  static MSOPS_BOTH auto read_between_packs(const Row<const U>& row, Index j) {
    if constexpr (Shape::kHasEdges) {
      constexpr int kWidth = N < kPackWidth<U> ? N : kPackWidth<U>;
      Pack<U, kWidth> packs[N / kWidth];
      if (N <= j && j + 2 * N <= row.length) {
        for (int p = 0; p < N / kWidth; ++p) packs[p] = load_shifted<kWidth>(row.data + j + p * kWidth);
      } else {  // packs around it may lie outside the tensor
        for (int k = 0; k < N; ++k) packs[k / kWidth].values[k % kWidth] = row.data[j + k];
      }
      Values<> values;
      for (int k = 0; k < N; ++k) values.of[k] = C(packs[k / kWidth].values[k % kWidth]);
      return values;
    } else {
      return read(row, 0, j);
    }
  }
  template <typename V>
  static MSOPS_BOTH Values<> as_values(const V& from) {
    Values<> values;
#pragma omp simd
    for (int k = 0; k < N; ++k) values.of[k] = from.of[k];
    return values;
  }

#ifdef __CUDACC__
  // Returns a pack of parameters from shared memory, after the lane's packs were copied there.
  template <typename T, int place>
  __device__ Values<> kept(const Parameters<T, place>& in, int i, Index j) const {
    const auto at = [&](int p, int k) -> Pack<float, 4>& {  // neighbouring threads have neighbouring packs of 16 bytes
      return kept_.places[((place * Shape::kHeld + p) * (N / 4) + k / 4) * blockDim.x + threadIdx.x];
    };
    if (i == 0 && in.data != kept_.data[place]) {
      kept_.data[place] = in.data;
#pragma unroll 1
      for (int p = 0; p < Shape::kHeld && j + p * lanes_ * N + N <= in.length; ++p) {
        const Values<> values = read_parameters(in, j + p * lanes_ * N);
        for (int k = 0; k < N; ++k) at(p, k).values[k % 4] = values.of[k];
      }
    }
    Values<> values;
    for (int k = 0; k < N; k += 4) {
      const Pack<float, 4> pack = at(i, k);
      for (int e = 0; e < 4; ++e) values.of[k + e] = pack.values[e];
    }
    return values;
  }
#endif
};

}  // namespace msops
