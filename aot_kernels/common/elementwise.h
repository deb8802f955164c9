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
  MSOPS_BOTH void operator()(Index j) const {
    C x[kInputs], y[kOutputs];
    MSOPS_UNROLL
    for (int i = 0; i < kInputs; ++i) x[i] = C(in[i][j]);
    apply_formula(formula, x, y);
    MSOPS_UNROLL
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

// Computes n neighbouring elements on the CPU, kRun at most, from pointers that begin there. All types of 16 bits share
// the loop of float, if they have one formula.
template <int kRun, int kInputs, int kOutputs, typename T, typename Formula>
MSOPS_CPU void map_run(const Map<kInputs, kOutputs, T, Formula>& map, int64_t n) {
  using C = Compute<T>;
  if constexpr (std::is_same<T, C>::value) {
    for_elements<C>(n, map);
  } else {
    C in[kInputs][kRun], out[kOutputs][kRun];
    Map<kInputs, kOutputs, C, Formula> wide{n, map.formula, {}, {}};
    for (int i = 0; i < kInputs; ++i) widen(map.in[i], in[i], n), wide.in[i] = in[i];
    for (int o = 0; o < kOutputs; ++o) wide.out[o] = out[o];
    for_elements<C>(n, wide);
    for (int o = 0; o < kOutputs; ++o) narrow(out[o], map.out[o], n);
  }
}

// Index i is a run of kRun elements.
template <int kRun, typename Map>
struct MapRun {
  Map map;

  MSOPS_CPU void operator()(int64_t i) const {
    Map run = map;
    for (auto& from : run.in) from += i * kRun;
    for (auto& to : run.out) to += i * kRun;
    map_run<kRun>(run, std::min<int64_t>(kRun, map.n - i * kRun));
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
      for (Index j = begin; j < map.n; ++j) map(j);
    }
  }
};

template <typename T, int kInputs, int kOutputs, typename Formula>
Map<kInputs, kOutputs, T, Formula> map_of(int64_t n, Formula formula, const T* const (&in)[kInputs],
                                          T* const (&out)[kOutputs]) {
  Map<kInputs, kOutputs, T, Formula> map{n, formula, {}, {}};
  std::copy(in, in + kInputs, map.in);
  std::copy(out, out + kOutputs, map.out);
  return map;
}
template <typename T, int kInputs, int kOutputs, typename Formula>
void elementwise_on_cpu(Call& call, int64_t n, Formula formula, const T* const (&in)[kInputs],
                        T* const (&out)[kOutputs]) {
  constexpr int kRun = 1024;
  const auto map = map_of(n, formula, in, out);
  on_cpu(call, (n + kRun - 1) / kRun, MapRun<kRun, std::decay_t<decltype(map)>>{map}, kRun);
}
template <typename T, int kInputs, int kOutputs, typename Formula>
void elementwise_on_gpu(Call& call, int64_t n, Formula formula, const T* const (&in)[kInputs],
                        T* const (&out)[kOutputs]) {
  call.require(kOnGpu<T>, kBadDtype, "there is no GPU code for %s", dtype_name<T>());
  if constexpr (kOnGpu<T>) {
    using M = Map<kInputs, kOutputs, T, Formula>;
    const M map = map_of(n, formula, in, out);
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

// elementwise<T>(call, n, formula, {x, y}, {out}) applies a formula on the device of the call.
template <typename T, int kInputs, int kOutputs, typename Formula>
void elementwise(Call& call, int64_t n, Formula formula, const T* const (&in)[kInputs], T* const (&out)[kOutputs]) {
  call.is_on_cpu() ? elementwise_on_cpu<T>(call, n, formula, in, out)
                   : elementwise_on_gpu<T>(call, n, formula, in, out);
}

}  // namespace msops
