"""Tests that a Llama generates the same by layers and by all layers in one operator."""

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


@pytest.mark.parametrize("settings", [{}, dict(tied=True, interleaved=True)])
def test_greedy_tokens(modules, settings):
    llama, generation = modules
    net = network(llama, **settings)
    written, begin = [], [3, 14, 15, 9, 26, 5]
    for kind in (generation.CachedLlama, generation.StackedLlama):
        reader = generation.Reader(kind(net), chunks=(8,))
        written.append(list(generation.continue_text(reader, begin, 40, lambda scores: int(scores.argmax()))))
    assert len(written[0]) == 40
    assert written[0] == written[1]


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
