"""Tests that loss functions of model libraries give logits of float16 to cross_entropy while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import losses, models

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
TEXT = """
from mindspore import mint, nn

def of_rows(source, target, count=None, ignore_index=-100, **kwargs):
    reduction = "sum" if count is not None else "mean"
    loss = mint.nn.CrossEntropyLoss(ignore_index=ignore_index, reduction=reduction)(source, target)
    if reduction == "sum":
        loss = loss / count
    return loss

def causal(logits, labels, size, count=None, ignore_index=-100, shifted=None, **kwargs):
    # cast
    logits = logits.float()
    if shifted is None:
        labels = mint.nn.functional.pad(labels, (0, 1), value=ignore_index)
        shifted = labels[..., 1:].contiguous()
    logits = logits.view(-1, size)
    shifted = shifted.view(-1)
    loss = of_rows(logits, shifted, count, ignore_index, **kwargs)
    return loss

class Model(nn.Cell):
    @property
    def loss_function(self):
        return getattr(self, "own_loss", causal)

    @loss_function.setter
    def loss_function(self, value):
        self.own_loss = value

    def construct(self, x, labels, **named):
        return self.loss_function(logits=x, labels=labels, size=x.shape[-1], **named)
"""
NAMED = {
    "mean": {},
    "count": dict(count=7),
    "a count of a Tensor": dict(count=Tensor(7)),
    "another label": dict(ignore_index=3, labels=Tensor([[1, 2, 3], [0, 3, 4]])),
    "shifted": dict(shifted=Tensor([[1, 2, 3], [0, -100, 1]])),
}
OTHERS = {
    "a factor": ("logits = logits.view(-1, size)", "logits = (logits * 1.5).view(-1, size)"),
    "a shape": ("shifted = shifted.view(-1)", "shifted = shifted.view(logits.shape[0])"),
    "another cast": ("logits = logits.float()", "logits = logits.float().half()"),
    "read twice": ("    return loss\n\nclass", "    return loss + logits.sum()\n\nclass"),
    "another reduction": ('"sum" if count', '"none" if count'),
    "another mean": ("    return loss\n\ndef causal", "    return loss * 2\n\ndef causal"),
    "weights": ("reduction=reduction)", "reduction=reduction, label_smoothing=0.1)"),
    "another default": ("count=None, ignore_index=-100, **kwargs", "count=None, ignore_index=2, **kwargs"),
}
LABELS = Tensor([[1, 2, 3], [0, -100, 4]])


@pytest.fixture(autouse=True)
def computed(noted):
    """Counts the calls of the operator by the patch."""
    return noted(losses, "cross_entropy")


def logits(dtype=np.float16):
    return Tensor(np.random.default_rng(0).standard_normal((2, 3, 5)).astype(dtype))


def results(net, x, labels=LABELS, **named):
    """Returns the loss and its gradient."""
    return [net(x, labels, **named), mindspore.grad(lambda x: net(x, labels, **named))(x)]


@pytest.fixture
def by_the_library(without):
    return without(losses)


def assert_equal(got, want):
    for one, two in zip(got, want, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one.asnumpy(), two.asnumpy(), 1e-5, 1e-5 if one.ndim == 0 else 2e-4)


@pytest.mark.parametrize("name", NAMED)
def test_losses(load, computed, by_the_library, name):
    net = load(TEXT).Model()
    want = by_the_library(results, net, logits(), **NAMED[name])
    with msops.patch_mindspore() as patch:
        got = results(net, logits(), **NAMED[name])
        assert any(each.operator == "msops.cross_entropy" for each in patch.recognized)
    assert len(computed) == 2
    assert got[0].dtype == mindspore.float32
    assert_equal(got, want)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(load, computed, by_the_library, name):
    old, new = OTHERS[name]
    assert old in TEXT
    net = load(TEXT.replace(old, new)).Model()
    want = by_the_library(results, net, logits())
    with msops.patch_mindspore() as patch:
        assert_equal(results(net, logits()), want)
        assert not any("causal" in each.name for each in patch.recognized)
        assert any("causal" in each.name for each in patch.explain(net))
    assert not computed


def test_what_stays(load, computed, by_the_library, monkeypatch):
    """Logits of float32, a function that a program puts in, and what the module calls so later are the library's."""
    module = load(TEXT)
    nets = [module.Model() for _ in range(3)]
    nets[1].loss_function = lambda logits, labels, size: logits.sum()

    def all_results():
        found = [nets[0](logits(np.float32), LABELS), nets[1](logits(), LABELS)]
        with monkeypatch.context() as context:
            context.setattr(module, "of_rows", lambda logits, labels, *_: logits.mean())
            found.append(nets[2](logits(), LABELS))
        return found

    want = by_the_library(all_results)
    with msops.patch_mindspore() as patch:
        assert_equal(all_results(), want)
        assert "a call's dtypes or shapes are not those of rows of float16" in {
            each.reason for each in patch.explain(nets[0])
        }
    assert not computed
    assert module.Model.loss_function.fget(nets[0]) is module.causal


def test_what_msops_cannot_read(load, computed, monkeypatch):
    """A fault of msops is told, and the library's function computes."""

    def fail(own):
        raise KeyError("a fault")

    monkeypatch.setattr(models, "losing", fail)
    with msops.patch_mindspore() as patch:
        net = load(TEXT).Model()
        assert net(logits(), LABELS).shape == ()
        assert "msops cannot read it: KeyError: 'a fault'" in {each.reason for each in patch.explain(net)}
    assert not computed
