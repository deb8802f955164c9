"""Tests that a Llama generates the same by layers, by all layers in one operator, and several texts at once."""

import importlib
import sys

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from child import ROOT
from msops.compat import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 9), reason="the examples are for the newest version of MindSpore")
SIZES = dict(vocabulary=50, layers=3, width=48, heads=6, kv_heads=2, length=64, hidden=80)


@pytest.fixture(scope="module")
def modules():
    """Returns the modules llama and generation of the examples."""
    kept = list(sys.path)
    sys.path[:0] = [str(ROOT / "examples" / "smollm"), str(ROOT / "examples")]
    yield importlib.import_module("llama"), importlib.import_module("generation")
    sys.path[:] = kept


def network(llama, **settings):
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(1)
    net = llama.Llama(msops, **SIZES, **settings)
    rng = np.random.default_rng(0)
    for parameter in net.get_parameters():
        if parameter.ndim == 1:  # the norms, which would all begin as ones
            parameter.set_data(Tensor(rng.uniform(0.5, 1.5, parameter.shape), parameter.dtype))
    return net


def best(scores):
    return int(scores.argmax())


@pytest.mark.wide
@pytest.mark.parametrize("settings", [{}, dict(tied=True, interleaved=True)])
def test_greedy_tokens(modules, settings):
    llama, generation = modules
    net = network(llama, **settings)
    written, begin = [], [3, 14, 15, 9, 26, 5]
    for kind in (generation.CachedLlama, generation.StackedLlama):
        reader = generation.Reader(kind(net), chunks=(8,))
        written.append(list(generation.continue_text(reader, begin, 40, best)))
    assert len(written[0]) == 40
    assert written[0] == written[1]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [mindspore.float32, mindspore.float16])
def test_scores_and_caches(modules, dtype):
    llama, generation = modules
    net = network(llama, dtype=dtype)
    tokens = np.random.default_rng(2).integers(0, 50, (2, 11)).astype(np.int32)
    found = []
    for kind in (generation.CachedLlama, generation.StackedLlama):
        cached, scores = kind(net, 2), []
        for begin, end in ((0, 8), (8, 9), (9, 11)):
            places = Tensor([begin], mindspore.int32), Tensor([end - begin - 1], mindspore.int32)
            scores.append(cached(Tensor(tokens[:, begin:end]), *places).asnumpy())
        caches = []
        for parameters in (cached.keys, cached.values):
            rows = parameters if isinstance(parameters, tuple) else [parameters]
            caches.append(np.concatenate([each.asnumpy() for each in rows]).reshape(3, 2, 64, 2, 8)[:, :, :11])
        found.append([*scores, *caches])
    tolerance = 3e-2 if dtype == mindspore.float16 else 1e-5
    for stacked, by_layers in zip(*reversed(found)):
        np.testing.assert_allclose(stacked, by_layers, tolerance, tolerance)


@pytest.mark.parametrize("steps", [*(pytest.param(steps, marks=pytest.mark.wide) for steps in (0, 1)), 5])
def test_several_texts_at_once(modules, steps):
    """Seven texts of different lengths in three places; one fills the cache, and some end early."""
    llama, generation = modules
    net = network(llama)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 50, length).tolist() for length in (5, 20, 1, 61, 9, 30, 64)]
    alone, ends = generation.StackedLlama(net), {7, 19}
    expected = [list(generation.continue_text(generation.Reader(alone, (8,)), text, 12, best, ends)) for text in texts]
    lengths = [len(each) for each in expected]
    assert len(set(lengths)) > 2
    assert lengths[3] <= 4
    cell = generation.StackedLlama(net, 3)
    cell, choose = (generation.Greedy(cell, steps), list) if steps else (cell, best)
    found, order = [[] for _ in texts], []
    for i, token in generation.continue_texts(cell, texts, 12, choose, ends, (8,)):
        found[i].append(token)
        order.append(i)
    assert found == expected
    assert order != sorted(order)
    with pytest.raises(generation.TextError, match="Text 1 must have 1 to 64 tokens, got 65"):
        next(generation.continue_texts(cell, [[1], [1] * 65], 1, choose))
    with pytest.raises(generation.TextError, match="Text 0 must have 1 to 64 tokens, got 0"):
        next(generation.continue_texts(cell, [[]], 1, choose))
    assert list(generation.continue_texts(cell, texts, 0, choose)) == []


def test_bias(modules):
    """A Qwen2 has a bias of queries, keys and values, and Llama 3.1 turns some pairs of features more slowly."""
    llama, generation = modules
    net = network(llama, bias=True, slower=np.array([1.0, 1.5, 4.0, 8.0]))
    rng = np.random.default_rng(4)
    for name, parameter in net.parameters_and_names():
        if name.endswith("bias"):
            parameter.set_data(Tensor(rng.standard_normal(parameter.shape), parameter.dtype))
    tokens = np.array([[3, 14, 15, 9, 26, 5]], np.int32)
    expected = net(Tensor(tokens)).asnumpy()[0, -1]
    places = Tensor([0], mindspore.int32), Tensor([5], mindspore.int32)
    np.testing.assert_allclose(generation.StackedLlama(net)(Tensor(tokens), *places).asnumpy()[0], expected, 1e-5, 1e-5)
