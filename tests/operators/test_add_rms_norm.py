import numpy as np
import pytest

import msops
from card import length, lengths, random, zeros
from msops.operators.add_rms_norm import backward_operators, operators
from msops.testing.checks import assert_equal
from operator_test import Gradient, Net, OperatorTest, check_second_order, run
from test_rms_norm import rms_norm, rms_norm_backward, units


def add_rms_norm(x, residual, weight=None, **settings):
    return (*rms_norm(x + residual, weight, **settings), x + residual)


def add_rms_norm_backward(s, *rest, **settings):
    *rest, ds = rest
    dx, *dweight = rms_norm_backward(s, *rest, **settings)
    return dx + ds, *dweight


def case(shape, has_weight=True, **settings):
    return [shape, shape, shape[-1:]][: 2 + has_weight], settings


class TestAddRmsNorm(OperatorTest):
    function = msops.add_rms_norm
    formulas = (add_rms_norm, add_rms_norm_backward)
    second_order = True
    cases = {
        "small": case((3, 4, 7), eps=0.1, offset=0.5),
        "no weight": case((3, 7), False, eps=0.1),
        "no rows": case((0, 5)),
        "no columns": case((3, 0)),
        "one": case((1, 1), eps=0.1),
        "gemma": case((70, 13), eps=1e-3, offset=1.0, casting="gemma"),
        "large": case((4001, 129)),
    }
    further = {f"{shape}": case(shape) for shape in ((9, 64), (5, 520), (3, 4104), (2, 20_000), (2, 20_003))}
    small = "small"
    roundings = 64  # gradients are differences of numbers that are larger than they are
    half_in_float32 = half_gradient_in_float32 = False  # the formula rounds on the way
    wrong = (
        (zeros((2, 3), (2, 3), dtype=np.int8), {}, TypeError, "add_rms_norm: x must be float16, float32 or float64"),
        (zeros((2, 3), 3), {}, ValueError, "add_rms_norm: residual must have shape (*S, C) = (2, 3), got (3,)"),
        (zeros((2, 3), (2, 3), 2), {}, ValueError, "add_rms_norm: weight must have shape (C,) = (3,), got (2,)"),
        (zeros((2, 3), (2, 3)), dict(eps=-1.0), ValueError, "add_rms_norm: eps must be finite and at least 0"),
    )

    def operators(self, shapes=((1,),) * 3, eps=1e-6, offset=0.0, casting="llama"):
        forward, backward = operators(eps, offset, casting), backward_operators(eps, offset)
        if len(shapes) == 2:
            return [forward.without("weight"), backward.without("weight", "dweight")]
        return [forward, backward]

    def units(self, **settings):
        """The sum is rounded, too."""
        return units(**settings) + 1.25

    def reference_gradient(self, x, residual, *rest, **settings):
        dx, *dweight = add_rms_norm_backward(x + residual, *rest, **settings)
        return dx, dx, *dweight

    def random_case(self, random):
        shape = (*lengths(random), length(random))
        settings = dict(eps=random.choice((0.1, 1.0)), offset=random.choice((0.0, 1.0)))
        return case(shape, random.random() < 0.7, casting=random.choice(("llama", "gemma", "none")), **settings)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_equals_add_and_rms_norm(mode, casting):
    """The sum is rounded to float16 before it is normalized."""
    x, residual, weight = random(0, np.float16, (30, 65), (30, 65), (65,))
    y, s = run(Net(msops.add_rms_norm, casting=casting, offset=1.0), x, residual, weight)
    assert_equal([s], [x + residual])
    assert_equal([y], run(Net(msops.rms_norm, casting=casting, offset=1.0), s, weight))


def test_second_order_without_weight(mode):
    gradient = Gradient(Net(msops.add_rms_norm, eps=0.1), 2)
    check_second_order(gradient, random(1, np.float64, *[(3, 5)] * 4), mode)
