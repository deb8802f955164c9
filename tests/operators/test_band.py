"""This operator serves patch_mindspore alone: msops has no public name for it."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from card import Card, chain, length, lengths
from msops.operators.band import band, operators
from msops.testing.checks import Gradient, Net, run

KINDS = ("bool", "int8", "int16", "int32", "int64")


def triangle(x, upper, diagonal=0, kind=None):
    return ((np.triu if upper else np.tril)(x, diagonal),)


class Band(Card):
    function = band
    formulas = (triangle, triangle)
    cases = {
        "small": ([(2, 5, 7)], {"upper": True}),
        "empty": ([(0, 3)], {"upper": True}),
        "no matrices": ([(0, 3, 3)], {"upper": False}),
        "one": ([(1, 1)], {"upper": True, "diagonal": 1}),
        "lower": ([(13, 17)], {"upper": False, "diagonal": 2}),
        "large": ([(2, 300, 301)], {"upper": True, "diagonal": -3}),
    }
    further = {
        "upper of packs": ([(3, 40, 48)], {"upper": True, "diagonal": 5}),
        "lower of packs": ([(3, 40, 48)], {"upper": False, "diagonal": -5}),
        "all": ([(9, 11)], {"upper": True, "diagonal": -9}),
        "none": ([(9, 11)], {"upper": False, "diagonal": -9}),
        "far": ([(9, 11)], {"upper": True, "diagonal": -(2**31)}),
        "columns": ([(5, 9, 1)], {"upper": False, "diagonal": -2}),
        "short rows": ([(50, 3, 3)], {"upper": True, "kind": "float16"}),
        "rank 6": ([(1, 2, 1, 3, 8, 8)], {"upper": False, "diagonal": 1}),
        **{kind: ([(3, 21, 19)], {"upper": True, "diagonal": 1, "kind": kind}) for kind in KINDS},
        **{f"lower, {kind}": ([(3, 21, 32)], {"upper": False, "kind": kind}) for kind in KINDS},
    }
    small = "small"
    right_numbers = {"diagonal": (-1,)}

    def operators(self, shapes=(), upper=True, diagonal=0, kind=None):
        operator = operators(upper, diagonal)
        return [operator] if kind in KINDS else chain(operator)  # the cards' gradients of results are floating

    def inputs(self, shapes, dtype, seed=1, kind=None, **settings):
        rng, kind = np.random.default_rng(seed), np.dtype(kind or dtype)
        if kind.kind == "f":
            return [np.asarray(rng.standard_normal(shape), kind) for shape in shapes]
        return [np.asarray(rng.integers(1, 2 if kind.kind == "b" else 100, shape), kind) for shape in shapes]

    def random_case(self, random):
        shape = (*lengths(random)[:3], length(random), length(random))
        return [shape], {"upper": random.random() < 0.5, "diagonal": random.randrange(-5, 6)}


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", *KINDS])
def test_forward(mode, kind, upper):
    (x,) = Band().inputs([(2, 6, 5)], kind)
    (y,) = run(Net(band, upper=upper, diagonal=-1), x)
    np.testing.assert_array_equal(y, *triangle(x, upper, -1))
    assert y.dtype == x.dtype


def test_what_is_not_kept_may_be_nan(mode):
    x = np.full((3, 3), np.nan, np.float32)
    x[0, 2] = 1
    (y,) = run(Net(band, upper=True, diagonal=2), x)
    np.testing.assert_array_equal(y, [[0, 0, 1], [0, 0, 0], [0, 0, 0]])


def test_gradient(mode):
    x = np.ones((4, 5), np.float32)
    dy = np.arange(20, dtype=np.float32).reshape(x.shape) + 1
    np.testing.assert_array_equal(run(Gradient(Net(band, upper=False), 1), x, dy)[0], np.tril(dy))


@pytest.mark.parametrize(
    ("shape", "settings", "error", "words"),
    [
        ((3,), {"upper": True}, ValueError, "x must have shape"),
        ((3, 3), {"upper": 1}, TypeError, "upper must be a bool, got int"),
        ((3, 3), {"upper": True, "diagonal": 2**31}, ValueError, "diagonal must fit into 32 bits, got 2147483648"),
        ((3, 3), {"upper": True, "diagonal": 0.5}, TypeError, "diagonal must be an int, got float"),
    ],
)
def test_wrong_inputs(shape, settings, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(error, match=f"^band: {words}"):
        band(Tensor(np.zeros(shape, np.float32)), **settings)
