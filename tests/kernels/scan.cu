#include "common/scan.h"

using namespace msops;

namespace {

// h_t = a_t h_(t-1) + b_t over the middle axis of (batch, steps, features), where h0 is before the first.
template <typename T>
struct Recurrence {
  using C = Compute<T>;
  using State = LinearStep<C>;
  int64_t steps, features;
  const T *a, *b, *h0;
  T* h;

  MSOPS_BOTH int64_t at(int64_t row, int64_t t) const {
    return (row / features * steps + t) * features + row % features;
  }
  MSOPS_BOTH State read(int64_t row, int64_t t) const {
    const C factor = C(a[at(row, t)]), term = C(b[at(row, t)]);
    return t == 0 ? State{0, factor * C(h0[row]) + term} : State{factor, term};
  }
  MSOPS_BOTH void write(int64_t row, int64_t t, const State& prefix) const { assign(h[at(row, t)], prefix.b); }
};

template <typename T>
struct Cumulated {
  using State = SumStep<Compute<T>>;
  int64_t length;
  const T* x;
  T* y;

  MSOPS_BOTH State read(int64_t row, int64_t t) const { return {Compute<T>(x[row * length + t])}; }
  MSOPS_BOTH void write(int64_t row, int64_t t, const State& prefix) const { assign(y[row * length + t], prefix.sum); }
};

}  // namespace

MSOPS_ENTRY(LinearScan) {
  const Tensor a = call.tensor("a", 3), b = call.tensor("b", 3), h0 = call.tensor("h0", 2), h = call.tensor("h", 3);
  const Tensor scratch = call.scratch("scratch", 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t steps = a.dim(1), features = a.dim(2);
    Scan scan_of{a.dim(0) * features, steps, ScanOrder::kAcross};
    scan_of.parts = scratch.dim(0);
    scan(call, scan_of, Recurrence<T>{steps, features, a.as<T>(), b.as<T>(), h0.as<T>(), h.as<T>()}, scratch.data);
  });
}

MSOPS_ENTRY(CumulativeSum) {
  const Tensor x = call.tensor("x", 2), y = call.tensor("y", 2);
  const Tensor scratch = call.tensor("scratch", 2);
  const bool reverse = call.attribute("reverse", 0, 1), exclusive = call.attribute("exclusive", 0, 1);
  return call.run<float, double, int32_t, int64_t>([&](auto type) {
    using T = typename decltype(type)::type;
    const Scan scan_of{x.dim(0), x.dim(1), ScanOrder::kAlong, reverse, exclusive, scratch.dim(0)};
    scan(call, scan_of, Cumulated<T>{x.dim(1), x.as<T>(), y.as<T>()}, scratch.data);
  });
}
