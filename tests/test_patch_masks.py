"""Tests that masks which a library makes of whole numbers get no gradient, and all else keeps its own."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops

KEPT = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)


class Mixin:
    def get_extended_attention_mask(self, attention_mask, dtype):
        return (1.0 - attention_mask[:, None, None, :].to(dtype)) * -1e4


def hidden(mask, places):
    return mask[:, None, None, :places] == 0


def _expand_mask(mask, dtype, places=4):
    return ops.masked_fill(ops.zeros((2, 1, 1, 4), dtype), hidden(mask, places), -1e4)


class Model(nn.Cell, Mixin):
    """Attends to itself, as models of mindone do. It keeps its masks in PyNative mode."""

    def __init__(self, by_method):
        super().__init__()
        self.by_method, self.seen = by_method, []
        self.keeps = mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
        self.dense = nn.Dense(8, 8, weight_init=Tensor(np.eye(8, dtype=np.float32)), has_bias=False)

    def construct(self, x, attention_mask):
        make = self.get_extended_attention_mask if self.by_method else _expand_mask
        bias = make(attention_mask, dtype=mindspore.float32)
        if self.keeps:
            self.seen.append(bias)
        x = self.dense(x).expand_dims(2)
        return msops.flash_attention(x, x, x, bias=bias, layout="BTHD").sum()


def trained(model, mask):
    return mindspore.value_and_grad(model, None, model.trainable_params())(Tensor(X), Tensor(mask))


def is_marked(model):
    return [each._requires_grad for each in model.seen]


@pytest.mark.parametrize("by_method", [True, False])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, bool, np.float32])
def test_masks(mode, dtype, by_method):
    wanted, alone = trained(own := Model(by_method), KEPT.astype(dtype)), is_marked(own)
    with msops.patch_mindspore():
        got = trained(model := Model(by_method), KEPT.astype(dtype))
    for each, right in zip((got[0], *got[1]), (wanted[0], *wanted[1])):
        np.testing.assert_allclose(each.asnumpy(), right.asnumpy(), rtol=1e-5, atol=1e-6)  # on a GPU sums differ
    if mode == "pynative":
        assert alone == [True]
        assert is_marked(model) == [dtype == np.float32]


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_masks_that_are_learned(mode):
    model = Model(True)
    with msops.patch_mindspore():
        dmask = mindspore.grad(model, 1)(Tensor(X), Tensor(KEPT.astype(np.float32) + 1e-5))
    assert np.abs(dmask.asnumpy()).max() > 0


def test_makers_are_back():
    own = Mixin.get_extended_attention_mask, _expand_mask
    with msops.patch_mindspore() as patch:
        found = [each.name for each in patch.recognized if each.name.startswith(__name__)]
        assert found == [f"{__name__}.Mixin.get_extended_attention_mask", f"{__name__}._expand_mask"]
        assert Mixin.get_extended_attention_mask is not own[0]
    assert (Mixin.get_extended_attention_mask, _expand_mask) == own
