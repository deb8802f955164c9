// out[i] = formula(in[i]...), a formula written once for both devices.
#pragma once

#include <utility>

#include "pack.h"
#include "parallel.h"

namespace msops {

template <int kInputs, typename T, typename Formula>
struct Map {
  int64_t n;
  Formula formula;
  T* out;
  const T* in[kInputs];

  template <typename Index, size_t... k>
  MSOPS_BOTH void element(Index i, std::index_sequence<k...>) const {
    out[i] = T(formula(Compute<T>(in[k][i])...));
  }

  template <int N, size_t... k>
  MSOPS_BOTH Pack<T, N> pack(const Pack<T, N> (&operands)[kInputs], std::index_sequence<k...>) const {
    Pack<T, N> result;
    for (int j = 0; j < N; ++j) result.values[j] = T(formula(Compute<T>(operands[k].values[j])...));
    return result;
  }
};

// On the CPU, index i is a run of kRun elements.
template <int kRun, int kInputs, typename T, typename Formula>
struct MapRun {
  Map<kInputs, T, Formula> map;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t begin = i * kRun, end = map.n - begin < kRun ? map.n : begin + kRun;
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) map.element(j, std::make_index_sequence<kInputs>{});
  }
};

// On the GPU, index i is a pack of N elements; the elements behind the last whole pack are the last index. More packs
// in flight in a thread gained nothing on an H200: its multiprocessors hold 2048 such threads.
template <int N, int kInputs, typename T, typename Formula>
struct MapPack {
  Map<kInputs, T, Formula> map;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    constexpr auto kAll = std::make_index_sequence<kInputs>{};
    const Index begin = i * N;
    if (static_cast<int64_t>(begin) + N <= map.n) {
      Pack<T, N> operands[kInputs];
      for (int k = 0; k < kInputs; ++k) operands[k] = load<N>(map.in[k] + begin);
      store(map.out + begin, map.pack(operands, kAll));
    } else {
      for (Index j = begin; j < map.n; ++j) map.element(j, kAll);
    }
  }
};

// `formula` is an object called with one Compute<T> for each input; `in` are pointers to n elements each.
template <typename T, typename Formula, typename... In>
void elementwise(Call& call, int64_t n, Formula formula, T* out, const In*... in) {
  constexpr int kInputs = sizeof...(In);
  const Map<kInputs, T, Formula> map{n, formula, out, {in...}};
  if (call.on_cpu()) {
    constexpr int kRun = 1024;
    return on_cpu(call, (n + kRun - 1) / kRun, MapRun<kRun, kInputs, T, Formula>{map}, kRun);
  }
  with_width<T>(false, 0, {out, in...}, [&](auto width) {
    constexpr int N = decltype(width)::value;
    on_gpu(call, (n + N - 1) / N, n, MapPack<N, kInputs, T, Formula>{map});
  });
}

}  // namespace msops
