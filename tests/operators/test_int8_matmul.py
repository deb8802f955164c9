import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import Card, chain, length
from msops.operators.int8_matmul import operators
from msops.testing.checks import Gradient, run


def int8_matmul(x, weight, scale, *others, transpose_weight=True, optional=(), out="float16", **_):
    given = dict(zip(optional, others))
    sums = x.astype(np.int64) @ (weight.T if transpose_weight else weight).astype(np.int64)
    bias = given.get("bias")
    if bias is not None and bias.dtype.kind == "i":
        sums, bias = sums + bias, None
    # The results are computed in float32, but for the last sum, which is not rounded before it.
    results = (sums.astype(np.float32) * scale.astype(np.float32)).astype(np.float64)
    if "x_scale" in given:
        results = results * given["x_scale"][..., None].astype(np.float32)
    return ((results + (0 if bias is None else bias.astype(np.float32))).astype(np.float32).astype(out),)


def case(rows, terms, outputs, transpose_weight=True, optional="x_scale bias", bias="int32", out="float16"):
    optional = tuple(optional.split())
    rows = rows if isinstance(rows, tuple) else (rows,)
    shapes = [(*rows, terms), (outputs, terms) if transpose_weight else (terms, outputs), (outputs,)]
    shapes += [dict(x_scale=rows, bias=(outputs,))[name] for name in optional]
    return shapes, dict(transpose_weight=transpose_weight, optional=optional, bias=bias, out=out)


class TestInt8Matmul(Card):
    function = msops.int8_matmul
    formulas = (int8_matmul,)
    cases = {
        "small": case(3, 7, 5),
        "small, transposed": case(3, 7, 5, False, bias="float32", out="float32"),
        "a vector": case((), 16, 6, optional="bias", bias="float32"),
        "more axes": case((2, 3), 8, 5, False, "x_scale"),
        "one": case(1, 1, 1, optional=""),
        "no rows": case(0, 4, 5),
        "no terms": case(2, 0, 5, bias="float32"),
        "no outputs": case(2, 6, 0),
        "large": case(70, 272, 200),
    }
    further = {
        "one row": case(1, 1040, 40),
        "6 rows": case(6, 528, 33, bias="float32"),
        "6 rows, odd": case(6, 527, 33, out="float32"),
        "17 rows": case(17, 48, 130, optional=""),
        "50 rows": case(50, 1040, 132, bias="float32"),
        "70 rows": case(70, 1040, 100, out="float32"),
        "more than a tile": case(140, 416, 150, out="float32"),
        "several tiles": case(261, 656, 300, bias="float32"),
        "several tiles, other packs": case(129, 144, 515, optional="", out="float32"),
        "many tiles": case(2200, 32, 300),
        "more than a tile, odd": case(133, 263, 135, bias="float32"),
        "more than a tile, transposed": case(140, 416, 152, False),
        "more than a tile, transposed, odd": case(131, 259, 135, False, "x_scale"),
        "few rows, transposed": case(2, 520, 300, False),
    }
    small = "small"
    hostile = ("small", "small, transposed")
    wrong = (
        ([(2, 6), (5, 7), (5,)], {}, ValueError, "int8_matmul: weight must have shape (M, K) = (5, 6), got (5, 7)"),
        ([(2, 6), (6, 5), (4,)], dict(transpose_weight=False), ValueError,
         "int8_matmul: scale must have shape (M,) = (5,), got (4,)"),
        ([(2, 6), (5, 6), (5,), (3,)], dict(optional=("x_scale",)), ValueError,
         "int8_matmul: x_scale must have shape (*S,) = (2,), got (3,)"),
        ([(2, 6), (5, 6), (5,)], dict(transpose_weight=1), TypeError,
         "int8_matmul: transpose_weight must be a bool, got int"),
        ([(2, 6), (5, 6), (5,)], dict(out="int8"), TypeError, "int8_matmul: dtype must be float16 or float32, got"),
        ([(1, 131072), (1, 131072), (1,)], {}, ValueError, "int8_matmul: K must be less than 131072, got 131072"),
    )  # fmt: skip

    def operators(self, shapes=(), transpose_weight=True, optional=("x_scale", "bias"), out="float16", **_):
        absent = {"x_scale", "bias"}.difference(optional)
        return chain(operators(transpose_weight, getattr(mindspore, out)).without(*absent))

    def inputs(self, shapes, dtype, seed=1, optional=(), bias="int32", **_):
        """The dtype is that of no input."""
        rng = np.random.default_rng(seed)
        arrays = [rng.integers(-128, 128, shape, np.int8) for shape in shapes[:2]]
        arrays.append((1e-3 * rng.random(shapes[2])).astype(np.float32))
        for name, shape in zip(optional, shapes[3:]):
            if name == "bias" and bias == "int32":
                arrays.append(rng.integers(-5000, 5000, shape, np.int32))
            else:
                arrays.append(rng.random(shape).astype(np.float32))
        return arrays

    def random_case(self, random):
        optional = random.choice(("", "bias", "x_scale", "x_scale bias"))
        rows = tuple(length(random) for _ in range(random.randrange(3)))
        settings = random.random() < 0.5, optional, random.choice(("int32", "float32"))
        return case(rows, length(random), length(random), *settings, random.choice(("float16", "float32")))


CARD = TestInt8Matmul()


class Layer(mindspore.nn.Cell):
    def __init__(self, transpose_weight=True, optional=(), out="float16", **_):
        super().__init__()
        self.settings = transpose_weight, getattr(mindspore, out)
        self.has_x_scale, self.has_bias = "x_scale" in optional, "bias" in optional

    def construct(self, x, weight, scale, *others):
        x_scale = others[0] if self.has_x_scale else None
        bias = others[-1] if self.has_bias else None
        return msops.int8_matmul(x, weight, scale, x_scale, bias, *self.settings)


@pytest.mark.parametrize("name", [*CARD.cases, *CARD.further])
def test_results(mode, name):
    """The last rounding to float16 may be off the reference's, which rounds twice."""
    shapes, settings = {**CARD.cases, **CARD.further}[name]
    inputs = CARD.inputs(shapes, None, **settings)
    out = run(Layer(**settings), *inputs)[0]
    [want] = int8_matmul(*inputs, **settings)
    assert (out.dtype, out.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(out, want, rtol=1e-3 if settings["out"] == "float16" else 2e-7, atol=1e-7)


@pytest.mark.parametrize("transpose_weight", [True, False])
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_are_exact(rows, transpose_weight):
    """Also the largest that int32 holds, of which float32 holds the upper digits."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, weight = np.full((rows, 131071), -128, np.int8), np.full((2, 131071), -128, np.int8)
    weight[1] = 127
    net = Layer(transpose_weight, out="float32")
    out = run(net, x, weight if transpose_weight else weight.T.copy(), np.ones(2, np.float32))[0]
    np.testing.assert_array_equal(out, [np.float32([128 * 128 * 131071, -128 * 127 * 131071])] * rows)
    x[:, 1:], weight[:, 1:] = 0, 0
    bias = np.int32([-128 * 128 + 3, 128 * 127 - 2])
    out = run(Layer(transpose_weight, ("bias",), "float32"), x, weight if transpose_weight else weight.T.copy(),
              np.float32([1, 0.5]), bias)[0]  # fmt: skip
    np.testing.assert_array_equal(out, [[3, -1]] * rows)


def test_one_scale_for_all(mode):
    shapes, settings = case(3, 7, 5)
    x, weight, _, *others = CARD.inputs(shapes, None, **settings)
    for transpose_weight in (True, False):
        net = Layer(**{**settings, "transpose_weight": transpose_weight})
        each = weight if transpose_weight else weight.T.copy()
        want = run(net, x, each, np.full(5, 0.25, np.float32), *others)[0]
        np.testing.assert_array_equal(run(net, x, each, np.full(1, 0.25, np.float32), *others)[0], want)


def test_product_of_quantized_rows(mode):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, 256)).astype(np.float16), rng.standard_normal((7, 256)).astype(np.float32)

    class Quantized(mindspore.nn.Cell):
        def construct(self, x, weight):
            codes, x_scale = msops.quantize_rows(x)
            weights, scale = msops.quantize_rows(weight)
            return msops.int8_matmul(codes, weights, scale, x_scale)

    out = run(Quantized(), x, weight)[0]
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, x.astype(np.float32) @ weight.T, atol=0.5)


@pytest.mark.parametrize(("shapes", "settings", "error", "words"), CARD.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, shapes, settings, error, words):
    inputs = [np.zeros(shape, np.int8 if i < 2 else np.float32) for i, shape in enumerate(shapes)]
    with pytest.raises(error) as caught:
        run(Layer(**settings), *inputs)
    assert words in str(caught.value)


def test_wrong_dtypes(mode):
    x, weight, scale = np.zeros((2, 3), np.int8), np.zeros((4, 3), np.int8), np.zeros(4, np.float32)
    for inputs, words in (
        ((x.astype(np.float16), weight, scale), "int8_matmul: x must be int8, got float16"),
        ((x, weight.astype(np.uint8), scale), "int8_matmul: weight must be int8, got uint8"),
        ((x, weight, scale.astype(np.float16)), "int8_matmul: scale must be float32, got float16"),
    ):
        with pytest.raises(TypeError, match=words):
            run(Layer(), *inputs)


def test_no_gradient(mode):
    shapes, settings = CARD.cases["one"]
    inputs = CARD.inputs(shapes, None, **settings)
    with pytest.raises(ValueError, match="int8_matmul: it is for inference and has no gradient"):
        run(Gradient(Layer(**settings), 3), *inputs, np.ones((1, 1), np.float16))


@pytest.mark.wide
def test_views_and_open_sizes(mode):
    """Inputs may be views; in graph mode, the number of rows may be open."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-128, 128, shape, np.int8) for shape in ((9, 8), (6, 8)))
    scale = rng.random(6).astype(np.float32)

    class Views(mindspore.nn.Cell):
        def construct(self, x, weight, scale):
            return msops.int8_matmul(x[1::2, 2:], weight[1:, 2:], scale[1:], dtype=mindspore.float32)

    net = Views()
    if mode == "graph":
        net.set_inputs(Tensor(shape=[None, 8], dtype=mindspore.int8), Tensor(weight), Tensor(scale))
    for rows in (9, 8):
        want = (x[1:rows:2, 2:].astype(int) @ weight[1:, 2:].astype(int).T).astype(np.float32) * scale[1:]
        np.testing.assert_array_equal(run(net, x[:rows], weight, scale)[0], want)
