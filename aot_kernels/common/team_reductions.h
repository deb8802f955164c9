// Reductions along rows: what a lane of a Team makes of its elements, and all lanes of that (see team.h).
#pragma once

#include "statistics.h"
#include "team_packs.h"

namespace msops {

template <typename C, typename Shape>
class TeamReductions : public TeamPacks<C, Shape> {
  using Packs = TeamPacks<C, Shape>;
#ifdef __CUDACC__
  using Packs::elements_of;
  using Packs::over_parts;
  using Packs::over_warp;
#endif

 public:
  using Packs::Packs;
#ifdef __CUDACC__
  using Packs::mask;
  using Packs::over_lanes;
#endif

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
      if (elements == 0) lane.pivot = this->read(x, i, j).of[0];
      elements += kWidthAt<Shape, decltype(i)>;
    });
    if constexpr (kFromMeans) {
      C rest = 0;
      for_packs(length, [&](auto i, Index j) {
        const auto values = this->read(x, i, j);
        for (const C v : values.of) rest += v - lane.pivot;
      });
      lane.pivot += elements > 0 ? rest / C(elements) : C(0);
    }
    Results<Sums> results{Sums()};
    const auto of_element = [pivot = lane.pivot](C v, auto... of_g) {
      const C u = v - pivot;
      Sums sums;
      sums.of[0] = u * u, sums.of[1] = u;
      ((sums.of[2] = u * of_g, sums.of[3] = of_g), ...);
      return sums;
    };
    for_packs(length, [&](auto i, Index j) {
      results.template accumulate<kWidthAt<Shape, decltype(i)>>(0, of_element, j, this->read(x, i, j),
                                                                this->read(g, i, j)...);
    });
    lane.sums = results.folded(0);
    return over_parts(lane, {}, [&](auto part, int parts, int first, int lanes) {
      constexpr C kShare = C(1) / (Shape::kHeld * N);  // of an element in the mean, if the lanes keep all that they can
      const C mean = part.pivot + part.sums.of[1] * (lanes == 1 ? kShare : lanes == 32 ? kShare / 32 : C(0));
      const C count = C(this->elements_of(length, first, lanes));
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

 protected:
  using Packs::at;
  using Packs::element;
  using Packs::for_packs;
  using Packs::length_of;
  using Packs::N;
  using Packs::read;
  using typename Packs::Index;

 private:
  template <typename R, typename Combine, typename F, typename First, typename... In>
  MSOPS_BOTH R combined(R identity, const Combine& combine, const F& f, const First& first, const In&... in) const {
    static_assert(std::is_trivially_copyable<R>::value && sizeof(R) <= sizeof(SharedOfWarp),
                  "reduce: what is reduced must be a number, or a struct of up to 32 bytes that memcpy may copy");
    const int64_t length = length_of(first);
#ifdef __CUDA_ARCH__
    Results<R> results(identity);
    for_packs(length, [&](auto i, Index j) {
      results.template accumulate<kWidthAt<Shape, decltype(i)>>(combine, f, j, this->read(first, i, j),
                                                                this->read(in, i, j)...);
    });
    return over_lanes(results.folded(combine), identity, combine);
#else
    constexpr int64_t kRun = 256 * N;  // elements; with more, a sum would lose digits
    R total = identity;
    int64_t j = 0;
    for (const int64_t whole = length / N * N; j < whole;) {
      Results<R> results(identity);
      for (const int64_t end = j + kRun < whole ? j + kRun : whole; j < end; j += N)
        results.template accumulate<N>(combine, f, j, this->read(first, 0, j), this->read(in, 0, j)...);
      total = combine(total, results.folded(combine));
    }
    // Structs take the elements after the last whole pack one by one. With several sums in vectors there, GCC rounded
    // products otherwise than in the packs, and layer_norm lost digits.
    if constexpr (std::is_floating_point<R>::value)
      if (0 < j && j < length) {
        Results<R> results(identity);
        const int64_t last = length - N;
        results.accumulate_rest(length - j, combine, f, last, this->read(first, 0, last), this->read(in, 0, last)...);
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
      MSOPS_UNROLL
      for (int half = N / 2; half > 0; half /= 2) {
        MSOPS_UNROLL
        for (int k = 0; k < half; ++k) of[k] = combine(of[k], of[k + half]);
      }
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
        MSOPS_UNROLL
        for (int half = kWide / 2; half > 0; half /= 2) {
          MSOPS_UNROLL
          for (int k = 0; k < half; ++k) of[s][k] += of[s][k + half];
        }
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
};

}  // namespace msops
