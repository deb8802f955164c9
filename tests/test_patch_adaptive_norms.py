"""Tests that norms with a scale and a shift for each sample are one operator while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import adaptive_norms
from patched import assert_equal, results

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
TEXT = """
from mindspore import mint, nn

class OtherNorm(mint.nn.LayerNorm):
    def construct(self, input):
        return super().construct(input) * 2

class Block(nn.Cell):
    def __init__(self, norm=None, affine=False, shape=6):
        super().__init__()
        norm = norm or mint.nn.LayerNorm
        self.norm1, self.norm2, self.norm = (norm(shape, eps=1e-3, elementwise_affine=affine) for _ in range(3))
        self.other = mint.nn.Tanh()

    def construct(self, x, scale, shift):
        {lines}
        return y
"""
LINES = {
    "one expression": "y = self.norm1(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)",
    "two statements": "y = self.norm2(x)\n        y = y * (1 + scale[:, None]) + shift[:, None]",
    "of itself": "y = x\n        y = self.norm(y)\n        y = y * (1 + scale[:, None]) + shift[:, None]",
    "a factor alone": "y = (self.norm1(x * 2) * scale.expand_dims(axis=1) + shift[:, None, :]).float()",
    "in a branch": "y = x\n        if x is not scale:\n            y = self.norm(y)\n"
    "            y = y * (1 + scale[:, None]) + shift[:, None]",
    "twice": "y = self.norm1(x) * (1 + scale[:, None]) + shift[:, None]\n"
    "        y = self.norm2(y) * (1 + shift[:, None]) + scale[:, None]",
}
OTHERS = {
    "no norm": "y = self.other(x) * (1 + scale[:, None]) + shift[:, None]",
    "another variable": "z = self.norm1(x)\n        y = x * (1 + scale[:, None]) + shift[:, None]",
    "used again": "z = self.norm1(x)\n        y = z * (1 + scale[:, None]) + shift[:, None]\n        y = y + z",
    "its own scale": "y = self.norm1(x)\n        y = y * (1 + y) + shift[:, None]",
    "a difference": "y = self.norm1(x) * (1 + scale[:, None]) - shift[:, None]",
    "no shift": "y = self.norm1(x) * (1 + scale[:, None])",
    "a call in the scale": "y = self.norm1(x) * self.other(scale)[:, None] + shift[:, None]",
    "something between": "y = self.norm1(x)\n        y = y + 1\n        y = y * scale[:, None] + shift[:, None]",
}


@pytest.fixture
def computed(noted):
    """Counts the calls of the operator by the patch."""
    return noted(adaptive_norms, "layer_norm_of_samples")


def inputs(dtype=np.float32, samples=3):
    rng = np.random.default_rng(0)
    return [Tensor(rng.standard_normal(shape).astype(dtype)) for shape in ((samples, 4, 6), (samples, 6), (samples, 6))]


@pytest.fixture
def by_the_library(without):
    return without(adaptive_norms)


@pytest.mark.parametrize("name", LINES)
def test_norms_of_samples(load, computed, by_the_library, name):
    module = load(TEXT.format(lines=LINES[name]))
    net, tensors = module.Block(), inputs()
    want = by_the_library(results, net, *tensors)
    with msops.patch_mindspore() as patch:
        got = results(net, *tensors)
        assert len(computed) == (4 if name == "twice" else 2)
        assert any(each.operator == "msops.layer_norm" for each in patch.recognized)
        assert load(TEXT.format(lines=LINES[name])).Block()(*tensors).shape == want[0].shape
    assert_equal(got, want, 1e-4)


def test_halves(load, computed, by_the_library):
    net, tensors = load(TEXT.format(lines=LINES["one expression"])).Block(), inputs(np.float16)
    want = by_the_library(results, net, *(each.astype(mindspore.float32) for each in tensors))
    with msops.patch_mindspore():
        got = results(net, *tensors)
    assert len(computed) == 2
    assert_equal(got, [each.astype(mindspore.float16) for each in want], 2e-2)


def test_parameters_of_the_norm(load, computed, by_the_library):
    """They are multiplied into the scale and the shift, and have their gradients. Of other dtypes they stay."""
    module, tensors = load(TEXT.format(lines=LINES["two statements"])), inputs()
    net = module.Block(affine=True)
    rng = np.random.default_rng(1)
    for each in net.norm2.trainable_params():
        each.set_data(Tensor(rng.standard_normal(6).astype(np.float32)))

    def all_results():
        weights = net.norm2.trainable_params()
        _, (of_inputs, of_weights) = mindspore.value_and_grad(
            lambda *inputs: (net(*inputs) ** 2).sum(), (0, 1, 2), weights
        )(*tensors)
        return [net(*tensors), *of_inputs, *of_weights]

    want = by_the_library(all_results)
    with msops.patch_mindspore():
        got = all_results()
        assert len(computed) == 2
        net.norm2.to_float(mindspore.float32)
        net(*inputs(np.float16))
    assert len(got) == 6
    assert len(computed) == 2
    assert_equal(got, want, 1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_other_statements(load, computed, by_the_library, name):
    net, tensors = load(TEXT.format(lines=OTHERS[name])).Block(), inputs()
    want = by_the_library(results, net, *tensors)
    with msops.patch_mindspore():
        assert_equal(results(net, *tensors), want, 1e-4)
    assert not computed


def test_what_stays(load, computed, by_the_library):
    """Other Cells, hooks, shapes and dtypes are the library's."""
    module = load(TEXT.format(lines=LINES["one expression"]))
    x, scale, shift = inputs()
    nets = module.Block(norm=module.OtherNorm), module.Block(), module.Block(shape=(4, 6))
    nets[1].norm1.register_forward_hook(lambda cell, inputs, output: output * 2)
    calls = [(net, (x, scale, shift)) for net in nets]
    calls.append((module.Block(), (x, scale[:1], shift)))  # all samples have one scale
    calls.append((module.Block(), inputs(samples=40)))
    calls.append((module.Block(), (x, scale.astype(mindspore.float16), shift)))
    want = by_the_library(lambda: [net(*tensors) for net, tensors in calls])
    with msops.patch_mindspore() as patch:
        assert_equal([net(*tensors) for net, tensors in calls], want, 1e-4)
        reasons = {each.reason for net in nets for each in patch.explain(net)}
    assert not computed
    assert {"its norm is no LayerNorm", "a call's dtypes or shapes do not fit layer_norm"} <= reasons


@pytest.mark.wide
def test_graph_mode(load, computed, by_the_library):
    """Graph mode compiles the library's own code."""
    net, tensors = load(TEXT.format(lines=LINES["two statements"])).Block(), inputs()
    want = by_the_library(net, *tensors)
    with msops.patch_mindspore():
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        assert_equal([net(*tensors)], [want], 1e-4)
    assert not computed
