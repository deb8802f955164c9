import numpy as np
import pytest

import msops
from card import DTYPES
from gpu import BIG
from msops.operators import silu as operators
from operator_test import OperatorTest, run
from test_sigmoid import sigmoid


def silu(x):
    return (x * sigmoid(x),)


def silu_backward(x, dy):
    s = sigmoid(x)
    return (dy * s * (1 + x * (1 - s)),)


def silu_backward_backward(x, dy, ddx):
    s = sigmoid(x)
    return ddx * dy * s * (1 - s) * (2 + x * (1 - 2 * s)), ddx * s * (1 + x * (1 - s))


class TestSilu(OperatorTest):
    function, cell = msops.silu, msops.SiLU
    operator = operators.forward
    formulas = (silu, silu_backward, silu_backward_backward)
    cases = {
        "scalar": ([()], {}),
        "empty": ([(0,)], {}),
        "one": ([(1,)], {}),
        "prime": ([(7, 13)], {}),
        "past a pack": ([(1025,)], {}),
        "large": ([(1, 1_000_003)], {}),
    }
    further = {f"{n}": ([(n,)], {}) for n in (2, 31, 257, 1000, 4099)}
    small = "prime"
    roundings = 64  # the second derivative is a difference of numbers that are larger than it
    second_order = True
    wrong = (
        ([np.zeros(3, np.int32)], {}, TypeError, "silu: x must be float16, float32 or float64, got int32"),
        ([1.5], {}, TypeError, "silu: x must be a Tensor, got float"),
    )
    huge = ((BIG,),)

    def check_huge(self, gpu, n):
        x = gpu.random(n)
        (y,) = gpu.run(operators.forward, x)
        gpu.assert_close(y, gpu.torch.nn.functional.silu(x))
        (dx,) = gpu.run(operators.backward, x, x)
        s = gpu.torch.sigmoid(x)
        gpu.assert_close(dx, x * s * (1 + x * (1 - s)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(mode, dtype):
    """Large numbers pass or become 0; NaN stays."""
    info = np.finfo(dtype)
    x = np.array([info.min, -1e4, -0.0, 0.0, 1e4, info.max, np.inf, np.nan], dtype)
    want = np.array([0, 0, 0, 0, 1e4, info.max, np.inf, np.nan], dtype)
    np.testing.assert_array_equal(run(msops.SiLU(), x)[0], want)
