import mindspore
import numpy as np
import pytest

import msops
from card import Card, chain, random, zeros
from msops.operators.quantize_rows import operators
from msops.testing.checks import Gradient, run


def quantize_rows(x, smooth=None, **_):
    """Returns codes and scales, by single operations in float32, or in float64 for longdouble, which the tests of
    entries hand over for float64."""
    wide = np.float64 if x.dtype == np.longdouble else np.float32
    y = x.astype(wide) if smooth is None else x.astype(wide) * smooth.astype(wide)
    with np.errstate(all="ignore"):
        scale = (np.abs(y).max(-1, initial=0) / wide(127)).astype(np.float32)
        has_codes = np.isfinite(scale) & (scale > 0)
        codes = np.rint(y / np.where(has_codes, scale, 1).astype(wide)[..., None])
    codes = np.where(has_codes[..., None], np.clip(codes, -127, 127), 0)
    return codes.astype(np.int8), scale


def case(rows, columns, has_smooth=False, near_halves=False):
    rows = rows if isinstance(rows, tuple) else (rows,)
    return [(*rows, columns), *[(columns,)] * has_smooth], dict(has_smooth=has_smooth, near_halves=near_halves)


class TestQuantizeRows(Card):
    function = msops.quantize_rows
    formulas = (quantize_rows,)
    cases = {
        "small": case(3, 7, True),
        "packs": case(5, 64),
        "a vector": case((), 9),
        "more axes": case((2, 3), 16, True),
        "one": case(1, 1),
        "no rows": case(0, 4, True),
        "no columns": case(3, 0),
    }
    further = {
        "a long row": case(2, 5000, True),
        "odd": case(3, 1003),
        "many rows": case(70, 136, True),
        "a warp": case(3, 200),
        "several warps": case(2, 1024),
        "a row of more packs": case(2, 17000),
        "a row beyond registers": case(2, 70000),
        "near halves": case(40, 264, near_halves=True),
        "near halves, odd": case(40, 263, near_halves=True),
    }
    small = "small"
    wrong = (
        (zeros((2, 6), (5,)), ValueError, "quantize_rows: smooth must have shape (C,) = (6,), got (5,)"),
        (zeros((2, 6), dtype=np.int32), TypeError, "quantize_rows: x must be float16, float32 or float64, got int32"),
        ([*zeros((2, 6), dtype=np.float16), *zeros((6,), dtype=np.float64)], TypeError,
         "quantize_rows: smooth must be float16 or float32, got float64"),
    )  # fmt: skip

    def operators(self, shapes=(), has_smooth=True, **_):
        operator = operators()
        return chain(operator if has_smooth else operator.without("smooth"))

    def inputs(self, shapes, dtype, seed=1, near_halves=False, **_):
        """The quotients near halves are up to two roundings away from them."""
        if not near_halves:
            return random(seed, dtype, *shapes)
        rng = np.random.default_rng(seed)
        scale = rng.random((*shapes[0][:-1], 1)) + 0.01
        x = (scale * (rng.integers(-127, 127, shapes[0]) + 0.5)).astype(dtype)
        for away in (rng.integers(-1, 2, shapes[0]), rng.integers(-1, 2, shapes[0])):
            x = np.where(away == 0, x, np.nextafter(x, np.where(away > 0, np.inf, -np.inf).astype(dtype)))
        x[..., :1] = (127 * scale).astype(dtype)
        return [x]

    def random_case(self, random):
        shapes, _ = super().random_case(random)
        return case(shapes[0][:-1], shapes[0][-1], random.random() < 0.5)


CARD = TestQuantizeRows()


class Layer(mindspore.nn.Cell):
    def construct(self, x, smooth=None):
        return msops.quantize_rows(x, smooth)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", [*CARD.cases, *CARD.further])
def test_results(mode, name, dtype):
    shapes, settings = {**CARD.cases, **CARD.further}[name]
    inputs = CARD.inputs(shapes, dtype, **settings)
    codes, scale = run(Layer(), *inputs)
    wanted, want = quantize_rows(*(each.astype(np.longdouble) if dtype == "float64" else each for each in inputs))
    assert (codes.dtype, scale.dtype) == (np.int8, np.float32)
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(scale, want)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("columns", [8, 9, 700])
def test_rows_without_codes(mode, columns, dtype):
    """Zeros, NaN of both signs, and infinities."""
    x = np.zeros((6, columns), dtype)
    x[1, 3], x[2, 5], x[3, 1], x[4, -1], x[5, 2] = np.nan, -np.inf, np.inf, -np.nan, 2
    x[1, 4] = x[4, 0] = np.inf
    codes, scale = run(Layer(), x)
    np.testing.assert_array_equal(scale, np.float32([0, np.nan, np.inf, np.inf, np.nan, 2 / 127]))
    np.testing.assert_array_equal(codes[:5], np.zeros((5, columns), np.int8))
    assert (codes[5, 2], np.abs(codes[5]).sum()) == (127, 127)


def test_halves_are_rounded_to_even(mode):
    x = np.float32([[127, 0.5, 1.5, -0.5, -2.5, 126.5]])
    codes, scale = run(Layer(), x)
    np.testing.assert_array_equal(codes, [[127, 0, 2, 0, -2, 126]])
    np.testing.assert_array_equal(scale, [1])


def test_small_numbers(mode):
    """Scales may be subnormal; below the smallest of these, codes are 0."""
    x = np.float32([[1e-43, -1e-43, 0], [1e-45, 0, 0]])
    codes, scale = run(Layer(), x)
    assert (np.abs(codes.astype(int)) <= 127).all()
    assert scale[1] == 0
    np.testing.assert_array_equal(codes[1], [0, 0, 0])


def test_smooth_of_float32(mode):
    x, smooth = np.float16([[1, 2, 3]]), np.float32([0.1, 10, 1])
    codes, scale = run(Layer(), x, smooth)
    wanted, want = quantize_rows(x, smooth)
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(scale, want)


@pytest.mark.parametrize(("inputs", "error", "words"), CARD.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, inputs, error, words):
    with pytest.raises(error) as caught:
        run(Layer(), *inputs)
    assert words in str(caught.value)


def test_no_gradient(mode):
    with pytest.raises(ValueError, match="quantize_rows: it is for inference and has no gradient"):
        run(Gradient(Layer(), 1), np.ones((2, 3), np.float32), np.ones((2, 3), np.int8), np.ones(2, np.float32))
