import copy
import math

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from card import DTYPES
from gpu import BIG
from msops.compat import VERSION
from msops.operators.sigmoid import backward, backward_backward, forward
from operator_test import Net, OperatorTest, run


def sigmoid(x):
    with np.errstate(over="ignore"):  # 1 / infinity is the 0 that is wanted
        return 1 / (1 + np.exp(-x))


def sigmoid_backward(y, dy):
    return (dy * y * (1 - y),)


def sigmoid_backward_backward(y, dy, ddx):
    return ddx * dy * (1 - 2 * y), ddx * y * (1 - y)


class TestSigmoid(OperatorTest):
    function = msops.sigmoid
    cell = msops.Sigmoid
    formulas = (lambda x: (sigmoid(x),), sigmoid_backward, sigmoid_backward_backward)
    cases = {
        "scalar": ([()], {}),
        "empty": ([(0,)], {}),
        "empty rows": ([(3, 0, 2)], {}),
        "one": ([(1,)], {}),
        "prime": ([(7, 13)], {}),
        "columns": ([(33, 65)], {}),
        "past a pack": ([(1025,)], {}),
        "large": ([(1, 1_000_003)], {}),
        "eight axes": ([(2, 1, 3, 1, 2, 1, 2, 2)], {}),
    }
    further = {f"{n}": ([(n,)], {}) for n in (2, 31, 257, 1000, 4099)}
    small = "prime"
    second_order = True
    half_gradient_in_float32 = False  # the gradient takes the saved output, which is rounded to float16
    wrong = (
        ([np.zeros(3, np.int32)], {}, TypeError, "sigmoid: x must be float16, float32 or float64, got int32"),
        ([np.zeros(3, bool)], {}, TypeError, "sigmoid: x must be float16, float32 or float64, got bool"),
        ([1.5], {}, TypeError, "sigmoid: x must be a Tensor, got float"),
        ([None], {}, TypeError, "sigmoid: x must be a Tensor, got None"),
        ([[1.0, 2.0]], {}, TypeError, "sigmoid: x must be a Tensor, got list"),
    )

    huge = ((BIG,),)

    def check_huge(self, gpu, n):
        x = gpu.random(n)
        (y,) = gpu.run(forward, x)
        gpu.assert_close(y, gpu.torch.sigmoid(x))
        (dx,) = gpu.run(backward, y, x)
        gpu.assert_close(dx, x * y * (1 - y))

    def operators(self, shapes=(), **settings):
        return [forward, backward, backward_backward]


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(mode, dtype):
    """Sigmoid saturates to 0 and 1, keeps the digits of small results, and passes NaN on."""
    info = np.finfo(dtype)
    x = np.array([-np.inf, info.min, -1e4, -0.0, 0.0, 1e4, info.max, np.inf, np.nan, info.smallest_subnormal], dtype)
    (y,) = run(msops.Sigmoid(), x)
    np.testing.assert_array_equal(y, np.array([0, 0, 0, 0.5, 0.5, 1, 1, 1, np.nan, 0.5], dtype))
    x = np.linspace(1.2 * math.log(info.smallest_subnormal), 1, 1001).astype(dtype)
    exact = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    unit = np.spacing(np.maximum(exact, info.smallest_normal).astype(dtype))
    error = np.abs(run(msops.Sigmoid(), x)[0] - exact) / unit
    assert error.max() <= 3, f"{error.max()} units at {x[error.argmax()]}"


def test_gradient_at_extremes(mode):
    gradient = ops.grad(msops.Sigmoid())(Tensor(np.array([-1e4, 1e4, -np.inf, np.inf, np.nan], np.float32)))
    np.testing.assert_array_equal(gradient.asnumpy(), np.array([0, 0, 0, 0, np.nan], np.float32))


def test_gradient_keeps_the_digits_of_small_results(mode):
    x = np.linspace(-90, -5, 1001, dtype=np.float32)
    gradient = ops.grad(msops.Sigmoid())(Tensor(x)).asnumpy()
    z = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(gradient, z / (1 + z) ** 2, rtol=1e-6, atol=1e-44)


@pytest.mark.skipif(VERSION < (2, 7), reason="MindSpore before 2.7 has no tensors without a shape")
def test_unknown_rank_is_refused():
    """An unknown rank is refused with a clear message, and calls of known shapes still work."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Net(msops.sigmoid)
    net.set_inputs(Tensor(shape=None, dtype=mindspore.float32))
    with pytest.raises(ValueError, match="x must have a rank known at compile time"):
        net(Tensor(np.ones((2, 4), np.float32)))
    np.testing.assert_array_equal(run(Net(msops.sigmoid), np.zeros((2, 4), np.float32))[0], np.full((2, 4), 0.5))


def test_copies(mode):
    cell = copy.deepcopy(msops.Sigmoid())
    np.testing.assert_array_equal(run(cell, np.zeros(3, np.float32))[0], [0.5] * 3)
