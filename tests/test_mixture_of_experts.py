"""Tests the layer that grouped_matmul, topk_gating, moe_permute and moe_unpermute make, against NumPy."""

import re

import mindspore
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor, ops

import msops
from msops.testing.checks import Gradient, run

RNG = np.random.default_rng(0)
TOLERANCE = {"float16": 3e-3, "float32": 2e-6, "float64": 1e-13}


def parameters(net):
    return {name: each.asnumpy().astype(np.float64) for name, each in net.parameters_and_names()}


def choose(net, logits):
    """Returns weights and experts as the contract of topk_gating has them, for groups whose worth is one score."""
    by_softmax = np.exp(logits - logits.max(1, keepdims=True))
    scores = by_softmax / by_softmax.sum(1, keepdims=True)
    if net.gating.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    worth = scores + parameters(net).get("correction_bias", 0)
    experts = np.argsort(-worth, 1, kind="stable")[:, : net.k]
    weights = np.take_along_axis(scores, experts, 1)
    return weights / weights.sum(1, keepdims=True), experts


def reference(net, x, capacity=None):
    """Computes each token by itself, in float64."""
    held, tokens = parameters(net), np.float64(x).reshape(-1, x.shape[-1])
    weights, experts = choose(net, tokens @ held["gate"].T)
    y, taken = np.zeros_like(tokens), np.zeros(net.num_experts, int)
    for n, token in enumerate(tokens):
        for weight, expert in zip(weights[n], experts[n]):
            taken[expert] += 1
            if capacity is not None and taken[expert] > capacity:
                continue
            gate, up = np.split(held["gate_up"][expert] @ token, 2)
            y[n] += weight * (held["down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y.reshape(x.shape)


def layer(**settings):
    mindspore.set_seed(1)
    net = msops.MixtureOfExperts(12, 20, 5, 2, **settings)
    for each in net.get_parameters():  # so that experts differ much
        each.set_data(Tensor(RNG.standard_normal(each.shape) / 3, each.dtype))
    return net


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "settings",
    [{}, dict(score="sigmoid", correction_bias=True), dict(capacity_factor=0.5)],
    ids=["softmax", "sigmoid", "capacity"],
)
def test_layer(mode, settings, dtype):
    net, x = layer(dtype=getattr(mindspore, dtype), **settings), RNG.standard_normal((3, 7, 12)).astype(dtype)
    capacity = -(-21 * 2 // 10) if "capacity_factor" in settings else None
    (y,) = run(net, x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, reference(net, x, capacity), TOLERANCE[dtype], 3 * TOLERANCE[dtype])


def test_gradients(mode):
    """Differences of the loss along a random direction of all Parameters and of x, where no choice changes."""
    net, x = layer(dtype=mindspore.float64), RNG.standard_normal((6, 12))
    dout = RNG.standard_normal((6, 12))
    trained = net.trainable_params()
    gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
    (dx,), of_parameters = gradient(net, ParameterTuple(trained))(Tensor(x), Tensor(dout))
    moves, found = [RNG.standard_normal(each.shape) for each in (x, *trained)], []
    for step in 1e-6, -1e-6:
        starts = [each.asnumpy().copy() for each in trained]
        for each, start, move in zip(trained, starts, moves[1:]):
            each.set_data(Tensor(start + step * move))
        found.append((reference(net, x + step * moves[0]) * dout).sum())
        for each, start in zip(trained, starts):
            each.set_data(Tensor(start))
    along = sum((each.asnumpy() * move).sum() for each, move in zip((dx, *of_parameters), moves))
    np.testing.assert_allclose(along, (found[0] - found[1]) / 2e-6, 1e-6)


def test_routing_is_returned(mode):
    net, x = layer(return_routing=True), RNG.standard_normal((2, 3, 12)).astype(np.float32)
    y, logits, experts = run(net, x)
    np.testing.assert_allclose(logits, x.reshape(6, 12) @ net.gate.asnumpy().T, 1e-5, 1e-6)
    np.testing.assert_array_equal(experts, choose(net, logits)[1])
    np.testing.assert_array_equal(y, run(layer_like(net), x)[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mixed_precision(mode, level, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MindSpore writes the networks of level O1 into a folder
    net, x = layer(), RNG.standard_normal((6, 12)).astype(np.float32)
    mixed = mindspore.amp.auto_mixed_precision(layer_like(net), level)
    np.testing.assert_allclose(run(mixed, x)[0], reference(net, x), 0.01, 0.01)


def layer_like(net):
    other = msops.MixtureOfExperts(12, 20, 5, 2)
    mindspore.load_param_into_net(other, net.parameters_dict())
    return other


def test_parameters():
    net = msops.MixtureOfExperts(8, 6, 4, 2, correction_bias=True, dtype=mindspore.float16)
    shapes = {name: (each.shape, str(each.dtype), each.requires_grad) for name, each in net.parameters_and_names()}
    assert shapes == {
        "gate": ((4, 8), "Float32", True),
        "gate_up": ((4, 12, 8), "Float16", True),
        "down": ((4, 8, 6), "Float16", True),
        "correction_bias": ((4,), "Float32", False),
    }
    assert repr(net).startswith("MixtureOfExperts(\n  hidden_size=8, intermediate_size=6, num_experts=4, k=2")


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(mode, tokens):
    net, x = layer(), RNG.standard_normal((2, tokens, 12)).astype(np.float32)
    np.testing.assert_allclose(run(net, x)[0], reference(net, x), 1e-5, 1e-5)
    assert run(Gradient(net, 1), x, x)[0].shape == x.shape


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(k=6), ValueError, "MixtureOfExperts: k must be at most num_experts, 5, got 6"),
        (dict(k=2, score="relu"), ValueError, "score must be one of softmax, sigmoid, got 'relu'"),
        (dict(k=2, capacity_factor=-1), ValueError, "capacity_factor must be finite and at least 0, got -1"),
        (dict(k=2, correction_bias=1), TypeError, "MixtureOfExperts: correction_bias must be a bool, got int"),
    ],
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=re.escape(words)):
        msops.MixtureOfExperts(12, 20, 5, **settings)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.zeros((2, 11), np.float32), ValueError, "MixtureOfExperts: x must have shape (..., 12), got (2, 11)"),
        (np.zeros((2, 12), np.int32), TypeError, "MixtureOfExperts: x must be float16, float32 or float64, got int32"),
    ],
)
def test_wrong_inputs(mode, x, error, words):
    with pytest.raises(error, match=re.escape(words)):
        layer()(Tensor(x))
