"""This operator serves patch_mindspore alone: msops has no public name for it."""

import numpy as np

from card import length, lengths, zeros
from msops.operators.add_layer_norm import add_layer_norm, operators
from operator_test import OperatorTest
from test_layer_norm import layer_norm, layer_norm_backward


def add_layer_norm_formula(x, residual, *parameters, eps=1e-5):
    return layer_norm(x + residual, *parameters, eps=eps)


def case(shape, count=2, **settings):
    """Returns a case with so many parameters."""
    return [shape, shape, *[shape[-1:]] * count], settings


class TestAddLayerNorm(OperatorTest):
    function = add_layer_norm
    formulas = (add_layer_norm_formula,)
    second_order = True
    cases = {
        "small": case((3, 2, 4), eps=0.1),
        "weight": case((5, 7), 1, eps=0.1),
        "neither": case((3, 7), 0, eps=0.1),
        "no rows": case((0, 5)),
        "no columns": case((3, 0)),
        "large": case((4001, 129)),
    }
    further = {
        "one": case((1, 1), eps=0.1),
        **{f"{shape}": case(shape, eps=0.1) for shape in ((9, 64), (9, 768), (5, 520), (3, 4104), (2, 20_000))},
        **{f"{shape}": case(shape, eps=0.1) for shape in ((19, 513), (20, 1023), (5, 32_768), (2, 70_001))},
    }
    small = "small"
    roundings = 64  # gradients are differences of numbers that are larger than they are
    wrong = (
        (zeros((2, 3), (2, 3), dtype=np.int64), {}, TypeError, "add_layer_norm: x must be float16, float32 or float64"),
        (zeros((2, 3), (1, 3)), {}, ValueError, "add_layer_norm: residual must have shape (*S,) = (2, 3), got (1, 3)"),
        (
            zeros((2, 3), (2, 3), 2),
            {},
            ValueError,
            "weight must have the last axes of x, whose shape is (2, 3), got (2,)",
        ),
        (zeros((2, 3), (2, 3)), dict(eps=-1.0), ValueError, "add_layer_norm: eps must be finite and at least 0, got"),
    )

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Returns inputs whose sums float16 holds, since the operator rounds them."""
        x, residual, *parameters = super().inputs(shapes, dtype, seed, **settings)
        return [*((32 * each).round() / 32 for each in (x, residual)), *parameters]

    def operators(self, shapes=((1,),) * 4, eps=1e-5):
        absent = [name for i, name in enumerate(("weight", "bias")) if len(shapes) <= 2 + i]
        return [operators(eps).without(*absent)]

    def reference_gradient(self, x, residual, *rest, **settings):
        dx, *others = layer_norm_backward(x + residual, *rest, **settings)
        return dx, dx, *others

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        """Scales by powers of 2 alone, so that float16 still holds the sums."""
        return super().entry_calls(shapes, settings, dtype, seed, {0.1: 0.125, 5: 4}.get(scale, scale), parts)

    def random_case(self, random):
        return case((*lengths(random), length(random)), random.randrange(3), eps=0.1)
