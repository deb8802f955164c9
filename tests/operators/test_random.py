"""This operator serves patch_mindspore alone: msops has no public name for it."""

import math

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from scipy import stats

import msops
from card import Card, chain, length, lengths
from msops.compat import VERSION
from msops.operators import random
from msops.testing.checks import Gradient, Net, run

KEY_STEPS = 0x9E3779B9, 0xBB67AE85
FACTORS = 0xD2511F53, 0xCD9E8D57
WORD = 0xFFFFFFFF
SECOND = 1 << 63
TWO_64 = np.longdouble(2.0**64)


def philox(seed, a, b):
    """Returns four words for each counter (a, b) and a seed, which may be arrays of uint64."""
    seed, a, b = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (seed, a, b)))
    k0, k1, c0, c1, c2, c3 = (half for x in (seed, a, b) for half in (x & WORD, x >> 32))
    for _ in range(10):
        p0, p1 = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & WORD, p0 >> 32 ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return np.stack((c0, c1, c2, c3), -1)


def bits(x, seed, offset):
    """Returns 64 random bits for each element of x."""
    blocks = np.arange(-(-x.size // 4), dtype=np.uint64)
    seed, offset = (np.int64(each).view(np.uint64) for each in (seed, offset))
    high, low = philox(seed, blocks, offset), philox(seed, blocks | np.uint64(SECOND), offset)
    return (high << np.uint64(32) | low).reshape(-1)


def first(values, x):
    return values[: x.size].reshape(x.shape)


def uniform(x, seed, offset):
    return (first(bits(x, seed, offset).astype(np.longdouble) / TWO_64, x),)


def normal(x, seed, offset):
    words = bits(x, seed, offset)
    u, v = words[::2], words[1::2].astype(np.longdouble) / TWO_64
    near_one = -np.log1p(-(~u).astype(np.longdouble) / TWO_64)
    away = -np.log((u.astype(np.longdouble) + 1) / TWO_64)
    radius = np.sqrt(2 * np.where(u >> 63 == 1, near_one, away))
    angle = 2 * np.longdouble("3.14159265358979323846") * v
    return (first(np.stack((radius * np.cos(angle), radius * np.sin(angle)), -1).reshape(-1), x),)


def integers(x, seed, offset, low, high):
    width = int(high) - int(low)
    values = [int(low) + (int(each) * width >> 64) for each in bits(x, seed, offset)]
    return (first(np.array(values, np.int64), x),)


def mix(x):
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def permutation(x, seed, offset):
    n, half = x.size, 4
    while 4**half < n:
        half += 1
    mask = 2**half - 1
    seed, offset = (np.int64(each).view(np.uint64) for each in (seed, offset))
    keys = [int(key) for key in philox(seed, np.arange(4, dtype=np.uint64), offset).reshape(-1)]

    def once(i):
        left, right = i >> half, i & mask
        for key in keys:
            left, right = right, (left ^ mix(mix(right) + key & WORD)) & mask
        return left << half | right

    images = []
    for i in range(n):
        i = once(i)  # noqa: PLW2901
        while i >= n:
            i = once(i)  # noqa: PLW2901
        images.append(i)
    return (np.array(images, np.int64),)


def dropout(x, seed, offset, p):
    kept = first(bits(x, seed, offset) >> np.uint64(32), x) >= math.floor(p * 2**32 + 0.5)
    return (x * kept / (1 - p) if p < 1 else x * 0,)


FORMULAS = {each.__name__: each for each in (uniform, normal, integers, permutation, dropout)}


class Random(Card):
    """Draws numbers of the distribution that the setting names."""

    cases = {
        "uniform": ([(3, 7), (), ()], {"draws": "uniform"}),
        "no numbers": ([(0,), (), ()], {"draws": "uniform"}),
        "one number": ([(), (), ()], {"draws": "uniform"}),
        "many uniform": ([(4099,), (), ()], {"draws": "uniform"}),
        "normal": ([(3, 7), (), ()], {"draws": "normal"}),
        "many normal": ([(2, 2051), (), ()], {"draws": "normal"}),
        "integers": ([(5, 5), (), (), (), ()], {"draws": "integers"}),
        "many integers": ([(4097,), (), (), (), ()], {"draws": "integers"}),
        "permutation": ([(13,), (), ()], {"draws": "permutation"}),
        "many places": ([(1031,), (), ()], {"draws": "permutation"}),
        "dropout": ([(3, 7), (), ()], {"draws": "dropout", "p": 0.3}),
        "many dropped": ([(4097,), (), ()], {"draws": "dropout", "p": 0.5}),
        "all dropped": ([(9,), (), ()], {"draws": "dropout", "p": 1}),
    }
    small = "uniform"
    hostile = ("uniform", "normal", "integers", "permutation", "dropout")

    def operators(self, shapes=(), draws="uniform", p=0.5):
        return chain(random.dropouts(p) if draws == "dropout" else getattr(random, draws))

    def formula(self, *inputs, draws="uniform", **settings):
        return FORMULAS[draws](*inputs, **settings)

    formulas = property(lambda self: (self.formula,) * 3)

    def units(self, draws="uniform", **settings):
        return 1.25 if draws == "uniform" else 0.75  # uniform numbers are rounded down

    def random_case(self, random):
        draws = random.choice(list(FORMULAS))
        shape = (length(random),) if draws == "permutation" else lengths(random)
        if draws == "normal":  # a cosine near 0 has the error of the largest number, which a few numbers may lack
            shape = (64 + length(random),)
        settings = {"p": random.choice((0.0, 0.1, 0.5, 1.0))} if draws == "dropout" else {}
        return [shape, *[()] * (4 if draws == "integers" else 2)], {"draws": draws, **settings}

    def inputs(self, shapes, dtype, seed=1, **settings):
        x, *rest = super().inputs(shapes, dtype, seed)
        numbers = (seed * 0x12345679, 12 * seed, -3, 2**40)[: len(rest)]
        return [x, *(np.array(number, np.int64) for number in numbers)]


SOURCE = """
#include "common/philox.h"
#include "common/parallel.h"

using namespace msops;

MSOPS_ENTRY(PhiloxWords) {
  const Tensor counters = call.tensor("counters", 2), words = call.tensor("words", 2);
  call.require_shape(words, {counters.dim(0), 4});
  return call.run<uint64_t>([&](auto) {
    for (int64_t i = 0; i < counters.dim(0); ++i) {
      const uint64_t* at = counters.as<uint64_t>() + 3 * i;
      const Words found = philox(at[0], at[1], at[2]);
      for (int j = 0; j < 4; ++j) words.as<uint64_t>()[4 * i + j] = found.at[j];
    }
  });
}
"""
# Random123's kat_vectors of philox4x32-10: the key and the counter, each from the lowest word, then the words.
KNOWN = [
    ((0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**64 - 1,) * 3, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_known_words():
    counters, words = (np.array(part, np.uint64) for part in zip(*KNOWN))
    np.testing.assert_array_equal(philox(*counters.T), words)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    entry = msops.load("philox_words", SOURCE).PhiloxWords
    operator = msops.custom_op(entry, "counters(N, 3) -> words(N, 4)", dtypes=(mindspore.uint64,))
    np.testing.assert_array_equal(operator(Tensor(counters)).asnumpy(), words)


def number(value):
    return Tensor(value, mindspore.int64)


def draw(operator, n, seed=5, offset=24, dtype=np.float32, *rest):
    return operator(Tensor(np.zeros(n, dtype)), number(seed), number(offset), *rest).asnumpy()


N = 200_000


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_distributions(mode, dtype):
    uniform, normal = (draw(operator, N, dtype=dtype) for operator in (random.uniform, random.normal))
    assert uniform.dtype == normal.dtype == dtype
    assert uniform.min() >= 0
    assert uniform.max() < 1
    if dtype != np.float16:  # its steps are no continuous distribution
        assert stats.kstest(uniform.astype(np.float64), "uniform").pvalue > 1e-3
        assert stats.kstest(normal.astype(np.float64), "norm").pvalue > 1e-3
    moments = [np.mean(normal.astype(np.float64) ** k) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, (0, 1, 0, 3), atol=6 * np.sqrt(96 / N))
    neighbours = np.corrcoef(normal[:-1].astype(np.float64), normal[1:].astype(np.float64))[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(N)


def test_dtypes_agree(mode):
    """A uniform number is that of float64, rounded down."""
    exact = draw(random.uniform, 999, dtype=np.float64)
    for dtype, unit in ((np.float32, 2**-24), (np.float16, 2**-11)):
        lost = exact - draw(random.uniform, 999, dtype=dtype)
        assert (lost >= 0).all()
        assert (lost < unit).all()


def test_seeds_and_offsets(mode):
    rows = [draw(random.uniform, 1000, *source) for source in ((5, 24), (5, 24), (6, 24), (5, 36), (-5, 24))]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert all(np.abs(rows[0] - row).min() < np.abs(rows[0] - row).max() for row in rows[2:])
    assert all((rows[0] == row).mean() < 0.01 for row in rows[2:])


@pytest.mark.parametrize(("low", "high"), [(0, 6), (-(2**63), 2**63 - 1), (-3, -2)])
def test_integers(mode, low, high):
    got = draw(random.integers, N, 5, 24, np.float32, number(low), number(high))
    assert got.dtype == np.int64
    assert got.min() >= low
    assert got.max() < high
    counts = np.histogram((got.astype(np.float64) - low) / (high - low), 6, (0, 1))[0]
    assert high - low == 1 or stats.chisquare(counts).pvalue > 1e-3


def test_permutations(mode):
    for n in (0, 1, 2, 17, 1000, 70_000):
        np.testing.assert_array_equal(np.sort(draw(random.permutation, n)), np.arange(n))


def test_all_permutations_are_equally_likely():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, seed = Tensor(np.zeros(4, np.float32)), number(9)
    rows = [tuple(random.permutation(x, seed, number(12 * i)).asnumpy()) for i in range(2400)]
    counts = list({row: rows.count(row) for row in rows}.values())
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def dropped(x, seed, offset, p=0.3):
    return random.dropout(x, p, seed, offset)


@pytest.mark.parametrize("p", [0, 0.3, 0.5, 1])
def test_dropout(mode, p):
    x, dy = np.full(N, 2, np.float32), np.full(N, 3, np.float32)
    source = np.array(7), np.array(12)
    (y,) = run(Net(dropped, p=p), x, *source)
    kept = y != 0
    assert abs(kept.mean() - (1 - p)) <= 5 * np.sqrt(p * (1 - p) / N)
    scale = 1 / (1 - p) if p < 1 else 0
    np.testing.assert_allclose(y, kept * 2 * scale, rtol=1e-6)
    dx = run(Gradient(Net(dropped, p=p), 3), x, *source, dy)[0]
    np.testing.assert_allclose(dx, kept * 3 * scale, rtol=1e-6)


@pytest.mark.skipif(VERSION < (2, 7), reason="PyNative mode has no second order there, and graph mode makes p float32")
def test_second_gradient_of_dropout(mode):
    rng = np.random.default_rng(0)
    x, dy, ddx = (rng.standard_normal(20) for _ in range(3))
    source = np.array(7), np.array(12)
    gradient = Gradient(Net(dropped), 3)
    found = run(Gradient(gradient, 4), x, *source, dy, ddx, *(np.zeros((), np.int64) for _ in range(2)))
    np.testing.assert_allclose(found[3], dropout(ddx, *source, 0.3)[0], rtol=1e-12)


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
def test_wrong_probability(mode, p):
    with pytest.raises(ValueError, match="dropout: p must be"):
        run(Net(dropped, p=p), np.ones(3, np.float32), np.array(1), np.array(2))
