import numpy as np

from card import zeros
from msops.operators import swiglu_halves as operators
from operator_test import OperatorTest
from test_swiglu import swiglu, swiglu_backward, swiglu_backward_backward


def halves(x):
    return x[:, 0], x[:, 1]


def forward(x):
    return swiglu(*halves(x))


def backward(x, dout):
    return (np.stack(swiglu_backward(*halves(x), dout), 1),)


def backward_backward(x, dout, ddx):
    dgate, dup, ddout = swiglu_backward_backward(*halves(x), dout, *halves(ddx))
    return np.stack((dgate, dup), 1), ddout


class TestSwigluHalves(OperatorTest):
    function = operators.swiglu_halves
    operator = operators.forward
    formulas = (forward, backward, backward_backward)
    cases = {
        "no parts": ([(0, 2, 3)], {}),
        "no elements": ([(3, 2, 0)], {}),
        "one": ([(1, 2, 1)], {}),
        "prime": ([(7, 2, 13)], {}),
        "past a block": ([(2, 2, 257)], {}),
        "large": ([(300, 2, 1024)], {}),
    }
    further = {f"{n}": ([(3, 2, n)], {}) for n in (2, 8, 31, 257, 1000, 4099)}
    small = "prime"
    roundings = 64  # the second derivative is a difference of numbers that are larger than it
    second_order = True
    wrong = (
        (zeros((2, 2, 3), dtype=np.int32), {}, TypeError, "swiglu_halves: x must be float16, float32 or float64"),
        (zeros((2, 3, 3)), {}, ValueError, "swiglu_halves: x must have shape (A, 2, B)"),
    )
