// out[i] = formula(in[i]...), a formula written once for both devices.
#pragma once

#include <utility>

#include "pack.h"
#include "parallel.h"

namespace msops {

// Index i of the loop is the i-th run of N elements; the last run may be shorter.
template <int N, int kInputs, typename T, typename Formula>
struct Elementwise {
  int64_t n;
  Formula formula;
  T* out;
  const T* in[kInputs];

  template <typename Index>
  MSOPS_BOTH void operator()(Index run) const {
    apply(run * N, std::make_index_sequence<kInputs>{});
  }

 private:
  template <typename Index, size_t... k>
  MSOPS_BOTH void apply(Index begin, std::index_sequence<k...>) const {
    const Index length = n - begin < N ? static_cast<Index>(n - begin) : N;
    if (N <= kPackWidth<T> && length == N) {
      const Pack<T, N> operands[] = {load<N>(in[k] + begin)...};
      Pack<T, N> result;
      for (int j = 0; j < N; ++j) result.values[j] = T(formula(Compute<T>(operands[k].values[j])...));
      store<N>(out + begin, result);
    } else {
#pragma omp simd
      for (Index j = 0; j < length; ++j) out[begin + j] = T(formula(Compute<T>(in[k][begin + j])...));
    }
  }
};

// `formula` is an object called with one Compute<T> for each input; `in` are pointers to n elements each.
template <typename T, typename Formula, typename... In>
void elementwise(Call& call, int64_t n, Formula formula, T* out, const In*... in) {
  constexpr int kInputs = sizeof...(In);
  if (call.on_cpu()) {
    constexpr int kRun = 1024;
    parallel_for(call, (n + kRun - 1) / kRun, n, Elementwise<kRun, kInputs, T, Formula>{n, formula, out, {in...}},
                 kRun);
    return;
  }
  with_width<T>(false, 0, {out, in...}, [&](auto width) {
    constexpr int N = decltype(width)::value;
    parallel_for(call, (n + N - 1) / N, n, Elementwise<N, kInputs, T, Formula>{n, formula, out, {in...}});
  });
}

}  // namespace msops
