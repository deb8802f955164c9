"""Tests rows.h and statistics.h: rows that are loaded once, and statistics of more than one number."""

import numpy as np
import pytest

from msops import custom_op
from operator_test import DTYPES, Net, load_kernels, run

# for_rows takes other teams at certain numbers of packs: these are lengths around each, with whole packs and without.
COLUMNS = (1, 2, 15, 16, 17, 33, 64, 127, 256, 1000, 1024, 1029, 4097, 8192, 16_385, 50_257, 1 << 18)


@pytest.fixture(scope="module")
def library():
    return load_kernels("rows")


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
