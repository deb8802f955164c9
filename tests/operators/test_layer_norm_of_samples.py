"""This operator serves patch_mindspore alone: msops has no public name for it."""

import numpy as np
import pytest

from card import Card, chain, length, zeros
from msops.operators.layer_norm_of_samples import layer_norm_of_samples, operators
from msops.testing.checks import Gradient, Net, run
from test_layer_norm import layer_norm, layer_norm_backward


def of_samples(formula, n):
    """Returns a formula that stacks what a formula of layer_norm gives for each sample."""

    def formula_of_all(*inputs, eps=1e-5):
        if inputs[0].shape[0] == 0:
            return inputs[:n]
        return tuple(map(np.stack, zip(*(formula(*each, eps=eps) for each in zip(*inputs)), strict=True)))

    return formula_of_all


def case(shape, **settings):
    parameters = (shape[0], shape[-1])
    return [shape, parameters, parameters], settings


class LayerNormOfSamples(Card):
    function = layer_norm_of_samples
    formulas = (of_samples(layer_norm, 1), of_samples(layer_norm_backward, 3))
    cases = {
        "small": case((3, 2, 4), eps=0.1),
        "no axis between": case((5, 7), eps=0.1),
        "two axes between": case((2, 3, 4, 9), eps=0.1),
        "no samples": case((0, 3, 5)),
        "no rows": case((2, 0, 5)),
        "no columns": case((2, 3, 0)),
        "one row": case((4, 1, 33), eps=0.1),
    }
    further = {
        **{f"{shape}": case(shape, eps=0.1) for shape in ((2, 9, 64), (3, 5, 520), (2, 19, 513), (2, 3, 4104))},
        "many rows": case((2, 2001, 129)),
        "long rows": case((2, 3, 20_003), eps=0.1),
    }
    small = "small"
    roundings = 64  # gradients are differences of numbers that are larger than they are
    wrong = (
        (zeros(3, (3, 1), (3, 1)), {}, ValueError, "layer_norm_of_samples: x must have shape (B, *S, C), got (3,)"),
        (zeros((2, 3, 4), (2, 4), (3, 4)), {}, ValueError, "bias must have shape (B, C) = (2, 4), got (3, 4)"),
        (zeros((2, 3, 4), 4, 4), {}, ValueError, "weight must have shape (B, C), got (4,)"),
        (zeros((2, 4), (2, 4), (2, 4)), {"eps": -1}, ValueError, "layer_norm_of_samples: eps must be"),
    )

    def operators(self, shapes=(), eps=1e-5):
        return chain(operators(eps))

    def random_case(self, random):
        return case((length(random), length(random), length(random)), eps=0.1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", LayerNormOfSamples.cases)
def test_values_and_gradients(mode, name, dtype):
    shapes, settings = LayerNormOfSamples.cases[name]
    rng = np.random.default_rng(2)
    *inputs, dy = (rng.standard_normal(shape).astype(dtype) for shape in (*shapes, shapes[0]))
    net = Net(layer_norm_of_samples, **settings)
    wide = [each.astype(np.float64) for each in inputs]
    forward, backward = LayerNormOfSamples.formulas
    wants = (*forward(*wide, **settings), *backward(*wide, dy.astype(np.float64), **settings))
    tolerance = {"float16": 1e-2, "float32": 2e-5, "float64": 1e-12}[dtype]
    for got, want in zip((*run(net, *inputs), *run(Gradient(net, 3), *inputs, dy)), wants, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, tolerance, tolerance)


@pytest.mark.parametrize(("inputs", "settings", "error", "words"), LayerNormOfSamples.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, inputs, settings, error, words):
    with pytest.raises(error) as caught:
        run(Net(layer_norm_of_samples, **settings), *inputs)
    assert words in str(caught.value)
