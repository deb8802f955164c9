// Entries that are right, with sums in a loop, in pairs, and with a compensation. test_opcheck_faults.py tells what
// each computes.

#include <cmath>

#include "common/call.h"

namespace {

struct Loop {
  template <typename C, typename F>
  static C sum(int64_t n, F term) {
    C sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += term(j);
    return sum;
  }
};

struct Pairwise {
  template <typename C, typename F>
  static C sum(int64_t n, F term, int64_t first = 0) {
    if (n <= 2) return n == 0 ? C(0) : n == 1 ? term(first) : term(first) + term(first + 1);
    return sum<C>(n / 2, term, first) + sum<C>(n - n / 2, term, first + n / 2);
  }
};

struct Kahan {
  template <typename C, typename F>
  static C sum(int64_t n, F term) {
    C sum = 0, lost = 0;
    for (int64_t j = 0; j < n; ++j) {
      const C next = term(j) - lost, total = sum + next;
      lost = (total - sum) - next;
      sum = total;
    }
    return sum;
  }
};

template <typename C, typename T>
C largest(const T* x, int64_t n) {
  C most = C(x[0]);
  for (int64_t j = 1; j < n; ++j) most = C(x[j]) > most || C(x[j]) != C(x[j]) ? C(x[j]) : most;
  return most;
}

// An entry of x(N, C), and z(N, C) if it is `two`, and y(N), or y(N, C) if `same`; `...` computes y for the row x.
#define ENTRY(name, two, same, ...)                                                   \
  MSOPS_ENTRY(name) {                                                                 \
    const auto from = call.tensor("x", 2), beside = two ? call.tensor("z", 2) : from; \
    const auto to = call.tensor("y", same ? 2 : 1);                                   \
    call.require_same_shape(beside, from);                                            \
    if (same)                                                                         \
      call.require_same_shape(to, from);                                              \
    else                                                                              \
      call.require_shape(to, {from.dim(0)});                                          \
    const int64_t n = from.dim(1);                                                    \
    return call.run([&](auto type) {                                                  \
      using T = typename decltype(type)::type;                                        \
      using C = msops::Compute<T>;                                                    \
      for (int64_t i = 0; i < from.dim(0); ++i) {                                     \
        const T* x = from.as<T>() + i * n;                                            \
        [[maybe_unused]] const T* z = beside.as<T>() + i * n;                         \
        T* y = to.as<T>() + i * (same ? n : 1);                                       \
        __VA_ARGS__                                                                   \
      }                                                                               \
    });                                                                               \
  }

#define SUM(term) Sum::template sum<C>(n, [&](int64_t j) { return term; })

#define ENTRIES(Way)                                                                                                \
  ENTRY(Sum##Way, false, false, using Sum = Way; y[0] = T(SUM(C(x[j])));)                                           \
  ENTRY(Mean##Way, false, false, using Sum = Way; y[0] = T(SUM(C(x[j])) / C(n));)                                   \
  ENTRY(Dot##Way, true, false, using Sum = Way; y[0] = T(SUM(C(x[j]) * C(z[j])));)                                  \
  ENTRY(Norm##Way, false, false, using Sum = Way; y[0] = T(std::sqrt(SUM(C(x[j]) * C(x[j]))));)                     \
  ENTRY(Norm1##Way, false, false, using Sum = Way; y[0] = T(SUM(std::abs(C(x[j]))));)                               \
  ENTRY(Variance##Way, false, false, using Sum = Way; const C mean = SUM(C(x[j])) / C(n);                           \
        y[0] = T(SUM((C(x[j]) - mean) * (C(x[j]) - mean)) / C(n));)                                                 \
  ENTRY(LogSumExp##Way, false, false, using Sum = Way; const C most = n ? largest<C>(x, n) : C(0);                  \
        y[0] = T(most + std::log(SUM(std::exp(C(x[j]) - most))));)                                                  \
  ENTRY(Softmax##Way, false, true, using Sum = Way; const C most = n ? largest<C>(x, n) : C(0);                     \
        const C sum = SUM(std::exp(C(x[j]) - most));                                                                \
        for (int64_t j = 0; j < n; ++j) y[j] = T(std::exp(C(x[j]) - most) / sum);)                                  \
  ENTRY(Rms##Way, false, true, using Sum = Way; const C r = 1 / std::sqrt(SUM(C(x[j]) * C(x[j])) / C(n) + C(1e-6)); \
        for (int64_t j = 0; j < n; ++j) y[j] = T(C(x[j]) * r);)                                                     \
  ENTRY(LayerNorm##Way, false, true, using Sum = Way; const C mean = SUM(C(x[j])) / C(n);                           \
        const C variance = SUM((C(x[j]) - mean) * (C(x[j]) - mean)) / C(n);                                         \
        const C r = 1 / std::sqrt(variance + C(1e-5));                                                              \
        for (int64_t j = 0; j < n; ++j) y[j] = T((C(x[j]) - mean) * r);)

}  // namespace

ENTRIES(Loop)
ENTRIES(Pairwise)
ENTRIES(Kahan)
