"""Tests that `mindspore.vmap` runs over functions that the patch composes."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint

import msops
from msops.compat import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 10), reason="docs/mint.md says it of MindSpore 2.10")
RNG = np.random.default_rng(0)
X, SOURCE = RNG.standard_normal((2, 2, 3, 4)).astype(np.float32)
PLACES = np.argsort(RNG.random((2, 3, 4)), 1)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def added(x, places, source):
    return mint.scatter_add(x, 0, places, source)


def added_by_method(x, places, source):
    return x.scatter_add(-2, places, source)


def written(x, places, source):
    return mint.scatter(x, 0, places, source)


WIDE = pytest.mark.wide


@pytest.mark.parametrize("axis", [pytest.param(0, marks=WIDE), None, pytest.param(1, marks=WIDE)])
@pytest.mark.parametrize("function", [added, pytest.param(added_by_method, marks=WIDE), written])
def test_batches(mode, function, axis):
    x = X[0] if axis is None else X.transpose(1, 0, 2) if axis else X
    got = mindspore.vmap(function, (axis, 0, 0))(Tensor(x), Tensor(PLACES), Tensor(SOURCE)).asnumpy()
    want = np.stack([X[0], X[0]] if axis is None else X)
    for out, places, source in zip(want, PLACES, SOURCE):
        for k, j in np.ndindex(*source.shape):
            out[places[k, j], j] = source[k, j] + (0 if function is written else out[places[k, j], j])
    np.testing.assert_allclose(got, want, 1e-6)


@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_batches_near_zero(mode, name):
    x = np.abs(X[0]) * np.float32(1e-4)
    got = mindspore.vmap(getattr(mint, name))(Tensor(x)).asnumpy()
    np.testing.assert_allclose(got, getattr(np, name)(x), 1e-6)
