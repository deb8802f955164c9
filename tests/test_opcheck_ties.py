"""Tests that opcheck accepts each right gradient where values tie, and draws values that do not tie for other sizes."""

from pathlib import Path

import mindspore
import numpy as np
import pytest

import msops
from card import random
from msops.testing import OpCheckError, derived, opcheck
from msops.testing.derived import drawn, odd_inputs
from operator_test import PLAIN

RNG = np.random.default_rng(0)
TIES = [np.array([[3.0, 1.0, 3.0, 2.0, 0.5, -1.5, 0.5], [1.25, 4.0, 4.0, 4.0, -2.0, 0.75, 0.25]])]


@pytest.fixture(scope="module")
def library():
    return msops.load("opcheck_ties", Path(__file__).with_name("opcheck") / "ties.cu", cxx_flags=PLAIN)


@pytest.fixture(autouse=True)
def less_large(monkeypatch):
    monkeypatch.setattr(derived, "LARGE", 2**14)


def windows_fit(x, width, stride):
    n, length = x.shape
    if length < width:
        raise ValueError(f"x must have at least {width} steps, got {length}")
    return x._replace(shape=(n, (length - width) // stride + 1))


def max_pool(library, backward="MaxPoolBackward", dtypes=(mindspore.float64,), infer=windows_fit):
    windows = dict(width=3, stride=1)
    steps = "(L - width) // stride + 1"
    gradient = msops.custom_op(getattr(library, backward), f"x(N, L), dy(N, {steps}) -> dx(N, L)", **windows)
    signature = "x(N, L) -> y" if infer else f"x(N, L) -> y(N, {steps})"
    return msops.custom_op(
        library.MaxPool, signature, gradient=gradient, name="max_pool", infer=infer, dtypes=dtypes, **windows
    )


def pooled(x):
    return np.lib.stride_tricks.sliding_window_view(x, 3, 1).max(2)


@pytest.mark.parametrize("dtype", [pytest.param(mindspore.float32, marks=pytest.mark.wide), mindspore.float64], ids=str)
def test_overlapping_windows(library, dtype):
    """Each window chooses one of equal steps, whatever the sign of its incoming gradient; the gradient of one step is
    in no order with the differences of the sum over all windows."""
    assert "gradient" in opcheck(max_pool(library, dtypes=(dtype,)), TIES, pooled).made


def test_wrong_at_ties(library):
    """The finding names the step that is equal."""
    with pytest.raises(OpCheckError, match=r"x\[1, 1\] equals x\[1, 2\]: a tie") as caught:
        opcheck(max_pool(library, "MaxPoolTwiceAtTies"), TIES, pooled)
    assert set(caught.value.report.failures) == {"gradient"}  # no other sizes tie
    assert "graph, float64: gradient of x[1, 1]: finite differences give " in str(caught.value)


def test_cumulative_maximum(library):
    """The later of equal ones may get the gradient, and idx is of int32 beside any common dtype."""
    backward = msops.custom_op(library.CumMaxBackward, "idx(N, L, dtype=int32), dy(N, L) -> dx(N, L)")
    cummax = msops.custom_op(
        library.CumMax, "x(N, L) -> y(N, L), idx(N, L, dtype=int32)", gradient=backward, dtypes=(mindspore.float64,)
    )

    def reference(x):
        y = np.maximum.accumulate(x, 1)
        equal = np.where(x == y, np.arange(x.shape[1]), 0)
        return y, np.maximum.accumulate(equal, 1) if x.size else equal

    assert "gradient" in opcheck(cummax, TIES, reference).made


def test_drawn_values():
    """New values do not tie, and lie in the range of the given ones, but where these do tie, they are drawn."""
    given = np.array([-2.0, -1.0, 0.5, 3.0, 0.75])
    values = drawn(given, (30, 31), RNG)
    assert len(np.unique(values)) == values.size
    assert -2 <= values.min() < -1.9
    assert 2.5 < values.max() <= 3
    assert not ((values > -1) & (values < 0.5)).any()  # 1 / x would be large there
    mask = np.array([0.0, 1.0, 1.0, 0.0])
    assert set(drawn(mask, (5, 5), RNG).flat) == {0.0, 1.0}
    assert set(drawn(np.array([-np.inf, 1.0, 2.0]), (5, 5), RNG).flat) == {-np.inf, 1.0, 2.0}
    assert set(drawn(np.arange(3), (5, 5), RNG).flat) == {0, 1, 2}


def test_no_ties_at_other_sizes(library):
    """np.resize repeats the given values, and so made ties at each larger size."""
    for words, (x,) in odd_inputs(max_pool(library), random(3, np.float64, (5, 7))):
        assert len(np.unique(x)) == x.size, words
