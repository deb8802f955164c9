"""Tests `average_gradients` in one process, with a sum over processes that are not there."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops import parallel

SHAPES = (3, 5), (), (0, 4), (70,), (2, 2), (300,), (1,), (7,)


@pytest.fixture
def gradients():
    rng = np.random.default_rng(0)
    dtypes = [ms.float32, ms.float16, ms.float32, ms.float32, ms.float16, ms.float32, ms.float32, ms.float32]
    return tuple(Tensor(rng.standard_normal(shape), dtype) for shape, dtype in zip(SHAPES, dtypes))


@pytest.mark.parametrize("limit", [1, 300, 2**26])
def test_average(monkeypatch, gradients, limit):
    """Three processes have gradients g, 2 g and 3 g."""
    sent = []

    def add(x):
        sent.append(x.nbytes)
        return x * 6

    monkeypatch.setattr(parallel, "get_group_size", lambda: 3)
    monkeypatch.setattr(parallel.GlobalComm, "INITED", True)
    monkeypatch.setattr(parallel, "_all_reduce", lambda: add)
    found = msops.average_gradients(gradients, 0.5, bucket_bytes=limit)
    for g, x in zip(gradients, found):
        assert (x.shape, x.dtype) == (g.shape, g.dtype)
        if g.size:
            np.testing.assert_allclose(x.asnumpy(), g.asnumpy(), rtol=2e-3 if g.dtype == ms.float16 else 1e-6)
    assert sum(sent) == sum(g.nbytes for g in gradients)
    assert len(sent) == {1: 7, 300: 5, 2**26: 2}[limit]


def test_one_process(gradients):
    assert all(x is g for x, g in zip(msops.average_gradients(gradients), gradients))
    found = msops.average_gradients(list(gradients), scale=0.5)
    np.testing.assert_array_equal(found[0].asnumpy(), gradients[0].asnumpy() * 0.5)


def test_wrong_arguments(gradients):
    with pytest.raises(TypeError, match="gradients must be a tuple or list of Tensors"):
        msops.average_gradients(gradients[0])
    with pytest.raises(TypeError, match="gradients must be a tuple or list of Tensors"):
        msops.average_gradients((gradients[0], None))
    with pytest.raises(TypeError, match="bucket_bytes must be an int, got float"):
        msops.average_gradients(gradients, bucket_bytes=1e6)
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        msops.average_gradients(gradients, bucket_bytes=0)
