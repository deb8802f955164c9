"""Tests the random numbers of `mindspore.mint`: those of msops' kernels for the generator's seed and offset, in both
modes."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from scipy import stats

import msops
from msops.compat import VERSION
from msops.testing.checks import Gradient, as_tuple, run
from test_random import dropout, integers, normal, permutation, uniform

pytestmark = pytest.mark.skipif(VERSION < (2, 7), reason="mindspore.mint is newer")
SEED, STEP = 2024, 12  # each draw of MindSpore takes 12 offsets
X = np.arange(12, dtype=np.float32).reshape(3, 4) / 12


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    mint_seed(SEED)


def mint_seed(seed):
    mindspore.manual_seed(seed)


class Calls(nn.Cell):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


def calls(function, *inputs):
    return [out.asnumpy() for out in as_tuple(Calls(function)(*map(Tensor, inputs)))]


def source(draw=0):
    return np.array(SEED), np.array(STEP * draw)


def ones(*shape):
    return np.ones(shape, np.float32)


def draw_uniform(x):
    return mint.rand(3, 4), mint.rand_like(x), mint.rand((5,), dtype=mindspore.float64)


def draw_normal(x):
    return mint.randn(3, 4), mint.randn_like(x), mint.normal(1.0, 2.0, (5,)), mint.normal(x, 2.0), mint.normal(0.0, x)


def draw_integers(x):
    whole = mint.randint(3, 9, (4,)), mint.randint(7, (5,), dtype=mindspore.int32), mint.randint_like(x, -5, 5)
    return (*whole, mint.randperm(17))


def test_uniform(mode):
    got = calls(draw_uniform, X)
    for i, (value, shape) in enumerate(zip(got, ((3, 4), (3, 4), (5,)))):
        np.testing.assert_allclose(value, uniform(ones(*shape), *source(i))[0].astype(np.float64), atol=2**-23)
    assert got[2].dtype == np.float64


def test_normal(mode):
    draws = [normal(ones(*shape), *source(i))[0] for i, shape in enumerate(((3, 4), (3, 4), (5,), (3, 4), (3, 4)))]
    want = (draws[0], draws[1], 1 + 2 * draws[2], X + 2 * draws[3], X * draws[4])
    for got, expected in zip(calls(draw_normal, X), want):
        np.testing.assert_allclose(got, expected.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_integers(mode):
    settings = (((4,), 3, 9), ((5,), 0, 7), ((3, 4), -5, 5))
    *got, places = calls(draw_integers, X)
    for i, (value, (shape, low, high)) in enumerate(zip(got, settings)):
        np.testing.assert_array_equal(value, integers(ones(*shape), *source(i), low, high)[0])
    assert [value.dtype for value in got] == [np.int64, np.int32, np.float32]
    np.testing.assert_array_equal(places, permutation(ones(17), *source(3))[0])


@pytest.mark.parametrize("first", ["graph", "pynative"])
def test_modes_continue_each_other(first):
    modes = [mindspore.GRAPH_MODE, mindspore.PYNATIVE_MODE]
    for i, mode in enumerate(modes if first == "graph" else modes[::-1]):
        mindspore.set_context(mode=mode)
        (got,) = calls(mint.rand_like, X)
        np.testing.assert_allclose(got, uniform(X, *source(i))[0].astype(np.float64), atol=2**-23)


def between(x):
    return x.uniform_(-1.0, 2.0)


def around(x):
    return x.normal_(1.0, 0.5)


def times(x):
    return x.exponential_(3.0)


FILLS = {
    between: lambda: 3 * uniform(X, *source())[0] - 1,
    around: lambda: 1 + normal(X, *source())[0] / 2,
    times: lambda: -np.log1p(-uniform(X, *source())[0]) / 3,
}


@pytest.mark.parametrize("fill", FILLS)
def test_in_place(mode, fill):
    x = Tensor(X.copy())
    result = Calls(fill)(x).asnumpy()
    np.testing.assert_array_equal(x.asnumpy(), result)
    np.testing.assert_allclose(result, FILLS[fill]().astype(np.float64), rtol=1e-5, atol=1e-5)


def test_bernoulli(mode):
    (got,) = calls(mint.bernoulli, X)
    np.testing.assert_array_equal(got, uniform(X, *source())[0] < X)


def drop(x):
    return mint.nn.functional.dropout(x, 0.3)


def drop_channels(x):
    return mint.nn.functional.dropout2d(x, 0.5), mint.nn.functional.dropout2d(x, 0.5, False)


def test_dropout(mode):
    (got,) = calls(drop, X)
    np.testing.assert_allclose(got, dropout(X, *source(), 0.3)[0].astype(np.float64), rtol=1e-6)
    mint_seed(SEED)
    dx = run(Gradient(Calls(drop), 1), X, X + 1)[0]
    np.testing.assert_allclose(dx, dropout(X + 1, *source(), 0.3)[0].astype(np.float64), rtol=1e-6)


def test_dropout_of_channels(mode):
    x = np.random.default_rng(0).standard_normal((3, 5, 2, 4)).astype(np.float32)
    dropped, kept = calls(drop_channels, x)
    np.testing.assert_allclose(dropped, x * dropout(ones(3, 5, 1, 1), *source(), 0.5)[0].astype(np.float32), rtol=1e-6)
    np.testing.assert_array_equal(kept, x)


def test_a_seed_stays_with_its_draw():
    """Another seed that comes before the gradient does not change which elements are dropped."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    seed, _ = mindspore.default_generator._step(Tensor(STEP))

    def dropped(x):
        y = drop(x)
        mint_seed(SEED + 1)
        return y

    dx = mindspore.grad(dropped)(Tensor(X))
    np.testing.assert_allclose(dx.asnumpy(), dropout(ones(3, 4), *source(1), 0.3)[0].astype(np.float64), rtol=1e-6)
    assert int(seed) == SEED


WEIGHTS = np.array([[1, 2, 3, 0, 4], [5, 0, 0, 1, 0]], np.float32)


def sample(x):
    return mint.multinomial(x, 2), mint.multinomial(x, 3000, replacement=True)


def test_multinomial(mode):
    without, with_replacement = calls(sample, WEIGHTS)
    assert without.dtype == np.int64
    assert (without[:, 0] != without[:, 1]).all()
    assert sorted(without[1]) == [0, 3]
    for row, weights in zip(with_replacement, WEIGHTS):
        counts, possible = np.bincount(row, minlength=5), weights > 0
        assert not counts[~possible].any()
        assert stats.chisquare(counts[possible], 3000 * (weights / weights.sum())[possible]).pvalue > 1e-3


def test_first_of_a_sample_follows_the_weights():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    rows = Tensor(np.broadcast_to(WEIGHTS[0], (4000, 5)).copy())
    counts = np.bincount(mint.multinomial(rows, 1).asnumpy()[:, 0], minlength=5)
    assert stats.chisquare(counts[[0, 1, 2, 4]], 4000 * WEIGHTS[0][[0, 1, 2, 4]] / 10).pvalue > 1e-3


def test_wrong_arguments():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(ValueError, match=r"mint.randint: low must be less than high, got 3 and 3"):
        mint.randint(3, 3, (2,))
    with pytest.raises(ValueError, match=r"mint.multinomial: .* num_samples must be at most 5, got 6"):
        mint.multinomial(Tensor(WEIGHTS), 6)
