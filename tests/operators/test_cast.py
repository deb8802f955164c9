"""This operator serves patch_mindspore alone: msops has no public name for it."""

import itertools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from card import Call, Card, length, lengths, results_of
from msops.operators.cast import DTYPES, has, operators

NAMES = ("float16", "float32", "float64", "int32", "int64", "bool")
PAIRS = [(x, y) for x, y in itertools.product(NAMES, NAMES) if has(x, y)]


def values(dtype, shape, special):
    """Returns numbers of a dtype, which fit into whole numbers of 32 bits unless they may be special."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("int32", "int64"):
        return (rng.integers(-(2**31), 2**31, shape) // rng.choice([1, 2**8, 2**20, 2**31], shape)).astype(dtype)
    x = rng.standard_normal(shape) * rng.choice([0, 1e-7, 1, 100, 1e4], shape)
    return np.where(special & (rng.random(shape) < 0.2), rng.choice([np.nan, np.inf, -np.inf], shape), x).astype(dtype)


class Cast(Card):
    cases = {
        "small": ([(3, 5)], {"to": "bool"}),
        "empty": ([(0, 3)], {"to": "int32"}),
        "one": ([()], {"to": "int64"}),
        "large": ([(70_001,)], {"to": "int32"}),
        "packs": ([(64, 96)], {"to": "bool"}),
    }
    small = "small"
    others = PAIRS

    def operators(self, shapes=(), to="bool"):
        return [operators(to)]

    def formula(self, x, to="bool"):
        return (x.astype(to),)

    formulas = property(lambda self: (self.formula,))

    def other_calls(self, pair):
        dtype, to = pair
        for shape in ((1000,), (5, 16), (7,)):
            x = values(dtype, shape, to in ("float16", "float32", "bool"))
            yield Call(operators(to), [x], results_of(operators(to), x), [])

    huge = ((2**31 + 77,),)

    def check_huge(self, gpu, n):
        x = gpu.random(n)
        (y,) = gpu.run(operators("bool"), x)
        gpu.assert_equal(y, x != 0)

    def random_case(self, random):
        return [(*lengths(random)[:3], length(random))], {"to": random.choice(("bool", "int32", "int64"))}


@pytest.mark.parametrize("pair", PAIRS, ids="{0[0]} to {0[1]}".format)
def test_numbers(pair):
    """A cast gives NumPy's numbers."""
    with np.errstate(all="ignore"):
        for call in Cast().other_calls(pair):
            np.testing.assert_array_equal(call.results[0], call.inputs[0].astype(pair[1]))


def test_pairs_that_it_lacks(capfd):
    for dtype, to in itertools.product(NAMES, NAMES):
        if not has(dtype, to):
            with pytest.raises((TypeError, ValueError), match="cast"):
                operators(to)(Tensor(np.zeros(3), DTYPES[NAMES.index(dtype)]))
    with pytest.raises(ValueError, match="to must be one of"):
        operators("int8")


def test_both_modes(mode):
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    x = Tensor(np.array([1.5, -2.5, 0.0], np.float32))
    cast = operators("int32").primitive
    np.testing.assert_array_equal(cast(x).asnumpy(), [1, -2, 0])
