"""Tests rows.h and statistics.h: rows that are loaded once, and statistics of more than one number."""

import numpy as np
import pytest

import msops
from msops import custom_op
from operator_test import DTYPES, PLAIN, Net, run

SOURCE = """
#include "common/rows_sums.h"

using namespace msops;

namespace {

template <typename T>
struct Softmax {
  using C = Compute<T>;
  Rows<const T> x;
  Rows<T> y;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const C most = team.max(x_row);
    const C sum = team.sum([&](C v) { return exp(v - most); }, x_row);
    team.map([&](C v) { return exp(v - most) / sum; }, y[row], x_row);
  }
};

// dx = y (dy - sum of y dy), with two rows of which one is loaded, weighted by the column's weight.
template <typename T>
struct SoftmaxBackward {
  using C = Compute<T>;
  Rows<const T> y, dy;
  Rows<T> dx;
  const T* weight;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto y_row = team.load(y[row]);
    const auto gradient = [&](int64_t j, C d) { return d * C(weight[j]); };
    const C sum = team.sum([&](int64_t j, C v, C d) { return v * gradient(j, d); }, y_row, dy[row]);
    team.map([&](int64_t j, C v, C d) { return v * (gradient(j, d) - sum); }, dx[row], y_row, dy[row]);
  }
};

template <typename T>
struct Statistics {
  using C = Compute<T>;
  Rows<const T> x;
  int64_t* column;
  T *most, *log_sum, *mean, *variance;

  template <typename Team>
  MSOPS_BOTH void operator()(int64_t row, const Team& team) const {
    const auto x_row = team.load(x[row]);
    const auto found = team.reduce(ArgMax<C>(), x_row);
    const auto exponentials = team.reduce(MaxSum<C>(), x_row);
    const auto moments = team.reduce(Moments<C>(), x_row);
    team.store(column + row, found.column);
    team.store(most + row, found.value);
    team.store(log_sum + row, exponentials.max + log(exponentials.sum));
    team.store(mean + row, moments.mean);
    team.store(variance + row, moments.variance());
  }
};

// dx = dy x / sum of x x, dweight_j = sum over rows of x_j dy_j, dbias_j = sum over rows of j dy_j.
template <typename T>
struct RowsWithSums {
  using C = Compute<T>;
  static constexpr int kRows = 2;
  Rows<const T> x, dy;
  Rows<T> dx;

  template <typename Team>
  MSOPS_BOTH auto load(int64_t row, Team&& team) const {
    const auto x_row = team.load(x[row]), dy_row = team.load(dy[row]);
    return loaded(x_row, dy_row);
  }
  template <typename Team, typename Held, typename Sums>
  MSOPS_BOTH void operator()(int64_t row, const Team& team, const Held& held, Sums& sums) const {
    const auto x_row = team.compute(std::get<0>(held));
    const auto& dy_row = std::get<1>(held);
    const auto product = team.compute([](C x, C dy) { return x * dy; }, x_row, dy_row);
    const auto both = team.sum([](C x, C p) { return TwoSums<C>{x * x, p}; }, x_row, product);
    team.map([&](C p) { return p / both.of[0]; }, dx[row], product);
    sums.template add<0>([](C p) { return p; }, product);
    sums.template add<1>([](int64_t j, C dy) { return C(j) * dy; }, dy_row);
  }
};

}  // namespace

MSOPS_ENTRY(SumsOfRows) {
  const Tensor x = call.tensor("x"), dy = call.tensor("dy"), dx = call.tensor("dx");
  const Tensor dweight = call.tensor("dweight"), dbias = call.tensor("dbias");
  const Tensor first = call.scratch("first", 2), second = call.scratch("second", 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const int64_t columns = x.dim(1);
    const int64_t used = for_rows_with_sums<T, 2>(call, x.dim(0), {x, dy, dx}, RowsWithSums<T>{x, dy, dx},
                                                  {first.as<C>(), second.as<C>()}, first.dim(0));
    sum_rows(call, used, columns, columns, first.as<C>(), dweight.as<T>());
    sum_rows(call, used, columns, columns, second.as<C>(), dbias.as<T>());
  });
}

MSOPS_SCRATCH(SumsOfRows) {
  const Tensor x = call.tensor("x", 2);
  const int64_t parts = row_parts(x.dim(0), x.dim(1));
  return {{parts, x.dim(1)}, {parts, x.dim(1)}};
}

MSOPS_ENTRY(SoftmaxForward) {
  const Tensor x = call.tensor("x"), y = call.tensor("y");
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, x.size / x.dim(-1), {x, y}, Softmax<T>{x, y});
  });
}

MSOPS_ENTRY(SoftmaxBackwardWeighted) {
  const Tensor y = call.tensor("y", 2), dy = call.tensor("dy", 2), weight = call.tensor("weight", 1);
  const Tensor dx = call.tensor("dx", 2);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    for_rows<T>(call, y.dim(0), {y, dy, dx}, SoftmaxBackward<T>{y, dy, dx, weight.as<T>()});
  });
}

MSOPS_ENTRY(StatisticsForward) {
  const Tensor x = call.tensor("x", 2), column = call.tensor_of("int64", "column", 1), most = call.tensor("most", 1);
  const Tensor log_sum = call.tensor("log_sum", 1), mean = call.tensor("mean", 1);
  const Tensor variance = call.tensor("variance", 1);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const Statistics<T> body{x, column.as<int64_t>(), most.as<T>(), log_sum.as<T>(), mean.as<T>(), variance.as<T>()};
    for_rows<T>(call, x.dim(0), {x}, body);
  });
}
"""
# for_rows takes other teams at certain numbers of packs: these are lengths around each, with whole packs and without.
COLUMNS = (1, 2, 15, 16, 17, 33, 64, 127, 256, 1000, 1024, 1029, 4097, 8192, 16_385, 50_257, 1 << 18)


@pytest.fixture(scope="module")
def library():
    return msops.load("rows_test", SOURCE, cxx_flags=PLAIN)


@pytest.fixture(scope="module")
def statistics(library):
    outputs = "column(N, dtype=int64), most(N), log_sum(N), mean(N), variance(N)"
    return Net(custom_op(library.StatisticsForward, f"x(N, C) -> {outputs}"))


def softmax(x):
    powers = np.exp(x.astype("float64") - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def tolerance(dtype):
    return 8 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_loaded_row(library, columns, dtype):
    x = np.random.default_rng(columns).normal(0, 3, (3, columns)).astype(dtype)
    (y,) = run(Net(custom_op(library.SoftmaxForward, "x -> y")), x)
    rtol = tolerance(dtype) + np.finfo(dtype).eps * np.ptp(x)  # x - max is rounded before the exponential
    np.testing.assert_allclose(y, softmax(x), rtol=rtol, atol=np.finfo(dtype).smallest_subnormal)


def test_many_rows_and_modes(mode, library):
    x = np.random.default_rng(0).normal(0, 3, (9000, 5)).astype("float32")
    (y,) = run(Net(custom_op(library.SoftmaxForward, "x -> y")), x)
    np.testing.assert_allclose(y, softmax(x), rtol=4 * tolerance("float32"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_loaded_row_beside_another(library, columns, dtype):
    rng = np.random.default_rng(columns)
    y, dy = softmax(rng.normal(0, 3, (2, columns))).astype(dtype), rng.standard_normal((2, columns)).astype(dtype)
    weight = rng.standard_normal(columns).astype(dtype)
    op = custom_op(library.SoftmaxBackwardWeighted, "y(N, C), dy(N, C), weight(C) -> dx(N, C)")
    (dx,) = run(Net(op), y, dy, weight)
    gradient = dy * weight.astype("float64")
    terms = y * gradient
    expected = y * (gradient - terms.sum(1, keepdims=True))
    unit = np.finfo(np.promote_types(dtype, "float32")).eps
    size = np.abs(terms) + y.astype("float64") * np.abs(terms).sum(1, keepdims=True)
    assert (np.abs(dx - expected) <= 8 * unit * size + np.finfo(dtype).eps * np.abs(expected) + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_statistics(statistics, columns, dtype):
    x = np.random.default_rng(columns).integers(-50, 50, (3, columns)).astype(dtype)  # has equal numbers
    column, most, log_sum, mean, variance = run(statistics, x)
    exact = x.astype("float64")
    np.testing.assert_array_equal(column, x.argmax(1))
    np.testing.assert_array_equal(most, x.max(1))
    np.testing.assert_allclose(log_sum, np.log(np.exp(exact).sum(1)), rtol=tolerance(dtype))
    np.testing.assert_allclose(mean, exact.mean(1), rtol=tolerance(dtype), atol=tolerance(dtype))
    np.testing.assert_allclose(variance, exact.var(1), rtol=tolerance(dtype), atol=tolerance(dtype))


def test_statistics_of_numbers_that_are_not_finite(statistics):
    inf, nan = np.inf, np.nan
    x = np.array([[1, inf, inf, 0], [-inf] * 4, [1, nan, 2, nan], [-inf, 5, -inf, 5]], "float32")
    column, most, log_sum, mean, _ = run(statistics, x)
    assert column.tolist() == [1, 0, 1, 1]
    np.testing.assert_array_equal(most, [inf, -inf, nan, 5])
    np.testing.assert_allclose(log_sum, [inf, -inf, nan, 5 + np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(np.isfinite(mean), [False] * 4)


def test_statistics_of_no_columns(statistics):
    column, most, log_sum, mean, variance = run(statistics, np.zeros((2, 0), "float32"))
    assert column.tolist() == [np.iinfo("int64").max] * 2
    np.testing.assert_array_equal(most, [-np.inf] * 2)
    np.testing.assert_array_equal(log_sum, [-np.inf] * 2)
    assert not mean.any()
    assert np.isnan(variance).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("columns", COLUMNS)
def test_sums_of_columns(library, columns, rows, dtype):
    if rows > 3 and columns > 9000:
        pytest.skip("a few rows of this length are enough")
    rng = np.random.default_rng(columns)
    x, dy = rng.standard_normal((2, rows, columns)).astype(dtype)
    line = "x(N, C), dy(N, C) -> dx(N, C), dweight(C), dbias(C); first, second"
    dx, dweight, dbias = run(Net(custom_op(library.SumsOfRows, line)), x, dy)
    product = x.astype("float64") * dy
    np.testing.assert_allclose(
        dx, product / (x.astype("float64") ** 2).sum(1, keepdims=True), rtol=tolerance(dtype), atol=1e-7
    )
    j = np.arange(columns)
    for sums, terms in (dweight, product), (dbias, j * dy.astype("float64")):
        with np.errstate(over="ignore"):  # to float16
            want = terms.sum(0).astype(dtype)
        np.testing.assert_allclose(
            sums, want, rtol=tolerance(dtype), atol=tolerance(dtype) * np.abs(terms).sum(0).max(initial=0)
        )
