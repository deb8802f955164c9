"""Tests that attention as diffusion models write it out is computed by flash_attention while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import written_attention

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
RNG = np.random.default_rng(0)
TEXT = """
import mindspore as ms
from mindspore import mint, nn

def least(dtype):
    return -65504.0

class Scores:
    def get_attention_scores(self, query, key, attention_mask=None):
        return mint.sigmoid(mint.bmm(query, key.swapaxes(-1, -2)))

class Attention(nn.Cell):
    def __init__(self, upcast_attention=False, upcast_softmax=False):
        super().__init__()
        self.upcast_attention, self.upcast_softmax, self.scale_sqrt = upcast_attention, upcast_softmax, 0.6

    def math_attention_op(self, query, key, value, attn_mask=None):
        if attn_mask is not None and attn_mask.dtype == ms.bool_:
            attn_mask = mint.logical_not(attn_mask) * least(query.dtype)
        more_axes = query.ndim > 3
        shape = None
        if more_axes:
            shape = query.shape
            query = query.reshape(-1, query.shape[-2], query.shape[-1])
            key = key.reshape(-1, key.shape[-2], key.shape[-1])
            value = value.reshape(-1, value.shape[-2], value.shape[-1])
        else:
            shape = None
        weights = self.get_attention_scores(query, key, attn_mask)
        hidden_states = mint.bmm(weights, value)
        if more_axes:
            hidden_states = hidden_states.reshape(*shape)
        return hidden_states

    def get_attention_scores(self, query, key, attention_mask=None):
        dtype = query.dtype
        if self.upcast_attention:
            query = query.float()
            key = key.float()
        if attention_mask is None:
            scores = mint.bmm(query * self.scale_sqrt, key.swapaxes(-1, -2) * self.scale_sqrt)
        else:
            scores = attention_mask + mint.bmm(query, key.swapaxes(-1, -2)) * self.scale_sqrt**2
        if self.upcast_softmax:
            scores = scores.float()
        weights = mint.softmax(scores, dim=-1)
        weights = weights.to(dtype)
        return weights

    def construct(self, query, key, value, mask=None):
        return self.math_attention_op(query, key, value, mask)

class Other(Attention):
    def get_attention_scores(self, query, key, attention_mask=None):
        return super().get_attention_scores(query, key, attention_mask) * 0.5

class Mixed(Scores, Attention):
    pass
"""


@pytest.fixture(autouse=True)
def computed(noted, monkeypatch):
    """Counts the calls of flash_attention by the patch, which also takes the few rows below on a GPU."""
    monkeypatch.setattr(written_attention, "SHORT", 1)
    return noted(written_attention, "flash_attention")


def inputs_of(dtype, *axes):
    return [Tensor(RNG.standard_normal((*axes, length, 8)).astype(dtype)) for length in (5, 6, 6)]


def results(net, inputs):
    def total(q, k, v):
        out = net(q, k, v)
        return (out * out).sum()

    return net(*inputs), *mindspore.grad(total, (0, 1, 2))(*inputs)


@pytest.mark.parametrize(
    ("dtype", "upcasts"), [("float16", (True, False)), ("float16", (False, True)), ("float32", (False, False))]
)
def test_blocks(load, computed, dtype, upcasts):
    module, inputs = load(TEXT), inputs_of(dtype, 2, 3)
    net = module.Attention(*upcasts)
    want = results(net, inputs)
    with msops.patch_mindspore():
        got = results(net, inputs)
    assert len(computed) == 2
    for x, y in zip(got, want):
        assert x.dtype == y.dtype
        most = (4e-3 if dtype == "float16" else 2e-6) * max(1, np.abs(y.asnumpy()).max())
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 0, most)


OTHERS = {
    "another axis": TEXT.replace("dim=-1", "dim=-2"),
    "scaled once": TEXT.replace("key.swapaxes(-1, -2) * self.scale_sqrt", "key.swapaxes(-1, -2)"),
    "keys as values": TEXT.replace("value = value.reshape(-1, value.", "value = key.reshape(-1, value."),
    "twice the result": TEXT.replace("mint.bmm(weights, value)", "mint.bmm(weights, value) * 2"),
    "weights of float32 only": TEXT.replace("scores = scores.float()", "scores = scores.float() * 2"),
    "a subclass": TEXT,
    "a mixin": TEXT,
    "an instance's": TEXT,
    "three axes": TEXT,
    "a mask": TEXT,
}


def made(module, name):
    net = module.Other() if name == "a subclass" else module.Mixed() if name == "a mixin" else module.Attention()
    if name == "an instance's":
        object.__setattr__(net, "get_attention_scores", lambda q, k, mask: mindspore.mint.bmm(q, k.swapaxes(1, 2)))
    return net


def of_variants(load):
    rng = np.random.default_rng(1)
    blocks = [Tensor(rng.standard_normal((6, n, 8)).astype(np.float32)) for n in (5, 6, 6)]
    mask = Tensor(rng.standard_normal((6, 5, 6)).astype(np.float32))
    whole = [x.reshape(2, 3, x.shape[1], 8) for x in blocks]
    return {
        name: made(load(text), name)(*(blocks if name == "three axes" else whole), mask if name == "a mask" else None)
        for name, text in OTHERS.items()
    }


def test_other_formulas_compute_as_without_the_patch(load, computed):
    want = of_variants(load)
    with msops.patch_mindspore():
        got = of_variants(load)
    assert not computed
    for name, wanted in want.items():
        np.testing.assert_allclose(got[name].asnumpy(), wanted.asnumpy(), 1e-5, 1e-5, err_msg=name)


def test_undone(load):
    module = load(TEXT)
    own = module.Attention.math_attention_op
    with msops.patch_mindspore():
        assert module.Attention.math_attention_op is not own
    assert module.Attention.math_attention_op is own


@pytest.mark.wide
def test_graph_mode(load):
    module, inputs = load(TEXT), inputs_of("float32", 2, 3)
    want = results(module.Attention(), inputs)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with msops.patch_mindspore():
        got = results(module.Attention(), inputs)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 1e-5, 1e-5)
