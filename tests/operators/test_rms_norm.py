import functools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import chain, length, lengths, random, zeros
from gpu import BIG
from msops.compat import VERSION
from msops.operators.rms_norm import operators
from msops.testing.entry import prepare_operator
from operator_test import Gradient, Net, OperatorTest, check_dtypes, check_second_order, check_training, run


def scale_of(x, eps):
    """Returns 1 / sqrt(mean(x^2) + eps) of each row."""
    mean = (x * x).sum(-1, keepdims=True) / x.dtype.type(max(1, x.shape[-1]))
    return 1 / np.sqrt(mean + x.dtype.type(eps))


def factor_of(weight, x, offset):
    """Returns weight + offset in the dtype of x, or 1 if there is no weight."""
    return x.dtype.type(1) if weight is None else weight.astype(x.dtype) + x.dtype.type(offset)


def parameters(arrays, given):
    """Returns the weight and the bias, or None, where `given` has the first letters of those that are given."""
    found = dict(zip(given, arrays))
    return found.get("w"), found.get("b")


def rms_norm(x, *arrays, eps=1e-6, offset=0.0, casting="llama", wide_weight=False, given="w"):
    weight, bias = parameters(arrays, given)
    y = x * scale_of(x, eps) * factor_of(weight, x, offset)
    return (y if bias is None else y + bias.astype(x.dtype),)


def dot(a, b):
    """Returns the mean of the products of each row, as a column."""
    return (a * b).sum(-1, keepdims=True) / a.dtype.type(max(1, a.shape[-1]))


def rms_norm_backward(x, *rest, eps=1e-6, offset=0.0, casting="llama", wide_weight=False, given="w"):
    *arrays, dy = rest
    weight, bias = parameters(arrays, given)
    r = scale_of(x, eps)
    normal, g = x * r, dy * factor_of(weight, x, offset)
    dx = r * (g - normal * dot(g, normal))
    of_weight, of_bias = over_rows(dy * normal, weight), over_rows(dy, bias)
    return dx, *([] if weight is None else [of_weight]), *([] if bias is None else [of_bias])


def over_rows(x, parameter):
    """Returns the sums that have the axes of a parameter."""
    return x.sum(tuple(range(x.ndim - np.ndim(parameter))))


def rms_norm_backward_backward(x, *rest, eps=1e-6, offset=0.0, casting="llama", wide_weight=False, given="w"):
    has_weight = "w" in given
    weight, dy, ddx, ddweight, *of_bias = rest if has_weight else (None, *rest[:2], np.zeros((), x.dtype), *rest[2:])
    r, factor = scale_of(x, eps), factor_of(weight, x, offset)
    normal, g, h = x * r, dy * factor, dy * ddweight
    p, q = dot(ddx, normal), dot(g, normal)
    inner = ddx * q + g * p + normal * (dot(ddx, g) - 3 * p * q)
    dx = r * (h - normal * dot(h, normal) - r * inner)
    along = r * (ddx - normal * p)
    ddy = along * factor + normal * ddweight
    for ddbias in of_bias:
        ddy = ddy + ddbias
    return (dx, over_rows(along * dy, weight), ddy) if has_weight else (dx, ddy)


def units(casting="llama", **settings):
    """Returns how many units in its last place a float16 result may be off: the normalized row, the factor and their
    product are rounded; "none" also rounds the mean, the mean plus eps, and the scale. A bias may be all but equal to
    minus the rounded product: cases with a bias have "gemma", which rounds the sum alone."""
    return {"gemma": 0.75, "llama": 2.75, "none": 6}[casting]


def case(shape, given="w", axes=1, **settings):
    """Returns a case with the parameters that `given` names, which have the last axes of x."""
    if "b" in given:
        settings = dict(casting="gemma") | settings
    return [shape, *[shape[-axes:]] * len(given)], settings | ({} if given == "w" else dict(given=given))


class TestRmsNorm(OperatorTest):
    function = msops.rms_norm
    formulas = (rms_norm, rms_norm_backward, rms_norm_backward_backward)
    second_order = True
    cases = {
        "small": case((3, 4, 7), eps=0.1, offset=0.5),
        "no weight": case((3, 7), "", eps=0.1),
        "bias": case((3, 4, 7), "wb", eps=0.1, offset=0.5),
        "bias alone": case((3, 7), "b", eps=0.1),
        "heads": case((2, 3, 7), axes=2, eps=0.1, offset=0.5),
        "heads with a bias": case((5, 2, 3, 8), "wb", 2, eps=0.1),
        "bias of heads alone": case((3, 7), "b", 2, eps=0.1),
        "one head": case((4, 1, 8), axes=2),
        "no heads": case((4, 0, 8), axes=2),
        "heads of no rows": case((0, 2, 8), "wb", 2),
        "heads without columns": case((3, 2, 0), "wb", 2),
        "no rows": case((0, 5)),
        "no columns": case((3, 0)),
        "one": case((1, 1)),
        "one row": case((9,), casting="gemma"),
        "gemma": case((70, 13), eps=1e-3, offset=1.0, casting="gemma"),
        "none": case((5, 70), casting="none"),
        "long rows": case((2, 70_001)),
        "large": case((4001, 129)),
    }
    # These have every kind of team, in packs and in single elements.
    further = {
        **{
            f"{shape}": case(shape)
            for columns in (8, 64, 256, 520, 4104, 12_000, 40_000, 140_000)
            for shape in ((70_001 // columns + 1, columns), (5_001 // columns + 1, columns + 3))
        },
        **{f"{shape}": case(shape) for shape in ((19, 513), (20, 1023), (21, 4097), (19, 8191))},  # between packs
        **{f"{shape}": case(shape) for shape in ((9, 8200), (5, 32_760), (2, 32_767), (5, 32_768), (2, 32_769))},
        "float32 weight": case((9, 520), offset=0.5, wide_weight=True),
        "float32 weight, between packs": case((19, 1029), casting="gemma", wide_weight=True),
        "float32 weight, single elements": case((9, 67), casting="gemma", wide_weight=True),
        "float32 weight of heads": case((9, 3, 72), "wb", 2, wide_weight=True),
        "more heads than parts of sums": case((3, 4001, 24), axes=2),
        **{
            f"{shape}, {given} for {axes} axes": case(shape, given, axes)
            for given, axes in (("w", 2), ("wb", 1))
            for columns in (8, 64, 256, 520, 1100, 4104, 12_000, 40_000, 140_000)
            for shape in ((9_001 // columns + 1, 2, columns), (1_001 // columns + 1, 2, columns + 3))
        },
    }
    small = "small"
    hostile = ("small", "no weight")
    huge = ((BIG // 4096 + 1, 4096), (BIG // 4097 + 1, 4097), (BIG // 3, 3))
    roundings = 64  # gradients are differences of numbers that are larger than they are
    half_in_float32 = False  # the formula rounds on the way
    wrong = (
        (zeros((2, 3), 3, dtype=np.int32), {}, TypeError, "rms_norm: x must be float16, float32 or float64, got int32"),
        ([1.5], {}, TypeError, "rms_norm: x must be a Tensor, got float"),
        ([*zeros((2, 3)), 2.0], {}, TypeError, "rms_norm: weight must be a Tensor, got float"),
        ([*zeros((2, 3)), *zeros(3, dtype=np.float64)], {}, TypeError, "rms_norm: weight must be float32, got float64"),
        (zeros((3, 2), (4, 2)), {}, ValueError, "rms_norm: weight must have the last axis of x, whose shape is (3, 2)"),
        (zeros(2, (1, 2)), {}, ValueError, "the last axis of x, whose shape is (2,), or the last two, got (1, 2)"),
        (zeros((2, 3, 4), (2, 3, 4)), {}, ValueError, "rms_norm: weight must have the last axis of x, whose shape is"),
        (zeros(()), {}, ValueError, "rms_norm: x must have shape (*S, C), got ()"),
        (zeros((2, 3)), dict(eps=-1.0), ValueError, "rms_norm: eps must be finite and at least 0, got -1.0"),
        (zeros((2, 3)), dict(eps="1"), TypeError, "rms_norm: eps must be a number, got str"),
        (zeros((2, 3)), dict(offset=float("inf")), ValueError, "rms_norm: offset must be finite, got inf"),
        (zeros((2, 3)), dict(casting="LLAMA"), ValueError, "casting must be one of llama, gemma, none, got 'LLAMA'"),
    )

    def operators(self, shapes=(), eps=1e-6, offset=0.0, casting="llama", wide_weight=False, given="w"):
        return chain(operators(eps, offset, casting).without(*absent(given)))

    def units(self, **settings):
        return units(**settings)

    def inputs(self, shapes, dtype, seed=1, wide_weight=False, **settings):
        x, *given = super().inputs(shapes, dtype, seed)
        return [x, *(w.astype(np.float32) if wide_weight and dtype == "float16" else w for w in given)]

    def net(self, **settings):
        return net_of(msops.rms_norm, **settings)

    def check_huge(self, gpu, rows, columns):
        x, weight = gpu.random(rows, columns), gpu.random(columns)
        forward, backward = self.operators([x.shape, weight.shape])[:2]
        (y,) = gpu.run(forward, x, weight)
        gpu.check_parts(forward, [x, weight], [y], rows, 3, gpu.assert_equal)
        del y
        dy = x.flip(0)
        outputs = _, dweight, _ = gpu.run(backward, x, weight, dy)
        gpu.check_parts(backward, [x, weight, dy], [outputs[0], None, None], rows, 3, gpu.assert_equal)
        normals = (gpu.torch.nn.functional.rms_norm(part.float(), [columns], eps=1e-6) for part in x.split(2**16))
        gpu.assert_sums(dweight, sum((n * d).sum(0, dtype=gpu.torch.float64) for n, d in zip(normals, dy.split(2**16))))

    def reference_gradient(self, x, *rest, **settings):
        return rms_norm_backward(x, *rest, **settings)

    def random_case(self, random):
        return random_norm(random)


def random_norm(random):
    shape, given = (*lengths(random), length(random)), random.choice(("w", "w", "w", "", "wb", "b"))
    settings = dict(eps=random.choice((0.1, 1.0)), offset=random.choice((0.0, 1.0)))
    if "b" not in given:
        settings["casting"] = random.choice(("llama", "gemma", "none"))
    return case(shape, given, random.choice((1, min(2, len(shape)))), **settings)


def absent(given):
    """Returns the names of the parameters that are not given."""
    return [name for name in ("weight", "bias") if name[0] not in given]


def net_of(function, given="w", wide_weight=False, **settings):
    return (WithBias if "b" in given else Net)(function, **settings)


class WithBias(Net):
    """Calls a function whose last input is the bias."""

    def construct(self, *inputs):
        return self.operator(*inputs[:-1], bias=inputs[-1], **self.settings)


def stepwise(x, weight, eps, offset, casting):
    """Computes with NumPy as casting says. A float32 number multiplied by a float16 number gives float32."""
    kind = x.dtype.type
    mean = (x.astype(np.float32) ** 2).sum(-1, keepdims=True) / np.float32(x.shape[-1])
    if casting == "none":
        r = (1 / np.sqrt((mean.astype(kind) + kind(eps)).astype(np.float32))).astype(kind)
        return x * r * (weight.astype(kind) + kind(offset))
    r = 1 / np.sqrt(mean + np.float32(eps))
    wide = x.astype(np.float32) * r
    if casting == "llama":
        return wide.astype(kind) * (weight.astype(kind) + kind(offset))
    return (wide * (weight.astype(np.float32) + np.float32(offset))).astype(kind)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float16", "float32"), ("float32", "float32")], ids=str)
@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_castings_bit_by_bit(casting, dtypes, offset):
    """Elements are multiples of 1/4, so that the sum of squares is exact in any order. A bias is added to what is
    rounded; "gemma" and float32 round the product and the sum at once, or not, as the compiler chooses."""
    rng = np.random.default_rng(0)
    x = (rng.integers(-40, 41, (300, 257)) / 4).astype(dtypes[0])
    x[:3] *= np.asarray([[2**-5], [2**-8], [2**-14]], dtypes[0])
    (weight, bias), y = rng.standard_normal((2, 257)).astype(dtypes[1]), np.empty_like(x)
    operator = operators(1e-3, offset, casting)
    assert prepare_operator(operator.without("bias"), [x, weight, y])() == 0
    np.testing.assert_array_equal(y, stepwise(x, weight, 1e-3, offset, casting))
    if casting != "gemma" and dtypes[0] == "float16":
        assert prepare_operator(operator, [x, weight, bias, y])() == 0
        np.testing.assert_array_equal(y, stepwise(x, weight, 1e-3, offset, casting) + bias.astype(x.dtype))


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float64", "float32"), ("float32", "float16")], ids=str)
def test_weight_of_another_dtype(mode, dtypes):
    """The weight may be float32, or float16 beside float32, and so is its gradient then."""
    x, weight, dy = (a.astype(d) for a, d in zip(random(3, "float64", (6, 70), (70,), (6, 70)), (*dtypes, dtypes[0])))
    net = Net(msops.rms_norm, casting="gemma", offset=1.0)
    formulas = (functools.partial(formula, offset=1.0) for formula in (rms_norm, rms_norm_backward))
    check_dtypes(net, [x, weight], [dy], *formulas)
    if dtypes[1] == "float16":
        cell = msops.RMSNorm(70, offset=1.0, casting="gemma", dtype=mindspore.float16)
        cell.weight.set_data(Tensor(weight))
        np.testing.assert_array_equal(run(cell, x)[0], run(net, x, weight)[0])


def test_second_order_without_weight(mode):
    check_second_order(Gradient(Net(msops.rms_norm, eps=0.1), 1), random(1, np.float64, (3, 5), (3, 5)), mode)


def test_eps_keeps_its_digits(mode):
    """MindSpore makes float32 of Python's numbers on its way; the operator gets 1e-12 itself."""
    if mode == "graph" and VERSION < (2, 0):
        pytest.skip("MindSpore 1.10 rounds the numbers of a compiled function to float32")
    x = np.full((2, 3), 1e-8)
    np.testing.assert_allclose(run(Net(msops.rms_norm, eps=1e-12), x)[0], *rms_norm(x, eps=1e-12), rtol=1e-14)


@pytest.mark.parametrize("shape", [(8,), (5, 8)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, dict(offset=1.0, casting="gemma"), dict(has_weight=False), dict(has_bias=True)],
    ids=str,
)
def test_cell(mode, settings, shape):
    x = random(4, np.float32, (3, 5, 8))[0]
    net = msops.RMSNorm(shape if len(shape) > 1 else 8, eps=1e-3, **settings)
    has_weight, has_bias = settings.pop("has_weight", True), settings.pop("has_bias", False)
    for parameter, given, first in ((net.weight, has_weight, 1 - settings.get("offset", 0)), (net.bias, has_bias, 0)):
        assert (parameter is not None) == given
        if given:
            np.testing.assert_array_equal(parameter.asnumpy(), np.full(shape, first, np.float32))
            parameter.set_data(Tensor(random(5, np.float32, shape)[0]))
    given = "w" * has_weight + "b" * has_bias
    arrays = [each.asnumpy() for each in (net.weight, net.bias) if each is not None]
    want = rms_norm(x, *arrays, eps=1e-3, given=given, **settings)
    np.testing.assert_allclose(run(net, x)[0], *want, rtol=1e-5, atol=1e-6)


def test_training(mode):
    net = msops.RMSNorm(8)
    net.weight.set_data(Tensor(random(5, np.float32, (8,))[0]))
    check_training(net, random(4, np.float32, (6, 8))[0])


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(hidden_size=0), ValueError, "RMSNorm: hidden_size must be at least 1 and less than 2\\^31, got 0"),
        (dict(hidden_size=2.0), TypeError, "RMSNorm: hidden_size must be an int or a tuple of ints, got 2.0"),
        (dict(hidden_size=(2, 3, 4)), ValueError, "RMSNorm: hidden_size must have 1 or 2 numbers, got"),
        (dict(eps=None), TypeError, "rms_norm: eps must be a number, got NoneType"),
        (dict(offset=float("nan")), ValueError, "rms_norm: offset must be finite, got nan"),
        (dict(casting="half"), ValueError, "rms_norm: casting must be one of llama, gemma, none, got 'half'"),
        (dict(has_weight=1), TypeError, "RMSNorm: has_weight must be a bool, got int"),
        (dict(has_bias=1), TypeError, "RMSNorm: has_bias must be a bool, got int"),
        (dict(dtype=mindspore.int8), TypeError, "RMSNorm: dtype must be float16, float32 or float64, got Int8"),
    ],
    ids=str,
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=f"^{words}"):
        msops.RMSNorm(**(dict(hidden_size=4) | settings))
