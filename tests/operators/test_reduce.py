"""This operator serves patch_mindspore alone: msops has no public name for it."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from card import Card, results_of
from msops.operators.reduce import OPERATIONS, operators, reduce
from msops.testing.checks import Net, run

KINDS = ("int32", "int64", "bool")


def reduced(x, operation, first, kind=None):
    axes = tuple(range(0 if first else 1, x.ndim, 2))
    if x.dtype == bool:
        operation = {"sum": "any", "max": "any", "prod": "all", "min": "all"}.get(operation, operation)
    y = getattr(np, operation)(x, axes) if axes else x
    return (np.asarray(y, x.dtype),)


def case(shape, first, operation="sum", kind=None):
    settings = dict(operation=operation, first=first)
    return [shape], settings if kind is None else {**settings, "kind": kind}


class Reduce(Card):
    function = reduce
    formulas = (reduced,)
    cases = {
        "small": case((3, 4, 5), True),
        "scalar": case((7,), True),
        "nothing": case((0, 3), True),
        "no outputs": case((3, 0), True),
        "kept": case((70,), False),
        "rows": case((5, 13), False),
        "columns": case((13, 5), True),
        "middle": case((5, 13, 7), False),
        "large": case((1, 300_007), False),
    }
    further = {
        "mean of columns": case((130, 72), True, "mean"),
        "mean of rows": case((30, 130), False, "mean"),
        "mean of outer and inner": case((9, 6, 50), True, "mean"),
        "mean of all": case((40_003,), True, "mean"),
        "many columns": case((300, 264), True),
        "many odd columns": case((300, 263), True),
        "columns of odd halves": case((310, 263), True, kind="float16"),
        "columns of halves": case((310, 264), True, "mean", kind="float16"),
        "few columns": case((5003, 3), True),
        "split columns": case((20_000, 16), True),
        "split columns, mean": case((20_001, 13), True, "mean"),
        "split columns of halves": case((20_001, 13), True, kind="float16"),
        "split rows": case((3, 40_000), False),
        "split odd rows": case((3, 40_001), False, "mean", kind="float16"),
        "split outer and inner": case((200, 3, 205), True),
        "split middle": case((2, 9001, 9), False),
        "short rows": case((2001, 3), False),
        "one element of each row": case((201, 1), False),
        "no terms of outer and inner": case((2, 3, 0), True),
        "rows of one block": case((5, 4099), False),
        "rows of few lanes": case((70, 40), False, kind="float16"),
        "inner packs": case((3, 11, 64), True),
        "one inner": case((300, 7, 1), True),
        "one outer": case((1, 7, 300), True),
        **{
            f"{operation}, {name}": case(shape, first, operation)
            for operation in ("prod", "max", "min")
            for name, (shape, first) in {
                "columns": ((37, 21), True),
                "rows": ((21, 37), False),
                "outer and inner": ((6, 5, 33), True),
                "split columns": ((9001, 7), True),
                "split rows": ((2, 17_001), False),
            }.items()
        },
        **{
            f"{operation} of {kind}, {'columns' if first else 'rows'}": case((1500, 19), first, operation, kind)
            for kind in KINDS
            for operation in ("sum", "prod", "max", "min")
            for first in (False, True)
        },
        "sum of int64, split": case((20_001, 5), True, "sum", "int64"),
        "max of int32, split": case((20_001, 5), True, "max", "int32"),
        "whether all are true, split": case((40_001, 5), True, "min", "bool"),
    }
    small = "small"

    def operators(self, shapes=(), operation="sum", first=False, kind=None):
        return [operators(operation, first)]

    def inputs(self, shapes, dtype, seed=1, operation="sum", kind=None, **settings):
        rng, kind = np.random.default_rng(seed), np.dtype(kind or dtype)
        [shape] = shapes
        if kind.kind == "b":
            return [rng.random(shape) < (0.999 if operation in ("all", "prod", "min") else 0.001)]
        if kind.kind == "i":
            return [np.asarray(rng.integers(-9, 9, shape) * 2**20, kind)]
        if operation == "prod":  # the product of many random numbers is 0 or infinite
            x = np.asarray(np.where(rng.random(shape) < 0.5, -1, 1), kind)
            x.reshape(-1)[rng.integers(0, max(1, x.size), 8 * (x.size > 0))] *= kind.type(1.5)
            return [x]
        return [np.asarray(rng.standard_normal(shape), kind)]

    def scratch_of_parts(self, inputs, shape, parts):
        """Fewer parts than the operator chooses are allowed."""
        return (min(parts, shape[0]), shape[1]) if parts > 1 and shape[0] > 1 else shape

    def random_case(self, random):
        shape = tuple(random.choice((1, 2, 3, 5, 8, 33)) for _ in range(random.randrange(1, 4)))
        return case(shape, random.random() < 0.5, random.choice(OPERATIONS[:5]))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_forward(mode, operation):
    kinds = ("bool",) if operation in ("any", "all") else ("float16", "float32", "float64")
    for kind in kinds:
        (x,) = Reduce().inputs([(4, 6, 5)], kind, operation=operation)
        for first in (False, True):
            (y,) = run(Net(reduce, operation=operation, first=first), x)
            (want,) = reduced(x.astype(np.float64) if kind != "bool" else x, operation, first)
            assert y.dtype == x.dtype
            np.testing.assert_allclose(y, want.astype(kind), 2e-3 if kind == "float16" else 1e-5, 1e-5)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("operation", ["sum", "prod", "max", "min", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_not_a_number(dtype, operation, first):
    """A NaN reaches its output, wherever it is, and no other; infinities are numbers."""
    for at in range(5):
        x = np.full((5, 5), -np.inf, dtype)
        x[at, at] = np.nan
        (y,) = results_of(operators(operation, first), x)
        assert np.isnan(y).tolist() == [k == at for k in range(5)]


def test_sums_of_halves_are_not_rounded_on_the_way():
    x = np.full((1, 70_001), 0.125, np.float16)
    assert results_of(operators("sum", False), x)[0] == np.float16(70_001 / 8)
    assert results_of(operators("mean", False), x)[0] == 0.125


def test_whole_numbers_wrap_around():
    for dtype, least in (("int32", -(2**31)), ("int64", -(2**63))):
        x = np.array([[least, -1]], dtype)
        assert results_of(operators("sum", False), x)[0] == -(least + 1)


@pytest.mark.parametrize(
    ("x", "operation", "error", "words"),
    [
        (np.zeros((2, 3), np.int32), "mean", TypeError, "x must be float16, float32 or float64, got int32"),
        (np.zeros((2, 3), np.float32), "any", TypeError, "x must be bool, got float32"),
        (np.zeros((2,) * 4, np.float32), "sum", ValueError, "x must have 1 to 3 axes, got 4"),
        (np.zeros((), np.float32), "sum", ValueError, "x must have 1 to 3 axes, got 0"),
        (np.zeros(2, np.float32), "norm", ValueError, "operation must be one of"),
    ],
)
def test_wrong_inputs(x, operation, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(error, match=rf"^reduce: {words}"):
        reduce(Tensor(x), operation, True)
