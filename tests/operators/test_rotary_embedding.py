import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import DTYPES, chain, length, random, zeros
from msops.compat import VERSION
from msops.operators.rotary_embedding import operators
from operator_test import Net, OperatorTest, run, run_gradient


def rotate(x, cos, sin, interleaved=False, layout="BHTD"):
    half = cos.shape[-1]
    if cos.dtype.itemsize < x.dtype.itemsize:
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    if layout == "BTHD":  # the same angles for all heads
        cos, sin = cos[..., None, :], sin[..., None, :]
    elif cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    out = np.copy(x)
    firsts = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    seconds = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., firsts], x[..., seconds]
    out[..., firsts] = a * cos - b * sin
    out[..., seconds] = b * cos + a * sin
    return (out,)


def rotate_back(dout, cos, sin, **settings):
    return rotate(dout, cos, -sin, **settings)


def case(batch, heads, length, width, half, of_batch=False, **settings):
    x = (batch, length, heads, width) if settings.get("layout") == "BTHD" else (batch, heads, length, width)
    table = (batch, length, half) if of_batch else (length, half)
    return [x, table, table], settings


PAIRS, STEPS = dict(interleaved=True), dict(layout="BTHD")
BOTH = PAIRS | STEPS
SETTINGS = {"halves": {}, "pairs": PAIRS, "halves, BTHD": STEPS, "pairs, BTHD": BOTH}


class TestRotaryEmbedding(OperatorTest):
    function = msops.rotary_embedding
    formulas = (rotate, rotate_back)
    cases = {
        "small": case(2, 3, 5, 7, 2, of_batch=True, **BOTH),
        "one": case(1, 1, 1, 2, 1),
        "empty": case(2, 3, 0, 4, 2),
        "no angles": case(2, 3, 4, 5, 0),
        "Llama": case(2, 5, 9, 64, 32),
        "large": case(2, 8, 150, 128, 64, **STEPS),
    }
    further = {
        f"{name}, {kind}{' of each sample' * of_batch}": case(*sizes, of_batch, **settings)
        for kind, settings in SETTINGS.items()
        for of_batch in (False, True)
        for name, sizes in {
            "whole rows": (2, 5, 9, 64, 32),
            "part of the rows": (2, 6, 7, 96, 16),
            "odd packs": (2, 1, 7, 40, 8),
            "odd rows": (2, 3, 11, 15, 5),
            "half a pack": (3, 2, 3, 20, 10),
            "a step": (3, 9, 1, 128, 64),
            "nothing passes": (2, 4, 3, 6, 3),
        }.items()
    } | {
        "many rows": case(2, 10, 500, 128, 64),
        "many rows, BTHD": case(2, 10, 500, 128, 48, **STEPS),
        "many pairs": case(2, 9, 600, 128, 64, of_batch=True, **PAIRS),
        "many pairs, BTHD": case(2, 9, 600, 128, 48, **BOTH),
    }  # fmt: skip
    small = "small"
    hostile = ("small", "Llama")
    roundings = 4
    second_order = True
    constants = (1, 2)
    wrong = (
        (
            zeros((1, 1, 2, 4), (2, 2), (2, 2), dtype=np.int32),
            {},
            TypeError,
            "rotary_embedding: x must be float16, float32 or float64, got int32",
        ),
        (
            [*zeros((1, 1, 2, 4)), *zeros((2, 2), (2, 2), dtype=np.float16)],
            {},
            TypeError,
            "cos must be float32, got float16",
        ),
        ([*zeros((1, 1, 2, 4), (2, 2)), *zeros((2, 2), dtype=np.float64)], {}, TypeError, "sin must be float32"),
        ([*zeros((1, 1, 2, 4), (2, 2)), 1.0], {}, TypeError, "rotary_embedding: sin must be a Tensor, got float"),
        (zeros((1, 2, 4), (2, 2), (2, 2)), {}, ValueError, "x must have shape (B, H, T, D), got (1, 2, 4)"),
        (zeros((1, 1, 2, 4), (3, 2), (3, 2)), {}, ValueError, "cos must have shape"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 1)), {}, ValueError, "sin must have shape"),
        (zeros((3, 1, 2, 4), (2, 2, 2), (2, 2, 2)), {}, ValueError, "or (B, T, d/2) = (3, 2, 2), got (2, 2, 2)"),
        (zeros((1, 1, 2, 4), (2, 3), (2, 3)), {}, ValueError, "at most half as many angles as the 4 features of x"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 2)), dict(layout="BSH"), ValueError, "must be one of BHTD, BTHD, got 'BSH'"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 2)), dict(layout=1), TypeError, "layout must be a str, got int"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 2)), dict(interleaved=1), TypeError, "interleaved must be a bool, got int"),
    )
    huge = (
        (2**31 // (64 * 48) + 7, 64, 48, {}),
        (2**31 // (64 * 50) + 7, 64, 50, BOTH),
        (2**27 + 3, 2, 8, PAIRS),
        (2**30 + 5, 1, 4, {}),
    )

    def operators(self, shapes=(), interleaved=False, layout="BHTD"):
        return chain(operators(interleaved, layout))

    def reference_gradient(self, x, cos, sin, dout, **settings):
        return *rotate_back(dout, cos, sin, **settings), np.zeros_like(cos), np.zeros_like(sin)

    def random_case(self, random):
        sizes = [length(random) for _ in range(4)]
        settings = dict(interleaved=random.random() < 0.5, layout=random.choice(("BHTD", "BTHD")))
        return case(*sizes, random.randint(0, sizes[3] // 2), random.random() < 0.5, **settings)

    def check_huge(self, gpu, places, heads, width, settings):
        (shape, table, _), settings = case(1, heads, places, width, width // 2, **settings)
        operator = self.operators(**settings)[0]
        x, cos, sin = gpu.random(*shape), gpu.random(*table), gpu.random(*table)
        out = gpu.run(operator, x, cos, sin)
        gpu.check_parts(operator, [x, cos, sin], out, places, 3, gpu.assert_equal)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_angles_in_float32(mode, settings, dtype):
    """Tables may be float32 beside float16 and float64; they are not rounded to float16."""
    shapes, settings = case(2, 3, 5, 20, 8, of_batch=True, **settings)
    (x,), tables = random(1, dtype, shapes[0]), random(2, np.float32, *shapes[1:])
    net = Net(msops.rotary_embedding, **settings)
    (want,) = rotate(x.astype(np.float64), *tables, **settings)
    (got,) = run(net, x, *tables)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == "float16" else 1e-15, atol=1e-6)
    gradients = run_gradient(net, [x, *tables], [got])
    assert [g.dtype for g in gradients] == [dtype, "float32", "float32"]
    (want,) = rotate_back(got.astype(np.float64), *tables, **settings)
    np.testing.assert_allclose(gradients[0], want, rtol=1e-3 if dtype == "float16" else 1e-15, atol=1e-6)


def test_what_passes_keeps_its_bits(mode):
    """Features beyond the angles are copied, NaN among them, and do not depend on their neighbours."""
    shapes, _ = case(1, 2, 3, 24, 4)
    x, cos, sin = random(1, np.float16, *shapes)
    x[..., 9] = np.nan
    (out,) = run(Net(msops.rotary_embedding), x, cos, sin)
    np.testing.assert_array_equal(out[..., 8:].view(np.uint16), x[..., 8:].view(np.uint16))
    assert np.isfinite(out[..., :8]).all()


def angles_of(dim, places, base):
    return np.array([[t * base ** (-2 * i / dim) for i in range(dim // 2)] for t in places])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 11])
def test_cell(mode, start, dtype):
    """The tables have the places from `start` on. Far places keep their angles, which float32 would lose."""
    net = msops.RotaryEmbedding(6, 5000, base=500.0, interleaved=True, layout="BTHD")
    assert not list(net.get_parameters())
    (x,) = random(1, dtype, (2, 7, 3, 8))
    for first in (start, 4993 - start):
        angles = angles_of(6, range(first, first + 7), 500.0)
        (want,) = rotate(x.astype(np.float64), np.cos(angles), np.sin(angles), **BOTH)
        got = net(Tensor(x), first).asnumpy()
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == "float16" else 1e-6, atol=1e-6)


@pytest.mark.skipif(VERSION < (2, 7), reason="open sizes need MindSpore 2.7")
def test_cell_of_open_length(mode):
    net, opened = (msops.RotaryEmbedding(4, 16) for _ in range(2))
    opened.set_inputs(Tensor(shape=[1, 2, None, 6], dtype=mindspore.float32))
    for places in (3, 16):
        (x,) = random(places, np.float32, (1, 2, places, 6))
        np.testing.assert_array_equal(opened(Tensor(x)).asnumpy(), net(Tensor(x)).asnumpy())
    with pytest.raises((RuntimeError, ValueError)):
        opened(Tensor(np.zeros((1, 2, 17, 6), np.float32))).asnumpy()


def test_products_depend_on_distances(mode):
    """The product of a query and a key depends on how far apart they are alone."""
    net = msops.RotaryEmbedding(64, 300)
    query, key = random(1, np.float32, (1, 1, 1, 64), (1, 1, 1, 64))
    products = [(net(Tensor(query), 17 + s).asnumpy() * net(Tensor(key), 5 + s).asnumpy()).sum() for s in (0, 100, 250)]
    np.testing.assert_allclose(products, products[0], rtol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((5, 8), ValueError, "RotaryEmbedding: dim must be even, got 5"),
        ((4, 0), ValueError, "RotaryEmbedding: max_length must be at least 1, got 0"),
        ((4, 8, 0), ValueError, "RotaryEmbedding: base must be positive, got 0"),
        ((4, 8, "10"), TypeError, "RotaryEmbedding: base must be a number, got str"),
        ((4, 8, 10.0, 0), TypeError, "rotary_embedding: interleaved must be a bool, got int"),
        ((4, 8, 10.0, False, "TBHD"), ValueError, "rotary_embedding: layout must be one of BHTD, BTHD, got 'TBHD'"),
    ],
)
def test_wrong_settings(arguments, error, words):
    with pytest.raises(error, match=words):
        msops.RotaryEmbedding(*arguments)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ((np.zeros((1, 1, 4, 4)), 5), ValueError, "start \\+ T at most max_length = 8, got 5 and T = 4"),
        ((np.zeros((1, 1, 4, 4)), -1), ValueError, "start must be at least 0"),
        ((np.zeros((1, 1, 4, 4)), 1.0), TypeError, "start must be an int, got float"),
        ((np.zeros((1, 4, 4)), 0), ValueError, "x must have four axes"),
        ((np.zeros((1, 1, 4, 2)), 0), ValueError, "at most half as many angles as the 2 features"),
    ],
)
def test_wrong_calls(mode, inputs, error, words):
    x, start = inputs
    with pytest.raises(error, match=words):
        msops.RotaryEmbedding(4, 8)(Tensor(x.astype(np.float32)), start).asnumpy()
