"""Tests that silu after a GroupNorm is computed by group_norm while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import normed_activations

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
TEXT = """
from mindspore import mint, nn

class OtherNorm(mint.nn.GroupNorm):
    def construct(self, input):
        return super().construct(input) * 2

class OtherSiLU(mint.nn.SiLU):
    def construct(self, input):
        return super().construct(input) * 2

class Block(nn.Cell):
    def __init__(self, norm=None, activation=mint.nn.SiLU, kind="shift"):
        super().__init__()
        norm = norm or mint.nn.GroupNorm
        self.norm1, self.norm2, self.norm3 = norm(2, 6), norm(3, 6, 1e-3), norm(2, 6)
        self.nonlinearity, self.kind = activation(), kind

    def construct(self, x, shift):
        y = self.norm1(x)
        y = self.nonlinearity(y)
        if self.kind == "shift":
            y = y + shift
            y = self.norm2(y)
        elif self.kind == "scale":
            y = self.norm2(y)
            y = y * shift
        elif self.kind == "none":
            y = y * 2
        else:
            if shift is None:
                raise ValueError("no shift")
            y = self.norm2(y)
        y = self.nonlinearity(y)
        {more}
        return y
"""
OTHERS = {
    "another variable": ("y = self.norm3(y)\n        z = self.nonlinearity(x)", 2),
    "another argument": ("y = self.norm3(y)\n        y = self.nonlinearity(x)", 2),
    "the norm is used again": ("z = self.norm3(y)\n        y = self.nonlinearity(y)\n        y = y + z", 2),
    "something between": ("y = self.norm3(y)\n        y = y + 1\n        y = self.nonlinearity(y)", 2),
    "the activation first": ("y = self.nonlinearity(y)\n        y = self.norm3(y)", 2),
    "of an expression": ("y = self.norm3(y)\n        y = self.nonlinearity(y + 1)", 2),
    "another branch": (
        "if self.kind:\n            y = self.norm3(y)\n        else:\n            y = self.nonlinearity(y)",
        2,
    ),
    "another norm": ("y = self.norm3(x)\n        y = self.nonlinearity(y)", 3),
}


@pytest.fixture
def computed(noted):
    """Counts the calls of group_norm with silu by the patch."""
    return noted(normed_activations, "group_norm")


def inputs():
    rng = np.random.default_rng(0)
    return (Tensor(rng.standard_normal(shape).astype(np.float32)) for shape in ((2, 6, 4, 5), (2, 6, 1, 1)))


def results(net, x, shift):
    """Returns the result and its gradients."""
    gradients = mindspore.grad(lambda *inputs: (net(*inputs) ** 2).sum(), (0, 1), net.trainable_params())(x, shift)
    return [net(x, shift), *gradients[0], *gradients[1]]


def assert_equal(got, want):
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one.asnumpy(), two.asnumpy(), 1e-4, 1e-4)


def test_silu_after_group_norm(load, computed):
    module, (x, shift) = load(TEXT.format(more="")), inputs()
    nets = [module.Block(kind=kind) for kind in ("shift", "scale", "none", "last")]

    def all_results():
        return [*results(nets[0], x, shift), *(net(x, shift) for net in nets[1:])]

    want = all_results()
    with msops.patch_mindspore():
        got = all_results()
        assert len(computed) == 2 * 2 + 1 + 1 + 2
        load(TEXT.format(more="")).Block()(x, shift)
        assert len(computed) == 10
    assert_equal(got, want)
    assert_equal(all_results(), want)
    assert len(computed) == 10


@pytest.mark.wide
def test_graph_mode(load, computed):
    """Graph mode compiles the library's own code."""
    net, (x, shift) = load(TEXT.format(more="")).Block(), inputs()
    want = net(x, shift)
    with msops.patch_mindspore():
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        assert_equal([net(x, shift)], [want])
    assert not computed


def test_what_stays(load, computed):
    """Other Cells, hooks and dtypes are the library's, and so are other statements."""
    module, (x, shift) = load(TEXT.format(more="")), inputs()
    mint = mindspore.mint.nn

    def all_results():
        nets = [module.Block(module.OtherNorm), module.Block(mint.GroupNorm, module.OtherSiLU)]
        nets += [module.Block(mint.GroupNorm, mint.ReLU), module.Block()]
        nets[-1].nonlinearity.register_forward_hook(lambda cell, arguments, out: out * 2)
        return [net(x, shift) for net in nets], nets

    want, _ = all_results()
    with msops.patch_mindspore() as patch:
        name = f"{module.__name__}.Block.construct"
        assert (name, "msops.group_norm") in patch.recognized
        got, nets = all_results()
        assert not computed
        assert (name, "its norm is no GroupNorm, or its activation is another one than silu") in patch.explain(nets[0])
    assert_equal(got, want)


def test_other_statements(load, computed):
    x, shift = inputs()
    want = {name: load(TEXT.format(more=more)).Block()(x, shift) for name, (more, _) in OTHERS.items()}
    with msops.patch_mindspore():
        for name, (more, count) in OTHERS.items():
            computed.clear()
            got = load(TEXT.format(more=more)).Block()(x, shift)
            assert len(computed) == count, name
            assert_equal([got], [want[name]])
