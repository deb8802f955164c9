import numpy as np
import pytest
from mindspore import Tensor
from numpy import inf, nan

import msops
from card import DTYPES, chain, lengths, random
from msops.operators.softmax import operators_along, second_gradients
from operator_test import Gradient, Net, OperatorTest, run


def softmax(x, axis=-1):
    if x.size == 0:
        return (x,)
    e = np.exp(x - x.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True),)


def softmax_backward(y, dy, axis=-1):
    return (y * (dy - (y * dy).sum(axis, keepdims=True)),)


def softmax_backward_backward(y, dy, ddx, axis=-1):
    s, t = (y * dy).sum(axis, keepdims=True), (y * ddx).sum(axis, keepdims=True)
    return ddx * (dy - s) - t * dy, y * (ddx - t)


def case(*shape, axis=-1):
    return [shape], dict(axis=axis)


class TestSoftmax(OperatorTest):
    function, cell = msops.softmax, msops.Softmax
    formulas = (softmax, softmax_backward, softmax_backward_backward)
    cases = {
        "row": case(13),
        "empty": case(3, 0),
        "no rows": case(0, 3),
        "one": case(1),
        "rows": case(7, 13),
        "columns": case(5, 6, 7, axis=1),
        "first axis": case(9, 3, 2, axis=0),
        "last of three": case(2, 3, 5, axis=2),
        "large": case(60, 5003),
        "large, first axis": case(1201, 250, axis=0),
    }
    further = {
        **{f"rows of {n}": case(3, n) for n in (1, 2, 31, 64, 257, 1000, 4099, 20_011)},
        **{f"rows of {n}": case(19, n) for n in (513, 1023, 4097, 8191)},  # between packs
        **{f"rows of {n}": case(3, n) for n in (32_760, 32_767, 32_768, 32_769)},  # in clusters
        **{
            f"{shape}, axis {axis}": case(*shape, axis=axis)
            for shape, axis in (
                ((2, 0, 3), 1),
                ((2, 3, 0), 1),
                ((5, 1, 8), 1),
                ((3, 4, 1), 1),
                ((70, 3, 2), -2),
                ((300, 5, 3), 1),
                ((9, 21, 64), 1),
                ((2, 21, 1000), 1),
                ((3, 65, 40), 1),
                ((2, 100, 31), 1),
                ((1, 300, 129), 1),
                ((2, 700, 8), 1),
                ((2, 3000, 5), 1),
                ((1500, 2), 0),
                ((700, 33), 0),
                ((5, 4, 3, 6), 0),
                ((5, 4, 3, 6), -3),
            )
        },
        # On the GPU, rows of these sets are joined: blocks take several sets, and clusters share one.
        **{
            f"{shape}, joined": case(*shape, axis=1)
            for shape in (
                (2600, 4, 6),
                (1500, 24, 3),
                (3, 4002, 2),
                (2, 3000, 3),
                (3, 1000, 7),
                (2, 1500, 10),
                (2, 336, 49),
                (1, 8, 1001),
                (1, 1000, 196),
            )
        },
    }  # fmt: skip
    small = "columns"
    hostile = ("rows", "columns")
    second_order = True
    half_gradient_in_float32 = False  # the gradient takes the saved output, which is rounded to float16
    wrong = (
        ([np.zeros(3, np.int32)], {}, TypeError, "softmax: x must be float16, float32 or float64, got int32"),
        ([1.5], {}, TypeError, "softmax: x must be a Tensor, got float"),
        ([np.float32(1)], {}, TypeError, "Tensor"),  # MindSpore 1.10 has its own message
        ([np.zeros((), np.float32)], {}, ValueError, "softmax: axis must be at least 0 and less than 0, got -1"),
        ([np.zeros((2, 3), np.float32)], dict(axis=2), ValueError, "axis must be at least -2 and less than 2, got 2"),
        ([np.zeros((2, 3), np.float32)], dict(axis=-3), ValueError, "axis must be at least -2 and less than 2, got -3"),
        ([np.zeros((2, 3), np.float32)], dict(axis=1.0), TypeError, "softmax: axis must be an int, got float"),
        ([np.zeros((2, 3), np.float32)], dict(axis=True), TypeError, "softmax: axis must be an int, got bool"),
    )
    huge = (((2**19 + 3, 4099), -1), ((2**19 + 3, 41, 100), 1), ((4099, 2**19 + 3), 0), ((2**31 + 5, 2), -1))

    def operators(self, shapes=(), axis=-1):
        from_end = -1 - axis if axis < 0 else len(shapes[0]) - 1 - axis
        return [*chain(operators_along(from_end)), second_gradients(from_end)]

    def random_case(self, random):
        shape = lengths(random) or (7,)
        return case(*shape, axis=random.randrange(-len(shape), len(shape)))

    def check_huge(self, gpu, shape, axis):
        forward, backward, _ = self.operators([shape], axis=axis)
        x = gpu.random(*shape)
        out = gpu.run(forward, x)
        n = shape[0] if axis else shape[1]  # the axis of the samples
        gpu.check_parts(forward, [x], out, n, 3, gpu.assert_close)
        gpu.check_parts(backward, [out[0], x], gpu.run(backward, out[0], x), n, 3, gpu.assert_close)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_nan(mode, dtype, axis):
    rows = [[-inf, -inf, -inf], [-inf, 2, 2], [inf, 2, 1], [nan, 2, 1], [-inf, 5, -inf], [9e4, -9e4, 0]]
    want = [[nan] * 3, [0, 0.5, 0.5], [nan] * 3, [nan] * 3, [0, 1, 0], [1, 0, 0]]
    with np.errstate(over="ignore"):  # 9e4 is infinite in float16
        x = np.array(rows[: 5 if dtype == "float16" else 6], dtype)
    want = np.array(want[: len(x)], dtype)
    if axis == 0:
        x, want = x.T, want.T
    np.testing.assert_array_equal(run(Net(msops.softmax, axis=axis), x)[0], want)


@pytest.mark.parametrize("axis", [1, 2])
def test_equal_axes_give_equal_results(mode, axis):
    """An axis counted from the start is the axis counted from the end. Trailing axes of length 1 change nothing."""
    (x,) = random(1, np.float32, (5, 6, 7))
    (want,) = run(msops.Softmax(axis), x)
    np.testing.assert_array_equal(run(msops.Softmax(axis - 3), x)[0], want)
    np.testing.assert_array_equal(run(msops.Softmax(axis), x[..., None])[0], want[..., None])


def test_shift(mode):
    """A number added to all changes neither the result nor the gradient, which adds up to 0."""
    x, dy = random(1, np.float64, (4, 50), (4, 50))
    net = msops.Softmax()
    (y,) = run(net, x)
    np.testing.assert_allclose(run(net, x + 700)[0], y, rtol=1e-12)
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-14)
    gradient = Gradient(net, 1)(Tensor(x), Tensor(dy)).asnumpy()
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-15)


def test_wrong_axis_of_the_cell():
    with pytest.raises(TypeError, match="softmax: axis must be an int, got float"):
        msops.Softmax(1.0)
    with pytest.raises(ValueError, match="softmax: axis must be at least -1 and less than 1, got 1"):
        msops.Softmax(1)(Tensor(np.zeros(3, np.float32)))
