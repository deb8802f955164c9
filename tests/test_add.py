import numpy as np
import pytest
from mindspore import Tensor

import msops
from operator_test import OperatorTest, run, run_gradient, zeros


def sum_to(dout, shape):
    """dout summed over the axes along which an array of `shape` was broadcast."""
    lead = dout.ndim - len(shape)
    axes = (*range(lead), *(lead + i for i, length in enumerate(shape) if length == 1))
    return dout.sum(axes, keepdims=True, dtype=dout.dtype).reshape(shape)


class TestAdd(OperatorTest):
    function = msops.add
    cases = {
        "same": ([(7, 13), (7, 13)], {}),
        "scalars": ([(), ()], {}),
        "scalar left": ([(), (5, 3)], {}),
        "scalar right": ([(5, 3), ()], {}),
        "one element": ([(1,), (1,)], {}),
        "empty": ([(0, 3), (0, 3)], {}),
        "empty and row": ([(0, 3), (3,)], {}),
        "empty and one": ([(4, 0), (1, 1)], {}),
        "row": ([(11, 8), (8,)], {}),
        "column": ([(8, 12), (8, 1)], {}),
        "outer": ([(7, 1), (1, 5)], {}),
        "outer, other way": ([(9,), (4, 1)], {}),
        "small rows": ([(500, 3), (500, 1)], {}),
        "channels": ([(4, 6, 5, 7), (6, 1, 1)], {}),
        "alternating": ([(3, 1, 4, 1, 5), (1, 2, 1, 6, 1)], {}),
        "inner and outer": ([(5, 1, 16), (6, 1)], {}),
        "sixteen axes": ([(1, 2) * 8, (2, 1) * 8], {}),
        "long rows": ([(2, 40_001), (2, 1)], {}),
        "long columns": ([(50_021, 3), (3,)], {}),
        "long sum": ([(700_001,), (1,)], {}),
        "large": ([(1009, 1031), (1009, 1031)], {}),
    }
    small = "alternating"
    second_order = True
    wrong = (
        (zeros(3, 3, dtype=np.int64), {}, TypeError, "x must be float16, float32 or float64, got int64"),
        ([*zeros(3), *zeros(3, dtype=np.float16)], {}, TypeError, "y must be float32 as x is, got float16"),
        ([*zeros(3), 1.0], {}, TypeError, "add: y must be a Tensor, got float"),
        (zeros((2, 3), 4), {}, ValueError, "add: x and y must have shapes that broadcast, got (2, 3) and (4,)"),
        (zeros(2, 0), {}, ValueError, "add: x and y must have shapes that broadcast, got (2,) and (0,)"),
        (zeros((1,) * 17, 1), {}, ValueError, "at most 16 axes, got 17"),
    )

    @staticmethod
    def reference(x, y):
        return (x + y,)

    @staticmethod
    def reference_gradient(x, y, dout):
        return sum_to(dout, x.shape), sum_to(dout, y.shape)


@pytest.mark.parametrize("values", [(np.inf, -np.inf), (np.nan, 1), (3e38, 3e38), (1e-45, 2e-45)], ids=str)
def test_special_values(mode, values):
    x, y = (np.full(1000, v, np.float32) for v in values)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(msops.Add(), x, y)[0], x + y)


def test_function_equals_cell(mode):
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
    np.testing.assert_array_equal(msops.add(Tensor(x), Tensor(y)).asnumpy(), run(msops.Add(), x, y)[0])


def test_every_float16(mode):
    """All 65536 of them go in, and come out rounded as NumPy rounds."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    y = np.roll(x, 12345)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(msops.Add(), x, y)[0], x + y)


def test_infinity_in_a_sum(mode):
    """Is the sum, and not NaN."""
    inputs = zeros(4, 1)
    dout = np.array([1, np.inf, 2, 3], np.float32)
    np.testing.assert_array_equal(run_gradient(msops.Add(), inputs, [dout])[1], [np.inf])


def test_result_that_no_memory_holds(mode):
    """MindSpore allocates all that C functions use, and they are not called. What follows works."""
    net, n = msops.Add(), 2**24
    x, y = (Tensor(np.ones(shape, np.float32)) for shape in ((n, 1), (1, n)))
    with pytest.raises(RuntimeError):
        net(x, y).asnumpy()
    np.testing.assert_array_equal(net(x[:2], y[:, :3]), np.full((2, 3), 2, np.float32))
