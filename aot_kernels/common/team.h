// Team is the threads that share a row: this is what it offers to the body of for_rows (see rows.h), on both devices.
#pragma once

#include "functions.h"
#include "parallel.h"
#include "statistics.h"
#include "team_rows.h"
#ifdef __CUDACC__
#include "gpu/cluster.h"
#include "gpu/cp_async_bulk.h"
#include "gpu/mbarrier.h"
#endif

namespace msops {

// Elements have the computing type C. On the GPU whole packs tile the rows, and are aligned; packs may be of one
// element.
template <typename C, typename Shape>
class Team {
 public:
  static constexpr bool kKeepsPacks = Shape::kHeld > 0 && Shape::kWidth > 1, kHasEdges = Shape::kHasEdges;

  MSOPS_BOTH Team(int lane, SharedOfWarp* shared) : lane_(lane), lanes_(Shape::kLanes), shared_(shared) {
#ifdef __CUDA_ARCH__
    if (Shape::kLanes > 32) lanes_ = static_cast<int>(blockDim.x);
    if (Shape::kClustered) {
      lane_ += static_cast<int>(cluster_ctarank()) * lanes_;
      lanes_ *= static_cast<int>(cluster_nctarank());
    }
#endif
  }

#ifdef __CUDACC__
  // If kHasEdges, this comes first: rows have `head` elements before their first aligned pack.
  __device__ void set_head(int head) { edges_.head = head, edges_.to_next = 0; }

  // If kSends, this comes first, and end_sending() last.
  __device__ void begin_sending(SentResults* results) {
    sending_.results = results, sending_.reductions = 0;
    if (threadIdx.x == 0) {
      for (uint64_t& each : results->arrived) mbarrier_init(shared_address(&each), 1);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }
  __device__ void end_sending() const {
    if (sending_.reductions == 0) cluster_wait();
  }

  // If kKeepsParameters, this comes first: `places` are in shared memory, of which parameters take bytes_of_place()
  // each.
  __device__ void keep_parameters(void* places) {
    kept_.places = static_cast<Pack<float, 4>*>(places);
    for (const void*& each : kept_.data) each = places;
  }

  // Tells how many elements later than each row that is loaded now the next row of the team begins, or 0.
  __device__ void set_next(int64_t elements) { edges_.to_next = elements; }
#endif

  // Returns the row for the functions below, which take it in place of a Row. It is read once, where the team can keep
  // it.
  template <typename T>
  MSOPS_BOTH auto load(Row<T> row) const {
    if constexpr (Shape::kHeld == 0) {
      return row;
    } else {
      HeldRow<T, Shape> held;
      held.row = row;
      for_packs(row.length, [&](auto i, Index j) { held.of[i] = msops::load<kWidthAt<decltype(i)>>(row.data + j); });
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
      for_packs(held.length,
                [&](auto i, Index j) { compute_pack(held.of[i], f, j, read(first, i, j), read(in, i, j)...); });
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

  // sum and max return the sum and the largest of f(a_j, b_j, ...) over all j, for rows a, b, ... of one length. For
  // empty rows they return 0 and -infinity. NaN counts as larger than all. A function that returns TwoSums or
  // FourSums (see statistics.h) gives two or four sums in one reduction.
  template <typename F, typename First, typename... In>
  MSOPS_BOTH auto sum(const F& f, const First& first, const In&... in) const {
    using Result = decltype(at(f, int64_t{}, element(first, 0), element(in, 0)...));
    using R = std::conditional_t<std::is_class<Result>::value, Result, C>;
    return combined(R{}, [](const R& a, const R& b) { return a + b; }, f, first, in...);
  }
  template <typename F, typename First, typename... In>
  MSOPS_BOTH C max(const F& f, const First& first, const In&... in) const {
    return combined(C(-HUGE_VAL), [](C a, C b) { return b > a || b != b ? b : a; }, f, first, in...);
  }

  template <typename In>
  MSOPS_BOTH C sum(const In& in) const {
    return sum([](C v) { return v; }, in);
  }
  template <typename In>
  MSOPS_BOTH C max(const In& in) const {
    return max([](C v) { return v; }, in);
  }

  // Combines the results of f by any associative and commutative `combine`, for which combine(a, identity) is a.
  // Results may be numbers, or structs of up to 32 bytes, such as a value and its column.
  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R reduce(R identity, const Combine& combine, const F& f, const First& first, const In&... in) const {
    static_assert(std::is_same<decltype(at(f, int64_t{}, element(first, 0), element(in, 0)...)), R>::value,
                  "reduce: the identity must have the type that the function returns");
    return combined(identity, combine, f, first, in...);
  }

  // Returns a statistic of a row (see statistics.h), as in team.reduce(ArgMax<C>(), x[row]).
  template <typename R, typename In>
  MSOPS_BOTH R reduce(R identity, const In& in) const {
    return combined(
        identity, [](const R& a, const R& b) { return R::combine(a, b); }, [](int64_t j, C v) { return R::of(j, v); },
        in);
  }

  // Returns the sums of a row that the team keeps about a number near its mean, which need one reduction (see
  // statistics.h). A lane's pivot is its first element, that of lanes the mean of the first of them, and that of warps
  // and blocks the mean of the first warp. With kFromMeans, it is the mean of a lane's elements, and of the lanes',
  // warps' and blocks' means: then the sums lose no digits where the first elements are far from the others.
  template <bool kFromMeans, typename First, typename... In>
  MSOPS_BOTH auto sums_about_pivot(const First& x, const In&... g) const {
    constexpr int kCount = 2 + 2 * sizeof...(In);
    SumsAbout<C, kCount> lane;
#ifdef __CUDA_ARCH__
    using Sums = SeveralSums<C, kCount>;
    const int64_t length = length_of(x);
    int elements = 0;
    for_packs(length, [&](auto i, Index j) {
      if (elements == 0) lane.pivot = read(x, i, j).of[0];
      elements += kWidthAt<decltype(i)>;
    });
    if constexpr (kFromMeans) {
      C rest = 0;
      for_packs(length, [&](auto i, Index j) {
        const auto values = read(x, i, j);
        for (const C v : values.of) rest += v - lane.pivot;
      });
      lane.pivot += elements > 0 ? rest / C(elements) : C(0);
    }
    Results<Sums> results{Sums()};
    const auto of_element = [pivot = lane.pivot](C v, auto... of_g) {
      const C u = v - pivot;
      Sums sums{{u * u, u}};
      ((sums.of[2] = u * of_g, sums.of[3] = of_g), ...);
      return sums;
    };
    for_packs(length, [&](auto i, Index j) {
      results.template accumulate<kWidthAt<decltype(i)>>(0, of_element, j, read(x, i, j), read(g, i, j)...);
    });
    lane.sums = results.folded(0);
    return over_parts(lane, {}, [&](auto part, int parts, int first, int lanes) {
      constexpr C kShare = C(1) / (Shape::kHeld * N);  // of an element in the mean, if the lanes keep all that they can
      const C mean = part.pivot + part.sums.of[1] * (lanes == 1 ? kShare : lanes == 32 ? kShare / 32 : C(0));
      const C count = C(elements_of(length, first, lanes));
      const auto add = [](const auto& a, const auto& b) { return a + b; };
      C to = __shfl_sync(mask(), mean, 0, parts);
      if constexpr (kFromMeans) to += over_warp(count > 0 ? mean - to : C(0), add, parts) / C(parts);
      part.move(to, count);
      part.sums = over_warp(part.sums, add, parts);
      return part;
    });
#else
    return lane;
#endif
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
    for_packs(out.length, [&](auto i, Index j) { write(out, f, i, j, read(in, i, j)...); });
#else
    const int64_t whole = out.length / N * N;
    for (int64_t j = 0; j < whole; j += N) write(out, f, 0, j, read(in, 0, j)...);
    if (whole == out.length) return;
    if (whole > 0) return write_rest(out, f, out.length - whole, read(in, 0, out.length - N)...);
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
      for_packs<false>(out.length, [&](auto i, Index j) {
        held.of[i] = pack_of<T, kWidthAt<decltype(i)>>(f, j, read(in, i, j)...);
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
      add_pack<kWidthAt<decltype(i)>>(sums.of[i], f, j, read(first, i, j), read(in, i, j)...);
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
    for (int64_t j = 0; j < whole; j += N) add_pack<N>(sums.data + j, f, j, read(first, 0, j), read(in, 0, j)...);
    const int64_t rest = sums.length - whole, last = sums.length - N;
    if (rest > 0 && whole > 0)
      return add_rest(sums.data + last, f, last, rest, read(first, 0, last), read(in, 0, last)...);
    for (int64_t j = whole; j < sums.length; ++j) sums.data[j] += at(f, j, element(first, j), element(in, j)...);
#endif
  }

  // Copies the lanes' sums to a row in global or shared memory.
  MSOPS_BOTH void store(Row<C> to, const LaneSums& sums) const {
    for_packs(to.length, [&](auto i, Index j) {
      constexpr int kWidth = kWidthAt<decltype(i)>;
      if constexpr (Shape::kHasEdges) {  // the sums of a row may begin at another distance from an aligned pack
        for (int k = 0; k < kWidth; ++k) to.data[j + k] = sums.of[i][k];
      } else {
        Pack<C, kWidth> pack;
        for (int k = 0; k < kWidth; ++k) pack.values[k] = sums.of[i][k];
        msops::store(to.data + j, pack);
      }
    });
  }

#ifdef __CUDACC__
  // Returns the bits of the team's lanes in their warp, since the teams of a warp may have different numbers of rows.
  static __device__ unsigned mask() {
    if constexpr (Shape::kLanes < 32) {
      return ((1u << Shape::kLanes) - 1) << threadIdx.x % 32 / Shape::kLanes * Shape::kLanes;
    } else {
      return ~0u;
    }
  }
#endif

  // Stores one number for the whole row.
  template <typename T>
  MSOPS_BOTH void store(T* to, Compute<T> value) const {
    if (lane_ == 0) assign(*to, value);
  }

#ifdef __CUDACC__
  // Combines one value of each lane, as reduce combines those of a row's elements. All lanes get the result.
  template <typename R, typename Combine>
  __device__ R over_lanes(R value, const R& identity, const Combine& combine) const {
    return over_parts(value, identity,
                      [&](const R& part, int parts, int, int) { return over_warp(part, combine, parts); });
  }
#endif

 private:
  static constexpr int N = Shape::kWidth;
  // Numbers of a row are kept if registers are enough for those of several rows; blocks of a cluster have few, and
  // twice as many where they keep parameters (see rows_with_sums_kernel).
  static constexpr int kMostNumbers = !Shape::kClustered ? 32 : Shape::kKeepsParameters ? 16 : 0;
  static constexpr bool kKeepsNumbers = Shape::kHeld > 0 && Shape::kHeld* N <= kMostNumbers;
  struct None {};
  struct Edges {
    int head;
    int64_t to_next;
  };
  struct Kept {
    Pack<float, 4>* places;
    mutable const void* data[kMostPlaces];  // of the parameters, or `places` where there are none yet
  };
  struct Sending {
    SentResults* results;
    mutable unsigned reductions;
  };
  using Index = std::conditional_t<(Shape::kHeld > 0), int, int64_t>;  // rows that are held are short
  // Teams of a warp or more are chosen for rows of which each lane has a first pack: without a check of it nvcc folds
  // the zeros that sums begin with. In clusters registers for more than 4 packs spill then.
  static constexpr bool kHasFirst = kKeepsPacks && Shape::kLanes >= 32 && Shape::kHeld > 1 &&
                                    (Shape::kHeld <= 4 || !Shape::kClustered);
  static constexpr int kNoLane = 1 << 30;
  template <int kWidth = N>
  struct Values {
    C of[kWidth];
  };
  template <typename I>
  static constexpr int kWidthAt = std::is_same<I, Edge>::value ? 1 : N;
  struct InPlace {  // Values on the CPU where they need no conversion; a copy would not vectorize
    const C* of;
  };

  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R combined(R identity, const Combine& combine, const F& f, const First& first, const In&... in) const {
    static_assert(std::is_trivially_copyable<R>::value && sizeof(R) <= sizeof(SharedOfWarp),
                  "reduce: what is reduced must be a number, or a struct of up to 32 bytes that memcpy may copy");
    const int64_t length = length_of(first);
    Results<R> results(identity);
#ifdef __CUDA_ARCH__
    for_packs(length, [&](auto i, Index j) {
      results.template accumulate<kWidthAt<decltype(i)>>(combine, f, j, read(first, i, j), read(in, i, j)...);
    });
    return over_lanes(results.folded(combine), identity, combine);
#else
    constexpr int64_t kRun = 256 * N;  // elements; with more, a sum would lose digits
    R total = identity;
    int64_t j = 0;
    for (const int64_t whole = length / N * N; j < whole;) {
      for (const int64_t end = j + kRun < whole ? j + kRun : whole; j < end; j += N)
        results.template accumulate<N>(combine, f, j, read(first, 0, j), read(in, 0, j)...);
      total = combine(total, results.folded(combine));
      results = Results<R>(identity);
    }
    // Structs take the elements after the last whole pack one by one. With several sums in vectors there, GCC rounded
    // products otherwise than in the packs, and layer_norm lost digits.
    if constexpr (std::is_floating_point<R>::value)
      if (0 < j && j < length) {
        const int64_t last = length - N;
        results.accumulate_rest(length - j, combine, f, last, read(first, 0, last), read(in, 0, last)...);
        return combine(total, results.folded(combine));
      }
    for (; j < length; ++j) total = combine(total, R(at(f, j, element(first, j), element(in, j)...)));
    return total;
#endif
  }

  // Results are N results that are combined to one in the end, by halves.
  template <typename R>
  struct Results {
    R of[N];

    MSOPS_BOTH explicit Results(const R& identity) {
      for (R& result : of) result = identity;
    }
    template <int kWidth, typename Combine, typename F, typename... V>
    MSOPS_BOTH void accumulate(const Combine& combine, const F& f, Index j, const V&... values) {
#ifndef __CUDA_ARCH__
#pragma omp simd
#endif
      for (int k = 0; k < kWidth; ++k) of[k] = combine(of[k], R(at(f, j + k, values.of[k]...)));
    }
    // Takes the last `rest` of N values.
    template <typename Combine, typename F, typename... V>
    MSOPS_CPU void accumulate_rest(int64_t rest, const Combine& combine, const F& f, Index j, const V&... values) {
#pragma omp simd
      for (int k = 0; k < N; ++k) {
        const R combined = combine(of[k], R(at(f, j + k, values.of[k]...)));
        of[k] = k < N - static_cast<int>(rest) ? of[k] : combined;
      }
    }
    template <typename Combine>
    MSOPS_BOTH R folded(const Combine& combine) {
      for (int half = N / 2; half > 0; half /= 2)
        for (int k = 0; k < half; ++k) of[k] = combine(of[k], of[k + half]);
      return of[0];
    }
  };

  // Each sum has an array, since the CPU would not vectorize a loop over structs. On the GPU sums of many elements
  // share registers.
  template <int kCount>
  struct Results<SeveralSums<C, kCount>> {
#ifdef __CUDA_ARCH__
    static constexpr int kWide = (kCount > 2 && N > 1) || N > 4 ? N / 2 : N;
#else
    static constexpr int kWide = N;
#endif
    C of[kCount][kWide];

    MSOPS_BOTH explicit Results(const SeveralSums<C, kCount>& identity) {
      for (int s = 0; s < kCount; ++s)
        for (int k = 0; k < kWide; ++k) of[s][k] = identity.of[s];
    }
    template <int kWidth, typename Combine, typename F, typename... V>
    MSOPS_BOTH void accumulate(const Combine&, const F& f, Index j, const V&... values) {
      accumulate_each<kWidth>(std::make_integer_sequence<int, kCount>(), f, j, values...);
    }
    template <typename Combine>
    MSOPS_BOTH SeveralSums<C, kCount> folded(const Combine&) {
      SeveralSums<C, kCount> sums;
      for (int s = 0; s < kCount; ++s) {
        for (int half = kWide / 2; half > 0; half /= 2)
          for (int k = 0; k < half; ++k) of[s][k] += of[s][k + half];
        sums.of[s] = of[s][0];
      }
      return sums;
    }

   private:
    template <int kWidth, int... s, typename F, typename... V>
    MSOPS_BOTH void accumulate_each(std::integer_sequence<int, s...>, const F& f, Index j, const V&... values) {
#ifndef __CUDA_ARCH__
#pragma omp simd
#endif
      for (int k = 0; k < kWidth; ++k) {
        const SeveralSums<C, kCount> added = at(f, j + k, values.of[k]...);
        ((of[s][k % kWide] += added.of[s]), ...);
      }
    }
  };

  // Column converts to int64_t and to nothing else, so that a function of one more element does not pass for one of a
  // column.
  struct Column {
    template <typename Index, typename = std::enable_if_t<std::is_same<Index, int64_t>::value>>
    MSOPS_BOTH operator Index() const;
  };

  // Calls f(v...), or f(j, v...) if f takes the column.
  template <typename F, typename... V>
  static MSOPS_BOTH auto at(const F& f, [[maybe_unused]] int64_t j, V... v) {
    if constexpr (std::is_invocable<F, V...>::value) {
      return f(v...);
    } else {
      static_assert(std::is_invocable<F, Column, V...>::value,
                    "a function of elements takes one of each row, or the column, an int64_t, and one of each row");
      return f(j, v...);
    }
  }

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
    return {{element(row, j)}};
  }
  template <typename T, int place>
  static MSOPS_BOTH Values<1> read(const Parameters<T, place>& in, Edge, Index j) {
    return {{element(in, j)}};
  }
#else
  template <typename T>
  static MSOPS_BOTH auto read(const Row<T>& row, int, Index j) {
    const T* from = row.data + j;
    if constexpr (std::is_same<std::remove_const_t<T>, C>::value) {
      return InPlace{from};
    } else {
      Values<> values;
#pragma omp simd
      for (int k = 0; k < N; ++k) values.of[k] = C(from[k]);
      return values;
    }
  }
#endif
  template <typename T, typename I>
  static MSOPS_BOTH auto read(const HeldRow<T, Shape>& held, I i, Index) {
    Values<kWidthAt<I>> values;
    for (int k = 0; k < kWidthAt<I>; ++k) values.of[k] = C(held.of[i].values[k]);
    return values;
  }

  template <typename I>
  static MSOPS_BOTH auto read(const HeldValues<C, Shape>& held, I i, Index) {
    Values<kWidthAt<I>> values;
    for (int k = 0; k < kWidthAt<I>; ++k) values.of[k] = held.of[i][k];
    return values;
  }
  template <typename I, typename F, typename... In>
  MSOPS_BOTH auto read(const Computed<F, In...>& computed, I i, Index j) const {
    Values<kWidthAt<I>> values;
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

  template <int kWidth, typename F, typename... V>
  static MSOPS_BOTH void compute_pack(C (&results)[kWidth], const F& f, Index j, const V&... values) {
#ifndef __CUDA_ARCH__
#pragma omp simd
#endif
    for (int k = 0; k < kWidth; ++k) results[k] = at(f, j + k, values.of[k]...);
  }

  template <typename T, int kWidth, typename F, typename... V>
  static MSOPS_BOTH Pack<T, kWidth> pack_of(const F& f, Index j, const V&... values) {
    Pack<T, kWidth> pack;
    for (int k = 0; k < kWidth; ++k) assign(pack.values[k], at(f, j + k, values.of[k]...));
    return pack;
  }

  template <typename T, typename F, typename I, typename... V>
  static MSOPS_BOTH void write(const Row<T>& out, const F& f, I, Index j, const V&... values) {
#ifdef __CUDA_ARCH__
    store_at_once(out.data + j, pack_of<T, kWidthAt<I>>(f, j, values...));
#else
    T* to = out.data + j;
#pragma omp simd
    for (int k = 0; k < N; ++k) assign(to[k], at(f, j + k, values.of[k]...));
#endif
  }

#ifndef __CUDA_ARCH__
  // write_rest and add_rest take the last `rest` of N values. So the elements after the last whole pack are computed
  // with those before them, which vectorizes.
  template <typename T, typename F, typename... V>
  static MSOPS_CPU void write_rest(const Row<T>& out, const F& f, int64_t rest, const V&... values) {
    T* to = out.data + out.length - N;
    const int kept = N - static_cast<int>(rest);
#pragma omp simd
    for (int k = 0; k < N; ++k) assign(to[k], k < kept ? C(to[k]) : C(at(f, out.length - N + k, values.of[k]...)));
  }
  template <typename F, typename... V>
  static MSOPS_CPU void add_rest(C* sums, const F& f, int64_t j, int64_t rest, const V&... values) {
    const int kept = N - static_cast<int>(rest);
#pragma omp simd
    for (int k = 0; k < N; ++k) sums[k] = k < kept ? sums[k] : sums[k] + C(at(f, j + k, values.of[k]...));
  }
#endif

  template <int kWidth, typename F, typename... V>
  static MSOPS_BOTH void add_pack(C* sums, const F& f, Index j, const V&... values) {
#ifndef __CUDA_ARCH__
#pragma omp simd
#endif
    for (int k = 0; k < kWidth; ++k) sums[k] += at(f, j + k, values.of[k]...);
  }

#ifdef __CUDACC__
  // Begins to bring the packs of the team's next row near. They are neighbours, of which one thread takes all.
  template <typename T>
  __device__ void prefetch(const Row<T>& row) const {
    const int elements = (static_cast<int>(row.length) - edges_.head) / N * N;
    if (lane_ == 0 && edges_.to_next)
      cp_async_bulk_prefetch_L2(row.data + edges_.to_next + edges_.head, elements * static_cast<int>(sizeof(T)));
  }

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

  // Reduces over `lanes` neighbouring lanes of a warp, a power of 2. Structs are combined in the lanes' order, so that
  // all lanes have the same bits even where combine(a, b) is rounded differently from combine(b, a).
  template <typename R, typename Combine>
  static __device__ R over_warp(R value, const Combine& combine, int lanes) {
    constexpr int kWords = (sizeof(R) + 3) / 4;
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      uint32_t words[kWords] = {};
      memcpy(words, &value, sizeof value);
      for (uint32_t& word : words) word = __shfl_xor_sync(mask(), word, distance);
      R other;
      memcpy(&other, words, sizeof other);
      if (std::is_class<R>::value && threadIdx.x & distance) {
        value = combine(other, value);
      } else {
        value = combine(value, other);
      }
    }
    return value;
  }

  // Merges one value of each lane to those of warps, these to those of blocks, and these to one of the team.
  // merge(value, parts, first, lanes) merges the values of `parts` neighbouring lanes of a warp. The value that it gets
  // is that of so many of the team's lanes, from `first`, or `identity` where `first` is no lane.
  template <typename R, typename Merge>
  __device__ R over_parts(R value, [[maybe_unused]] const R& identity, const Merge& merge) const {
    if constexpr (Shape::kLanes <= 32) {
      return merge(value, Shape::kLanes, lane_, 1);
    } else {
      // Reductions take two places in turn, so that one barrier each is enough.
      constexpr int kWarps = Shape::kLanes / 32;
      SharedOfWarp* const shared = shared_ + turn_ * (kWarps + 1);
      turn_ ^= 1;
      R* const of_warps = reinterpret_cast<R*>(shared);
      const int lane = static_cast<int>(threadIdx.x) % 32, threads = static_cast<int>(blockDim.x);
      value = merge(value, 32, lane_, 1);
      if (lane == 0) of_warps[threadIdx.x / 32] = value;
      __syncthreads();
      const bool is_warp = lane % kWarps < threads / 32;
      value = is_warp ? of_warps[lane % kWarps] : identity;
      const int of_block = lane_ - static_cast<int>(threadIdx.x);  // the block's first lane
      value = merge(value, kWarps, is_warp ? of_block + lane % kWarps * 32 : kNoLane, 32);
      if constexpr (Shape::kClustered) {
        const int blocks = static_cast<int>(cluster_nctarank());
        if constexpr (Shape::kSends) {
          value = sent_by_blocks(value, blocks);
        } else {
          value = of_blocks(value, blocks, shared + kWarps);
        }
        value = merge(value, blocks, lane % blocks * threads, threads);
      }
      return value;
    }
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

  // Exchanges a value of each block of a cluster, whose number is a power of 2: a lane gets that of block lane %
  // blocks. `shared` is the same place in each of them.
  template <typename R>
  static __device__ R of_blocks(R value, int blocks, SharedOfWarp* shared) {
    if (threadIdx.x == 0) memcpy(shared, &value, sizeof value);
    __syncwarp();
    cluster_arrive_wait();
    const float* const from = reinterpret_cast<const float*>(shared);
    constexpr int kLoads = (sizeof(R) + 15) / 16;
    Pack<float, 4> words[kLoads];
    for (int i = 0; i < kLoads; ++i) words[i] = ld_shared_cluster(from + 4 * i, static_cast<int>(threadIdx.x) % blocks);
    memcpy(&value, words, sizeof value);
    return value;
  }

  // Does the same where each block sends its value to all blocks, and waits for theirs. A block that is one reduction
  // ahead writes to the places of the other turn; it cannot be two ahead, since it waits for this block's value.
  template <typename R>
  __device__ R sent_by_blocks(R value, int blocks) const {
    constexpr int kWords = (sizeof(R) + 3) / 4;
    SentResults& results = *sending_.results;
    const int turn = sending_.reductions % 2;
    const unsigned arrived = shared_address(&results.arrived[turn]);
    if (sending_.reductions == 0) cluster_wait();  // until the mbarriers of all blocks are initialized
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, 4 * kWords * blocks);
    if (threadIdx.x < blocks) {
      float words[kWords] = {};
      memcpy(words, &value, sizeof value);
      for (int w = 0; w < kWords; ++w)
        st_async(words[w], &results.words[turn][cluster_ctarank()][w], arrived, threadIdx.x);
    }
    mbarrier_wait(arrived, sending_.reductions / 2 % 4096);
    ++sending_.reductions;
    memcpy(&value, results.words[turn][threadIdx.x % blocks], sizeof value);
    return value;
  }
#endif

  int lane_, lanes_;      // lanes of the whole team
  SharedOfWarp* shared_;  // kSharedOfTeam<Shape> of them, if the team is larger than a warp
  mutable int turn_ = 0;  // which of the two places the next reduction takes
  std::conditional_t<Shape::kHasEdges, Edges, None> edges_;
  std::conditional_t<Shape::kKeepsParameters, Kept, None> kept_;
  std::conditional_t<Shape::kSends, Sending, None> sending_;
};

// The number of SharedOfWarp that a team needs: twice, one for each warp and one for the block.
template <typename Shape>
constexpr int kSharedOfTeam = Shape::kLanes > 32 ? 2 * (Shape::kLanes / 32 + 1) : 1;

}  // namespace msops
