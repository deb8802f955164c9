"""Tests that slices with steps have gradients of both orders, in both modes, while MindSpore is patched.

On the CPU, MindSpore's own kernel raises "StridedSliceGrad … out of bounds", or writes to other places.
"""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from msops.compat import VERSION

X = np.random.default_rng(0).standard_normal((2, 5, 7))
ROWS = [1, 0]
pytestmark = pytest.mark.skipif(VERSION < (2, 9), reason="the patch leaves older versions alone")


class Strided:
    """Calls ops.strided_slice, and for NumPy the slice that it documents."""

    def __init__(self, begin, end, strides, index, **masks):
        self.bounds, self.index, self.masks = (begin, end, strides), index, masks

    def __call__(self, x):
        return x[self.index] if isinstance(x, np.ndarray) else ops.strided_slice(x, *self.bounds, **self.masks)


def at(index):
    def take(x):
        return x[index]

    return take


ALL, EVEN, BACK = slice(None), slice(None, None, 2), slice(None, None, -1)
SLICES = {
    "middle": at((ALL, EVEN)),
    "middle from 1": at((ALL, slice(1, None, 2))),
    "middle backwards": at((ALL, BACK)),
    "all but every second": at((ALL, slice(-1, None, -2))),
    "last backwards": at((..., BACK)),
    "first": at(EVEN),
    "first backwards": at(BACK),
    "two": at((ALL, slice(1, None, 2), slice(0, 6, 3))),
    "three": at((EVEN, EVEN, slice(5, 0, -3))),
    "beside a new axis": at((ALL, None, EVEN, 1)),
    "after a number": at((0, EVEN)),
    "after dots": at((..., EVEN, 3)),
    "beside rows": at((ROWS, EVEN)),
    "beyond the ends": at((ALL, slice(-20, 30, 4))),
    "strided_slice": Strided((0, 0, 1), (2, 5, 7), (1, 2, 2), (ALL, EVEN, slice(1, 7, 2))),
    "strided_slice backwards": Strided((0, 4, 1), (2, -6, 7), (1, -2, 1), (ALL, slice(4, None, -2), slice(1, 7))),
    "strided_slice of fewer axes": Strided((0, 1), (2, 5), (1, 3), (ALL, slice(1, 5, 3))),
    "strided_slice with masks": Strided(
        (1, 1, 9), (2, 2, 9), (2, 3, 3), (EVEN, 1, slice(None, None, 3)),
        begin_mask=5, end_mask=5, shrink_axis_mask=2,
    ),
}  # fmt: skip


class Loss(nn.Cell):
    def __init__(self, take, factors):
        super().__init__()
        self.take, self.factors = take, factors

    def construct(self, x):
        return (self.take(x * x) * self.factors).sum()


class Slope(nn.Cell):
    """Returns the gradient, whose own gradient is of the second order."""

    def __init__(self, net):
        super().__init__()
        self.gradient = mindspore.grad(net)

    def construct(self, x):
        return (self.gradient(x) * x).sum()


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


@pytest.mark.parametrize("name", SLICES)
def test_gradient_of_slice(mode, name):
    take = SLICES[name]
    want = take(X)
    factors = np.random.default_rng(1).standard_normal(want.shape)
    places = np.zeros_like(X)
    if name == "beside rows":
        places[ROWS, ::2] = factors
    else:
        take(places)[...] = factors
    net, x = Loss(take, Tensor(factors)), Tensor(X)
    value, gradient = mindspore.value_and_grad(net)(x)
    np.testing.assert_allclose(value.asnumpy(), (take(X * X) * factors).sum(), rtol=1e-10)
    np.testing.assert_allclose(gradient.asnumpy(), 2 * X * places, rtol=1e-10)
    np.testing.assert_allclose(mindspore.grad(Slope(net))(x).asnumpy(), 4 * X * places, rtol=1e-10)
    np.testing.assert_array_equal(take(x).asnumpy(), want)


class Part(nn.Cell):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def construct(self, x, i):
        return x[i, ::2] if self.rows else x[::2]


@pytest.mark.parametrize("rows", [True, False])
def test_open_sizes_and_places(rows):
    """MindSpore's own slice takes what is known only when a graph runs."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Part(rows)
    net.set_inputs(Tensor(shape=(None, 5), dtype=mindspore.float32), mindspore.mutable(1))
    x = Tensor(X[:, :, 0], mindspore.float32)
    want = x.asnumpy()[1, ::2] if rows else x.asnumpy()[::2]
    np.testing.assert_array_equal(net(x, mindspore.mutable(1)).asnumpy(), want)


def test_slice_is_a_part_where_gradients_are_taken():
    """Writing into it writes into the whole tensor, as without the patch."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)

    def write(x):
        whole = x * 1
        part = whole[:, ::2]
        part[0] = 0.0
        return whole

    x = Tensor(X)
    value, _ = mindspore.value_and_grad(lambda x: write(x).sum() + x[:, 3:2:2].shape[1])(x)
    want = X.copy()
    want[0, ::2] = 0
    np.testing.assert_allclose(value.asnumpy(), want.sum(), rtol=1e-10)
