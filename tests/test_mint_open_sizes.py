"""Tests that what the patch replaces takes open sizes in graph mode, and an open rank where MindSpore's own takes it or
says in plain words that it cannot."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import msops

F = mint.nn.functional
RNG = np.random.default_rng(0)
IMAGES, LINES, ROWS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 6, 6), (2, 4, 6), (2, 3, 4)))
VOLUMES = RNG.standard_normal((2, 2, 2, 4, 4)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with msops.patch_mindspore():
        yield


class Call(nn.Cell):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, x):
        return self.function(x)


class Slope(nn.Cell):
    """Returns the result and the gradient of a sum of squares."""

    def __init__(self, net):
        super().__init__()
        self.net, self.gradient = net, ops.GradOperation()

    def construct(self, x):
        y = self.net(x)
        return y, self.gradient(lambda x: ops.square(self.net(x)).sum())(x)


def softmax(x):
    return F.softmax(x, -1)


def group_norm(x):
    return ops.group_norm(x, 2)


def means(x):
    return F.avg_pool2d(x, 2, divisor_override=3)


def adaptive_means(x):
    return F.adaptive_avg_pool2d(x, (3, 2))


def largest(x):
    return F.max_pool2d(x, 2)


def log_softmax(x):
    return F.log_softmax(x, 1)


def rows_without_weight(x):
    return F.layer_norm(x, (3, 4))


def nearest(x):
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


# name: what makes a net, its input, whether MindSpore's own takes an open rank
NETS = {
    "softmax": (softmax, ROWS, True),
    "silu": (F.silu, ROWS, True),
    "gelu": (ops.gelu, ROWS, True),
    "log_softmax": (log_softmax, ROWS, True),
    "group_norm": (group_norm, LINES, True),
    "GroupNorm": (lambda: mint.nn.GroupNorm(2, 4), IMAGES, True),
    "LayerNorm": (lambda: mint.nn.LayerNorm(4), ROWS, True),
    "LayerNorm of two axes": (lambda: mint.nn.LayerNorm((3, 4)), ROWS, False),
    "layer_norm without a weight": (rows_without_weight, ROWS, False),
    "BatchNorm1d": (lambda: mint.nn.BatchNorm1d(4).set_train(), LINES, False),
    "BatchNorm2d": (lambda: mint.nn.BatchNorm2d(4), IMAGES, False),
    "BatchNorm3d": (lambda: mint.nn.BatchNorm3d(2).set_train(), VOLUMES, False),
    "avg_pool2d": (means, IMAGES, False),
    "AvgPool1d": (lambda: mint.nn.AvgPool1d(2), LINES, False),
    "adaptive_avg_pool2d": (adaptive_means, IMAGES, False),
    "max_pool2d": (largest, IMAGES, True),
    "nearest": (nearest, IMAGES, True),
}


def make(name):
    what = NETS[name][0]
    made = what() if getattr(what, "__name__", "") == "<lambda>" else Call(what)
    return Slope(made)


@pytest.mark.parametrize("opens", ["samples", "all"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name != "GroupNorm")) for name in NETS]
)
def test_open_sizes(name, opens):
    x = NETS[name][1]
    want = make(name)(Tensor(x))
    net = make(name)
    net.set_inputs(
        Tensor(shape=(None, *x.shape[1:]) if opens == "samples" else (None,) * x.ndim, dtype=mindspore.float32)
    )
    for got, expected in zip(net(Tensor(x)), want):
        np.testing.assert_allclose(got.asnumpy(), expected.asnumpy(), 1e-4, 1e-5)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.wide] * (name != "silu")) for name in NETS])
def test_open_rank(name):
    _, x, is_taken = NETS[name]
    net = make(name)
    net.set_inputs(Tensor(shape=None, dtype=mindspore.float32))
    if not is_taken:
        with pytest.raises(ValueError, match="rank must be known when MindSpore compiles"):
            net(Tensor(x))
        return
    for got, expected in zip(net(Tensor(x)), make(name)(Tensor(x))):
        np.testing.assert_allclose(got.asnumpy(), expected.asnumpy(), 1e-4, 1e-5)


def padded_means(x):
    return F.avg_pool2d(x, 3, padding=1)


def test_sizes_that_must_be_known():
    net = Call(padded_means)
    net.set_inputs(Tensor(shape=(2, 4, None, None), dtype=mindspore.float32))
    with pytest.raises(
        ValueError, match=r"avg_pool2d: \(None, None\) must be known when MindSpore compiles, for padding"
    ):
        net(Tensor(IMAGES))
