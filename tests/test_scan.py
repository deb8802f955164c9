"""Tests scan.h: prefix scans along rows, of numbers and of pairs."""

import mindspore
import numpy as np
import pytest

import msops
from msops import custom_op
from operator_test import DTYPES, PLAIN, Net, run

SOURCE = """
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
  MSOPS_BOTH void write(int64_t row, int64_t t, const State& prefix) const {
    assign(y[row * length + t], prefix.sum);
  }
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
"""


@pytest.fixture(scope="module")
def library():
    return msops.load("scan_test", SOURCE, cxx_flags=PLAIN)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 2), (2, 17), (5, 128), (2, 129), (1, 10_000), (300, 33)])
def test_cumulative_sum(library, rows, length, parts, reverse, exclusive):
    x = np.random.default_rng(length).integers(-1000, 1000, (rows, length)).astype("int32")
    signature = f"x(N, C) -> y(N, C), scratch({parts}, N)"
    settings = {"reverse": reverse, "exclusive": exclusive, "dtypes": (mindspore.int32,)}
    y = run(Net(custom_op(library.CumulativeSum, signature, **settings)), x)[0]
    from_start = x[:, ::-1] if reverse else x
    expected = from_start.cumsum(1) - (from_start if exclusive else 0)
    np.testing.assert_array_equal(y, expected[:, ::-1] if reverse else expected)


def test_cumulative_sum_of_nothing(library):
    op = custom_op(library.CumulativeSum, "x(N, C) -> y(N, C), scratch(1, N)", reverse=False, exclusive=False)
    assert run(Net(op), np.zeros((0, 4), "float32"))[0].shape == (0, 4)
    assert run(Net(op), np.zeros((4, 0), "float32"))[0].shape == (4, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 100, 64), (1, 1000, 65), (2, 4000, 130)])
def test_pairs(mode, library, shape, parts, dtype):
    """A scan of pairs gives the recurrence that NumPy computes step by step."""
    batch, steps, features = shape
    rng = np.random.default_rng(steps)
    a, b = rng.uniform(-1, 1, shape).astype(dtype), rng.standard_normal(shape).astype(dtype)
    h0 = rng.standard_normal((batch, features)).astype(dtype)
    signature = f"a(B, L, D), b(B, L, D), h0(B, D) -> h(B, L, D), scratch({parts}, 2 * B * D, dtype=accumulator)"
    h = run(Net(custom_op(library.LinearScan, signature)), a, b, h0)[0]
    expected, state = np.empty(shape), h0.astype("float64")
    bound, size = np.empty(shape), np.abs(state)  # the recurrence of absolute values, to which errors are proportional
    for t in range(steps):
        state = a[:, t] * state + b[:, t]
        size = np.abs(a[:, t]) * size + np.abs(b[:, t])
        expected[:, t], bound[:, t] = state, size
    unit = np.finfo(np.promote_types(dtype, "float32")).eps
    assert (np.abs(h - expected) <= 8 * unit * bound + np.finfo(dtype).eps * np.abs(expected)).all()
