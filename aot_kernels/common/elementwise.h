// elementwise() applies a formula to each element. The formula is written once for both devices.
#pragma once

#include <utility>

#include "functions.h"
#include "pack.h"
#include "parallel.h"

namespace msops {

// Calls formula(in..., out...) with a Compute<T> of each input and a reference to one for each output.
template <typename Formula, typename C, size_t... i, size_t... o>
MSOPS_BOTH void apply_formula(const Formula& formula, const C* x, C* y, std::index_sequence<i...>,
                              std::index_sequence<o...>) {
  formula(x[i]..., y[o]...);
}
template <typename Formula, typename C, size_t kInputs, size_t kOutputs>
MSOPS_BOTH void apply_formula(const Formula& formula, const C (&x)[kInputs], C (&y)[kOutputs]) {
  apply_formula(formula, x, y, std::make_index_sequence<kInputs>{}, std::make_index_sequence<kOutputs>{});
}

template <int kInputs, int kOutputs, typename T, typename Formula>
struct Map {
  using C = Compute<T>;
  int64_t n;
  Formula formula;
  const T* in[kInputs];
  T* out[kOutputs];

  template <typename Index>
  MSOPS_BOTH void element(Index j) const {
    C x[kInputs], y[kOutputs];
    for (int i = 0; i < kInputs; ++i) x[i] = C(in[i][j]);
    apply_formula(formula, x, y);
    for (int o = 0; o < kOutputs; ++o) assign(out[o][j], y[o]);
  }

  template <int N, typename Index>
  MSOPS_BOTH void pack(Index begin) const {
    Pack<T, N> from[kInputs], to[kOutputs];
    for (int i = 0; i < kInputs; ++i) from[i] = load<N>(in[i] + begin);
    for (int j = 0; j < N; ++j) {
      C x[kInputs], y[kOutputs];
      for (int i = 0; i < kInputs; ++i) x[i] = C(from[i].values[j]);
      apply_formula(formula, x, y);
      for (int o = 0; o < kOutputs; ++o) to[o].values[j] = T(y[o]);
    }
    for (int o = 0; o < kOutputs; ++o) store(out[o] + begin, to[o]);
  }
};

// On the CPU, index i is a run of kRun elements.
template <int kRun, typename Map>
struct MapRun {
  static constexpr bool kTakesAvx512 = true;
  Map map;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t begin = i * kRun, end = map.n - begin < kRun ? map.n : begin + kRun;
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) map.element(j);
  }
};

// On the GPU, index i is a pack of N elements; the elements after the last whole pack are the last index. More packs
// in flight in a thread gained nothing on an H200: its multiprocessors hold 2048 such threads.
template <int N, typename Map>
struct MapPack {
  Map map;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    const Index begin = i * N;
    if (static_cast<int64_t>(begin) + N <= map.n) {
      map.template pack<N>(begin);
    } else {
      for (Index j = begin; j < map.n; ++j) map.element(j);
    }
  }
};

// elementwise<T>(call, n, formula, {x, y}, {out}) applies the formula to arrays of n elements each.
template <typename T, int kInputs, int kOutputs, typename Formula>
void elementwise(Call& call, int64_t n, Formula formula, const T* const (&in)[kInputs], T* const (&out)[kOutputs]) {
  using M = Map<kInputs, kOutputs, T, Formula>;
  M map{n, formula, {}, {}};
  for (int i = 0; i < kInputs; ++i) map.in[i] = in[i];
  for (int o = 0; o < kOutputs; ++o) map.out[o] = out[o];
  if (call.is_on_cpu()) {
    constexpr int kRun = 1024;
    return on_cpu(call, (n + kRun - 1) / kRun, MapRun<kRun, M>{map}, kRun);
  }
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if constexpr (kOnGpu<T>) {
    uintptr_t all = 0;  // all addresses' bits: as aligned as the least aligned
    for (const T* p : in) all |= reinterpret_cast<uintptr_t>(p);
    for (const T* p : out) all |= reinterpret_cast<uintptr_t>(p);
    with_width<T>(false, 0, {reinterpret_cast<const T*>(all)}, [&](auto width) {
      constexpr int N = width;
      in_runs((n + N - 1) / N, N, [&](int64_t first, int64_t packs) {
        M run = map;
        run.n = std::min(n - first * N, packs * N);
        for (const T*& from : run.in) from += first * N;
        for (T*& to : run.out) to += first * N;
        on_gpu_with<uint32_t>(call, packs, MapPack<N, M>{run});
      });
    });
  }
}

}  // namespace msops
