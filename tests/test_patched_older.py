"""Tests what mint_cases/older.py does not: refusals, and statistics that a layer keeps, while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import msops
from msops.compat import VERSION
from msops.patch import older
from msops.testing.checks import Gradient

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((1.5,), ValueError, "quantile: q must be a Tensor, or a number from 0 to 1, got 1.5"),
        ((Tensor(X[0]),), ValueError, r"quantile: q must have one axis at most, got shape \(3, 4\)"),
        ((0.5, 3), ValueError, r"quantile: axis must be one of the input's, of shape \(2, 3, 4\), got 3"),
    ],
)
def test_wrong_quantiles(mode, arguments, error, words):
    with pytest.raises(error, match=words):
        ops.quantile(Tensor(X), *arguments)


def test_quantiles_of_float16():
    with pytest.raises(TypeError, match="nanquantile: input must be float32 or float64, got Float16"):
        ops.nanquantile(Tensor(X).half(), 0.5)


def test_levels_out_of_range():
    """A Tensor's values are not known when the operator is called."""
    got = ops.quantile(Tensor(X), Tensor([-0.1, 1.0, 1.5])).asnumpy()
    np.testing.assert_array_equal(got, [np.nan, X.max(), np.nan])


@pytest.mark.skipif("config.getoption('--device-target') == 'GPU'", reason="MindSpore's own kernel runs there")
def test_statistics_of_instance_norm(mode):
    """They move as MindSpore documents: momentum times what was there, plus the rest of what is new."""
    net = nn.InstanceNorm1d(3, momentum=0.25)
    net(Tensor(X))
    mindspore.runtime.synchronize()
    np.testing.assert_allclose(net.moving_mean.asnumpy(), 0.75 * X.mean((0, 2)), 1e-5, 1e-6)
    np.testing.assert_allclose(net.moving_variance.asnumpy(), 0.25 + 0.75 * X.var(2).mean(0), 1e-5)


class Dropped(nn.Cell):
    def __init__(self, p):
        super().__init__()
        self.drop = nn.Dropout(p=p)

    def construct(self, x):
        return self.drop(x * 1)


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(older, "is_on_gpu", ops.constexpr(lambda: True))


@pytest.mark.skipif(VERSION != (2, 10), reason="other versions of MindSpore keep their own")
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_dropout_draws_from_mints_generator_on_a_gpu(mode):
    """In PyNative mode, so that a CUDA graph can draw; graph mode keeps MindSpore's own."""
    x = Tensor(np.ones((64, 64), np.float32))
    net = Dropped(0.25).set_train()
    functions = net, lambda x: ops.dropout(x, 0.25), lambda x: mint.nn.functional.dropout(x, 0.25)
    found = []
    for f in functions:
        mindspore.manual_seed(5)
        found.append(f(x).asnumpy())
    if mode == mindspore.PYNATIVE_MODE:
        np.testing.assert_array_equal(found[0], found[2])
        np.testing.assert_array_equal(found[1], found[2])
    for each in found:
        assert set(np.unique(each)) == {0, np.float32(1 / 0.75)}
        assert 0.7 < (each > 0).mean() < 0.8
    mindspore.manual_seed(5)
    gradient = Gradient(net, 1)(x, ops.ones_like(x)).asnumpy()
    assert set(np.unique(gradient)) == {0, np.float32(1 / 0.75)}
    np.testing.assert_array_equal(net.set_train(False)(x).asnumpy(), x.asnumpy())
    np.testing.assert_array_equal(ops.dropout(x, 0.25, training=False).asnumpy(), x.asnumpy())


@pytest.mark.skipif(VERSION != (2, 10), reason="other versions of MindSpore keep their own")
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_dropout_with_a_seed_is_mindspores(monkeypatch):
    monkeypatch.setattr(older, "_own_dropout", lambda *arguments: arguments)
    assert ops.dropout("x", 0.25, True, 3) == ("x", 0.25, True, 3)
    assert ops.dropout("x", 0.25, training=False) == ("x", 0.25, False, None)


def test_labels_of_many_classes_in_float16(mode):
    """MindSpore's own loss is NaN, as the sum of all logarithms is infinite in float16."""
    x, labels = 4 * RNG.standard_normal((5, 7000)).astype(np.float16), np.int32([3, 6999, -100, 0, 3])
    wide = x.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    counted = labels >= 0
    want = -logs[counted, labels[counted]].mean()
    gradient = np.exp(logs) * counted[:, None]
    gradient[counted, labels[counted]] -= 1
    for loss in (nn.CrossEntropyLoss(), ops.cross_entropy):
        value, dx = mindspore.value_and_grad(loss)(Tensor(x), Tensor(labels))
        assert value.dtype == dx.dtype == mindspore.float16
        np.testing.assert_allclose(value.asnumpy(), want, 1e-3)
        np.testing.assert_allclose(dx.asnumpy(), gradient / 4, 2e-3, 1e-4)
    assert np.isnan(ops.cross_entropy(Tensor(x), Tensor(np.full(5, -100, np.int32))).asnumpy())
    assert ops.cross_entropy(Tensor(x), Tensor(np.full(5, -100, np.int32)), reduction="sum").asnumpy() == 0


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"weight": Tensor(np.float32([0.5, 1, 2]))}])
def test_losses_that_stay(noted, settings):
    """Smoothed labels and weights, which have a gradient, are MindSpore's own."""
    calls = noted(older.loss, "cross_entropy_ext")
    x, labels = Tensor(X[:, :, 0].astype(np.float16)), Tensor([2, 0])
    settings = {name: each.half() if isinstance(each, Tensor) else each for name, each in settings.items()}
    got = ops.cross_entropy(x, labels, **settings)
    assert not calls
    assert np.isfinite(got.asnumpy())
    ops.cross_entropy(x, labels)
    assert len(calls) == 1
