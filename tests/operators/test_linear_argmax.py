import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import Card, chain, length, random, zeros
from msops.operators.linear_argmax import operators
from msops.testing.checks import Gradient, run


def linear_argmax(x, weight, bias=None, **_):
    y = x @ weight.T
    y = y if bias is None else y + bias
    return y, y.argmax(-1).astype(np.int32)


def case(rows, outputs, width, has_bias=False):
    rows = rows if isinstance(rows, tuple) else (rows,)
    return [(*rows, width), (outputs, width), *[(outputs,)] * has_bias], dict(has_bias=has_bias)


class TestLinearArgmax(Card):
    function = msops.linear_argmax
    formulas = (linear_argmax,)
    cases = {
        "one row": case(1, 100, 64),
        "few rows": case(3, 37, 24, True),
        "more axes": case((2, 3), 33, 16),
        "odd": case(7, 35, 13, True),
        "many rows": case(50, 70, 32),
        "a single output": case(5, 1, 8),
        "no rows": case(0, 4, 8),
        "no features": case(2, 4, 0, True),
    }
    further = {
        "a vector": case((), 40, 16, True),
        "one long row": case(1, 1003, 264, True),
        "8 rows": case(8, 1000, 128, True),
        "9 rows": case(9, 1000, 129, True),
        "long rows": case(2, 70000, 24),
        "long rows with a bias": case(3, 5001, 8, True),
        "a long row with a bias": case(1, 4097, 32, True),
    }
    small = "few rows"
    hostile = ("few rows", "odd")
    wrong = (
        (zeros((2, 6), (5, 7)), {}, ValueError, "linear_argmax: weight must have shape (V, C) = (5, 6), got (5, 7)"),
        (zeros((2, 6), (6,)), {}, ValueError, "linear_argmax: weight must have shape (V, C)"),
        (zeros((2, 6), (5, 6), (6,)), {}, ValueError, "linear_argmax: bias must have shape (V,) = (5,), got (6,)"),
        (zeros((2, 6), (0, 6)), {}, ValueError, "weight must have at least 1 row and less than 2^31, got 0"),
        (zeros((2, 6), (5, 6), dtype=np.int32), {}, TypeError, "linear_argmax: x must be float16, float32 or float64"),
    )

    def operators(self, shapes=(), has_bias=True):
        operator = operators()
        return chain(operator if has_bias else operator.without("bias"))

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Small whole numbers, so that sums are exact, and often equal."""
        return [np.asarray(np.round(each), dtype) for each in random(seed, np.float64, *shapes)]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        exact = {0.1: 0.125, 1: 1, 5: 4}[scale]  # powers of 2, which keep sums exact
        return super().entry_calls(shapes, settings, dtype, seed, exact, parts)

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def random_case(self, random):
        return case(length(random), 1 + length(random), length(random), random.random() < 0.5)


CARD = TestLinearArgmax()


class Layer(mindspore.nn.Cell):
    def construct(self, x, weight, bias=None):
        return msops.linear_argmax(x, weight, bias)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", [*CARD.cases, *CARD.further])
def test_results(mode, name, dtype):
    shapes, _ = {**CARD.cases, **CARD.further}[name]
    inputs = CARD.inputs(shapes, dtype)
    y, index = run(Layer(), *inputs)
    want_y, want_index = linear_argmax(*(each.astype(np.float64) for each in inputs))
    assert (y.dtype, index.dtype) == (dtype, np.int32)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(index, want_index)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_roundings(mode, rows, dtype):
    """Sums of other numbers are rounded once, and the index is that of the rounded numbers."""
    x, weight = random(3, dtype, (rows, 200), (300, 200))
    y, index = run(Layer(), x, weight)
    wide_x, wide_weight = x.astype(np.float64), weight.astype(np.float64)
    unit, sums = np.finfo(dtype).eps, np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    error = np.abs(y - wide_x @ wide_weight.T)
    assert (error <= unit * np.abs(y) + 20 * sums * (np.abs(wide_x) @ np.abs(wide_weight).T)).all()
    np.testing.assert_array_equal(index, y.argmax(-1))


@pytest.mark.parametrize(("inputs", "settings", "error", "words"), CARD.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, inputs, settings, error, words):
    with pytest.raises(error) as caught:
        run(Layer(), *inputs)
    assert words in str(caught.value)


def test_infinity_and_nan(mode):
    """NaN counts as larger than all, and the first of equal numbers counts."""
    inf, nan = np.inf, np.nan
    weight = np.array([[3], [inf], [nan], [-inf], [nan]], np.float32)
    x = np.array([[1], [0], [nan], [2]], np.float32)
    assert run(Layer(), x, weight)[1].tolist() == [2, 1, 0, 2]
    assert run(Layer(), x[:1], weight[[0, 3, 0, 1, 1]])[1].tolist() == [3]
    assert run(Layer(), x[:1], weight[[3, 3]])[1].tolist() == [0]


def test_no_gradient(mode):
    inputs = CARD.inputs(*[CARD.cases["one row"][0]], np.float32)
    with pytest.raises(ValueError, match="linear_argmax: it is for inference and has no gradient"):
        run(Gradient(Layer(), 2), *inputs, np.ones((1, 100), np.float32), np.zeros(1, np.int32))


def test_cell(mode):
    bias = Tensor(np.arange(10), mindspore.float32)
    net = msops.LinearArgmax(8, 10, has_bias=True, weight_init="ones", bias_init=bias)
    y, index = run(net, np.ones((2, 8), np.float16))
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, np.float16([np.arange(8, 18)] * 2))
    assert index.tolist() == [9, 9]
    assert net.weight.shape == (10, 8)
    without_bias = msops.LinearArgmax(8, 10, weight_init="ones")
    assert run(without_bias, np.ones((2, 3, 8), np.float32))[1].tolist() == [[0] * 3] * 2
    assert "hidden_size=8, vocab_size=10, has_bias=True" in str(net)
    for settings, error, words in (
        (dict(vocab_size=0), ValueError, "LinearArgmax: vocab_size must be at least 1"),
        (dict(hidden_size=2.0), TypeError, "LinearArgmax: hidden_size must be an int"),
        (dict(has_bias=1), TypeError, "LinearArgmax: has_bias must be a bool"),
    ):
        with pytest.raises(error, match=words):
            msops.LinearArgmax(**{**dict(hidden_size=8, vocab_size=10), **settings})
