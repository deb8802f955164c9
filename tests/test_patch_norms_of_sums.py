"""Tests that norms of sums are one operator while MindSpore is patched, where nothing asks for gradients."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import norms_of_sums

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
TEXT = """
from mindspore import mint, nn

class OtherNorm(mint.nn.LayerNorm):
    def construct(self, input):
        return super().construct(input) * 2

class Output(nn.Cell):
    def __init__(self, norm=None, shape=6, affine=True):
        super().__init__()
        self.LayerNorm = (norm or mint.nn.LayerNorm)(shape, eps=1e-3, elementwise_affine=affine)
        self.layer_norm = self.LayerNorm
        self.layer = mint.nn.Tanh()

    def construct(self, x, y):
        {lines}
        return x
"""
LINES = {
    "one expression": "x = self.LayerNorm(self.layer(x) + y)",
    "returned": "return self.layer_norm(x + y)",
    "two statements": "x = self.layer(x)\n        x = y + x\n        x = self.layer_norm(x)",
    "beside expressions": "x = self.LayerNorm((x if x is not y else y) + (lambda z: z)(y))",
    "in a branch": "if x is not y:\n            x = y + x\n            x = self.LayerNorm(x)",
}
OTHERS = {
    "a product": "x = self.LayerNorm(x * y)",
    "another variable": "z = x + y\n        x = self.LayerNorm(z) + z",
    "used before": "x = x + y\n        y = x\n        x = self.LayerNorm(x) + y",
    "no norm": "x = self.layer(x + y)",
}


@pytest.fixture
def computed(noted):
    """Counts the calls of the operator by the patch."""
    return noted(norms_of_sums, "add_layer_norm")


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [Tensor(rng.standard_normal((3, 4, 6)).astype(dtype)) for _ in range(2)]


def made(module, **settings):
    net = module.Output(**settings)
    rng = np.random.default_rng(1)
    for each in net.trainable_params():
        each.set_data(Tensor(rng.standard_normal(each.shape).astype(np.float32)))
    return net


@pytest.fixture
def by_the_library(without):
    return without(norms_of_sums)


def assert_equal(got, want, tolerance=1e-5):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), tolerance, tolerance)


@pytest.mark.parametrize("name", LINES)
def test_norms_of_sums(load, computed, by_the_library, name):
    net, tensors = made(load(TEXT.format(lines=LINES[name]))), inputs()
    want = by_the_library(net, *tensors)
    with msops.patch_mindspore() as patch:
        assert_equal(net(*tensors), want)
        assert "add_layer_norm" in [each.operator for each in patch.recognized]
    assert len(computed) == 1


def test_halves_beside_parameters_of_float32(load, computed, by_the_library):
    net, (x, y) = made(load(TEXT.format(lines=LINES["two statements"]))), inputs(np.float16)
    want = by_the_library(net, x, y)
    with msops.patch_mindspore():
        got = net(x, y)
    assert len(computed) == 1
    assert_equal(got, want, 4e-3)


@pytest.mark.parametrize("name", LINES)
def test_gradients_are_the_librarys(load, computed, by_the_library, name):
    """A gradient would add up again what the library's own code keeps."""
    net, tensors = made(load(TEXT.format(lines=LINES[name]))), inputs()

    def gradients():
        _, (of_inputs, of_weights) = mindspore.value_and_grad(
            lambda *inputs: (net(*inputs) ** 2).sum(), (0, 1), net.trainable_params()
        )(*tensors)
        return [*of_inputs, *of_weights]

    want = by_the_library(gradients)
    with msops.patch_mindspore():
        got = gradients()
    assert not computed
    for one, two in zip(got, want, strict=True):
        assert_equal(one, two)


@pytest.mark.parametrize("name", OTHERS)
def test_other_statements(load, computed, by_the_library, name):
    net, tensors = made(load(TEXT.format(lines=OTHERS[name]))), inputs()
    want = by_the_library(net, *tensors)
    with msops.patch_mindspore():
        assert_equal(net(*tensors), want)
    assert not computed


def test_what_stays(load, computed, by_the_library):
    """Other norms, hooks, shapes and dtypes are the library's."""
    module = load(TEXT.format(lines=LINES["one expression"]))
    x, y = inputs()
    nets = made(module, norm=module.OtherNorm), made(module), made(module, affine=False), made(module)
    nets[1].LayerNorm.register_forward_hook(lambda cell, inputs, output: output * 2)
    calls = [(net, (x, y)) for net in nets[:3]] + [(nets[3], (x, y[:, :1])), (nets[3], (x, 2.0))]
    want = by_the_library(lambda: [net(*tensors) for net, tensors in calls])
    with msops.patch_mindspore() as patch:
        got = [net(*tensors) for net, tensors in calls]
        reasons = {each.reason for net in nets for each in patch.explain(net)}
    for one, two in zip(got, want, strict=True):
        assert_equal(one, two)
    assert not computed
    assert {"its norm is no LayerNorm", "a call's dtypes or shapes do not fit layer_norm"} <= reasons


@pytest.mark.wide
def test_graph_mode(load, computed, by_the_library):
    """Graph mode compiles the library's own code."""
    net, tensors = made(load(TEXT.format(lines=LINES["two statements"]))), inputs()
    want = by_the_library(net, *tensors)
    with msops.patch_mindspore():
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        assert_equal(net(*tensors), want)
    assert not computed


def test_what_msops_cannot_read(load, computed, monkeypatch):
    """A fault of msops is told, and the library's class computes."""

    def fail(tree, *_):
        raise KeyError("a fault")

    monkeypatch.setattr(norms_of_sums, "joined", fail)
    tensors = inputs()
    with msops.patch_mindspore() as patch:
        net = made(load(TEXT.format(lines=LINES["one expression"])))
        assert net(*tensors).shape == (3, 4, 6)
        assert "msops cannot read it: KeyError: 'a fault'" in {each.reason for each in patch.explain(net)}
    assert not computed
