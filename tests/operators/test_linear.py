"""This operator serves patch_mindspore alone: msops has no public name for it."""

import numpy as np
import pytest

from card import Card, length, random, zeros
from msops.operators.linear import forward, linear
from msops.testing.checks import Gradient, Net, run


def layer(x, weight, bias):
    return (x @ weight.T + bias,)


def case(rows, outputs, deep):
    return [(*rows, deep), (outputs, deep), (outputs,)], {}


class Linear(Card):
    function = linear
    operator = forward
    formulas = (layer,)
    cases = {
        "small": case((3,), 5, 4),
        "more axes": case((2, 3), 7, 16),
        "a vector": case((), 9, 8),
        "odd": case((33,), 71, 13),
        "no rows": case((0,), 4, 8),
        "no features": case((2,), 4, 0),
    }
    further = {
        "whole packs": case((264,), 512, 256),
        "tall": case((4097,), 24, 64),
        "long sums": case((130,), 136, 4104),
        "one output": case((70,), 1, 72),
    }
    small = "small"
    roundings = 20
    wrong = (
        (zeros((2, 6), (5, 7), (5,)), {}, ValueError, "linear: weight must have shape (V, C) = (5, 6), got (5, 7)"),
        (zeros((2, 6), (5, 6), (6,)), {}, ValueError, "linear: bias must have shape (V,) = (5,), got (6,)"),
        (zeros((2, 6), (0, 6), (0,)), {}, ValueError, "weight must have at least 1 row and less than 2^31, got 0"),
    )

    def operators(self, shapes=()):
        return [forward]

    def units(self):
        """Where cuBLASLt is not there, the product is rounded before the bias is added."""
        return 1.5

    def random_case(self, random):
        return case((length(random),), 1 + length(random), length(random))

    def scratch_of_parts(self, inputs, shape, parts):
        return shape


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["small", "more axes", "odd", "a vector"])
def test_gradients(mode, name, dtype):
    shapes, _ = Linear.cases[name]
    *inputs, dy = random(1, dtype, *shapes, (*shapes[0][:-1], shapes[1][0]))
    x, weight, bias, dy_wide = (each.astype(np.float64) for each in (*inputs, dy))
    rows, drows = x.reshape(-1, x.shape[-1]), dy_wide.reshape(-1, dy.shape[-1])
    wants = layer(x, weight, bias)[0], dy_wide @ weight, drows.T @ rows, drows.sum(0)
    tolerance = {"float16": 1e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    for got, want in zip((*run(Net(linear), *inputs), *run(Gradient(Net(linear), 3), *inputs, dy)), wants):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, tolerance, tolerance * 2)


@pytest.mark.parametrize(("inputs", "settings", "error", "words"), Linear.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, inputs, settings, error, words):
    with pytest.raises(error) as caught:
        run(Net(linear), *inputs)
    assert words in str(caught.value)
