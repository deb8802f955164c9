"""Tests scan.h: prefix scans along rows, of numbers and of pairs."""

import mindspore
import numpy as np
import pytest

from msops import custom_op
from operator_test import DTYPES, Net, load_kernels, run


@pytest.fixture(scope="module")
def library():
    return load_kernels("scan")


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
