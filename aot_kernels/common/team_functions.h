// Functions of elements, called for the packs that a lane of a Team has (see team.h).
#pragma once

#include "functions.h"
#include "pack.h"
#include "team_rows.h"

namespace msops {

template <typename C, typename Shape>
class TeamFunctions {
 protected:
  static constexpr int N = Shape::kWidth;
  using Index = std::conditional_t<(Shape::kHeld > 0), int, int64_t>;  // rows that are held are short

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
    store_at_once(out.data + j, pack_of<T, kWidthAt<Shape, I>>(f, j, values...));
#else
    T* to = out.data + j;
    if constexpr (std::is_same<T, C>::value) {
#pragma omp simd
      for (int k = 0; k < N; ++k) to[k] = at(f, j + k, values.of[k]...);
    } else {
      C results[N];
      compute_pack(results, f, j, values...);
      narrow(results, to, N);
    }
#endif
  }

#ifndef __CUDA_ARCH__
  // write_rest and add_rest take the last `rest` of N values. So the elements after the last whole pack are computed
  // with those before them, which vectorizes.
  template <typename T, typename F, typename... V>
  static MSOPS_CPU void write_rest(const Row<T>& out, const F& f, int64_t rest, const V&... values) {
    T* to = out.data + out.length - N;
    const int kept = N - static_cast<int>(rest);
    C results[N];
    widen(to, results, N);
#pragma omp simd
    for (int k = 0; k < N; ++k) results[k] = k < kept ? results[k] : C(at(f, out.length - N + k, values.of[k]...));
    narrow(results, to, N);
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

 private:
  // Column converts to int64_t and to nothing else, so that a function of one more element does not pass for one of a
  // column.
  struct Column {
    template <typename Index, typename = std::enable_if_t<std::is_same<Index, int64_t>::value>>
    MSOPS_BOTH operator Index() const;
  };
};

}  // namespace msops
