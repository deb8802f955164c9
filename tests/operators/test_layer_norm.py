import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from card import chain, length, lengths, random, results_of, zeros
from msops.compat import VERSION
from msops.operators.layer_norm import operators
from msops.testing.checks import run_gradient
from operator_test import Gradient, Net, OperatorTest, check_dtypes, check_second_order, check_training, run


class Rows:
    """Holds the rows of an input, normalized, and what normalizes them."""

    def __init__(self, x, weight, eps):
        self.shape, self.weight_shape = x.shape, x.shape[-1:] if weight is None else weight.shape
        self.axes = tuple(range(-len(self.weight_shape), 0))
        self.n = x.dtype.type(max(1, np.prod(self.weight_shape, dtype=int)))
        centred = self.centre(x)
        self.r = 1 / np.sqrt(self.mean(centred, centred) + x.dtype.type(eps))
        self.normal = centred * self.r
        self.weight = x.dtype.type(1) if weight is None else weight

    def mean(self, a, b):
        return (a * b).sum(self.axes, keepdims=True) / self.n

    def centre(self, a):
        return a - a.sum(self.axes, keepdims=True) / self.n

    def over_rows(self, a):
        return a.sum(tuple(range(a.ndim - len(self.weight_shape))))


def parameters(given, only_bias):
    """Returns the weight and the bias, of which None, one or both are given."""
    if only_bias:
        return None, *given
    return (*given, None, None)[:2]


def layer_norm(x, *given, eps=1e-5, only_bias=False):
    weight, bias = parameters(given, only_bias)
    rows = Rows(x, weight, eps)
    y = rows.normal * rows.weight
    return (y if bias is None else y + bias,)


def layer_norm_backward(x, *rest, eps=1e-5, only_bias=False):
    *given, dy = rest
    weight, bias = parameters(given, only_bias)
    rows = Rows(x, weight, eps)
    g = dy * rows.weight
    dx = rows.r * (rows.centre(g) - rows.normal * rows.mean(g, rows.normal))
    dweight, dbias = rows.over_rows(dy * rows.normal), rows.over_rows(dy)
    return dx, *([] if weight is None else [dweight]), *([] if bias is None else [dbias])


def layer_norm_backward_backward(x, *rest, eps=1e-5, only_bias=False):
    weight, ddweight, ddbias = None, np.zeros((), x.dtype), np.zeros((), x.dtype)
    if len(rest) > 3:
        weight, dy, ddx, ddweight, *bias = rest
    else:
        dy, ddx, *bias = rest
    if bias:
        (ddbias,) = bias
    rows = Rows(x, weight, eps)
    normal, r = rows.normal, rows.r
    a, g, h = (rows.centre(each) for each in (ddx, dy * rows.weight, dy * ddweight))
    p, q = rows.mean(a, normal), rows.mean(g, normal)
    inner = a * q + g * p + normal * (rows.mean(a, g) - 3 * p * q)
    dx = r * (h - normal * rows.mean(h, normal) - r * inner)
    along = r * (a - normal * p)
    ddy = along * rows.weight + normal * ddweight + ddbias
    return (dx, ddy) if weight is None else (dx, rows.over_rows(along * dy), ddy)


def case(shape, axes=1, has_bias=True, **settings):
    """Returns a case whose weight has so many axes; 0 means no weight."""
    weight = [shape[-axes:]] if axes else []
    bias = [shape[-max(1, axes) :]] if has_bias else []
    if bias and not axes:
        settings["only_bias"] = True
    return [shape, *weight, *bias], settings


class TestLayerNorm(OperatorTest):
    function = msops.layer_norm
    formulas = (layer_norm, layer_norm_backward, layer_norm_backward_backward)
    second_order = True
    cases = {
        "small": case((3, 2, 4), 2, eps=0.1),
        "weight": case((5, 7), 1, False, eps=0.1),
        "neither": case((3, 7), 0, False, eps=0.1),
        "no rows": case((0, 5)),
        "no columns": case((3, 0)),
        "one row": case((4, 5), 2),
        "long rows": case((2, 70_001)),
        "large": case((4001, 129)),
    }
    further = {
        "one": case((1, 1), eps=0.1),
        "bias": case((5, 7), 0, eps=0.1),
        "three axes": case((3, 2, 5, 4), 3, eps=0.1),
        **{f"{shape}": case(shape, eps=0.1) for shape in ((9, 64), (5, 520), (3, 4104), (2, 20_000), (2, 20_003))},
        # between packs, and in clusters
        **{f"{shape}": case(shape, eps=0.1) for shape in ((19, 513), (20, 1023), (21, 4097), (19, 8191))},
        **{f"{shape}": case(shape, eps=0.1) for shape in ((9, 8200), (5, 32_760), (5, 32_768), (2, 32_769))},
    }
    small = "small"
    hostile = ("small", "neither", "bias")
    roundings = 64  # gradients are differences of numbers that are larger than they are
    wrong = (
        (zeros((2, 3), dtype=np.int64), {}, TypeError, "layer_norm: x must be float16, float32 or float64, got int64"),
        ([*zeros((2, 3)), 2.0], {}, TypeError, "layer_norm: weight must be a Tensor, got float"),
        (
            [*zeros((2, 3)), *zeros(3, dtype=np.float64)],
            {},
            TypeError,
            "layer_norm: weight must be float32, got float64",
        ),
        (zeros((2, 3), 2), {}, ValueError, "weight must have the last axes of x, whose shape is (2, 3), got (2,)"),
        (zeros((3,), (1, 3)), {}, ValueError, "weight must have the last axes of x, whose shape is (3,), got (1, 3)"),
        (zeros((2, 3), ()), {}, ValueError, "weight must have the last axes of x, whose shape is (2, 3), got ()"),
        (zeros((2, 3), 3, (2, 3)), {}, ValueError, "layer_norm: bias must have shape (3,) as weight has, got (2, 3)"),
        (zeros(()), {}, ValueError, "layer_norm: x must have at least one axis, got shape ()"),
        (zeros((2, 3)), dict(eps=-1.0), ValueError, "layer_norm: eps must be finite and at least 0, got -1.0"),
    )

    def operators(self, shapes=((1,),) * 3, eps=1e-5, only_bias=False):
        given = (False, True) if only_bias else (len(shapes) > 1, len(shapes) > 2)
        return chain(operators(eps).without(*(n for n, is_given in zip(("weight", "bias"), given) if not is_given)))

    def reference_gradient(self, x, *rest, **settings):
        return layer_norm_backward(x, *rest, **settings)

    def random_case(self, random):
        shape = (*lengths(random), length(random))
        axes, has_bias = random.randrange(len(shape) + 1), random.random() < 0.6
        return case(shape, axes, has_bias, eps=random.choice((0.1, 1.0)))


class OnlyBias(nn.Cell):
    """Has a bias, and no weight."""

    def construct(self, x, bias):
        return msops.layer_norm(x, None, bias, 0.125)


def test_bias_alone(mode):
    x, bias, dy = random(0, np.float64, (4, 3, 5), (5,), (4, 3, 5))
    settings = dict(eps=0.125, only_bias=True)
    np.testing.assert_allclose(run(OnlyBias(), x, bias)[0], *layer_norm(x, bias, **settings), rtol=1e-12, atol=1e-12)
    for got, want in zip(run_gradient(OnlyBias(), [x, bias], [dy]), layer_norm_backward(x, bias, dy, **settings)):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    check_second_order(Gradient(OnlyBias(), 2), [x, bias, dy], mode)
    with pytest.raises(ValueError, match=r"layer_norm: bias must have shape \(5,\) without a weight, got \(3, 5\)"):
        OnlyBias()(Tensor(x), Tensor(bias[None].repeat(3, 0)))


def test_second_order_without_parameters(mode):
    check_second_order(Gradient(Net(msops.layer_norm, eps=0.1), 1), random(1, np.float64, (3, 5), (3, 5)), mode)


@pytest.mark.parametrize("columns", [8, 1000, 1001])
def test_mean_far_from_zero(columns):
    """What the mean was rounded by is taken into account, so that no digit is lost beside those of x."""
    shape = (8, columns)
    x, weight, bias, dy, ddx, ddweight = random(2, np.float32, shape, columns, columns, shape, shape, columns)
    x += 1000
    forward, backward, second = TestLayerNorm().operators(((1,),) * 3, eps=1e-5)
    calls = (
        (forward, layer_norm, [x, weight, bias]),
        (backward, layer_norm_backward, [x, weight, bias, dy]),
        (second, layer_norm_backward_backward, [x, weight, dy, ddx, ddweight, bias]),
    )
    for operator, formula, inputs in calls:
        for got, want in zip(results_of(operator, *inputs), formula(*(a.astype(np.float64) for a in inputs))):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 7, 8, 1000])
def test_rows_of_equal_elements(columns):
    """A large factor, 1 / sqrt(eps), multiplies differences that are 0, and no rounding errors."""
    x, dy = (row.repeat(columns, 1) for row in random(3, np.float32, (5, 1), (5, 1)))
    weight, bias = np.full(columns, 1.2345678, np.float32), np.full(columns, 0.5, np.float32)
    forward, backward, second = TestLayerNorm().operators(((1,),) * 3, eps=1e-12)
    (y,) = results_of(forward, x, weight, bias)
    dx, dweight, _ = results_of(backward, x, weight, bias, dy)
    ddx, ddweight, ddy = results_of(second, x, weight, dy, dy, weight, bias)
    for zero in (y - bias, dx, dweight, ddx, ddweight, ddy - bias):
        np.testing.assert_allclose(zero, 0, atol=0 if columns == 1 else 2e-6)


@pytest.mark.parametrize(
    "dtypes",
    [("float16", "float32"), ("float64", "float32"), ("float16", "float16"), ("float32", "float16")],
    ids=str,
)
def test_dtypes_of_parameters(mode, dtypes):
    """Parameters may be float32, or float16 beside float32, and so are their gradients then."""
    x, *rest = random(3, "float64", (6, 70), 70, 70)
    inputs = [x.astype(dtypes[0]), *(a.astype(dtypes[1]) for a in rest)]
    check_dtypes(Net(msops.layer_norm), inputs, inputs[:1], layer_norm, layer_norm_backward)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((7,), {}),
        ((5, 7), dict(begin_norm_axis=1, begin_params_axis=1)),
        ((7,), dict(begin_norm_axis=-1, begin_params_axis=2)),
        ((7,), dict(begin_norm_axis=2, begin_params_axis=-1)),
        ((5, 7), dict(begin_norm_axis=1, begin_params_axis=1, epsilon=1e-3, gamma_init="normal", beta_init=0.5)),
    ],
    ids=str,
)
def test_replaces_nn_layer_norm(mode, shape, settings, tmp_path):
    """LayerNorm has nn.LayerNorm's initial values for the same seed, the same output, and loads its checkpoint."""
    if "gamma_init" in settings and VERSION < (2, 0):
        pytest.skip("MindSpore 1.10 draws other numbers for each Cell of a program")
    mindspore.set_seed(3)
    ours = msops.LayerNorm(shape, **settings)
    mindspore.set_seed(3)
    theirs = nn.LayerNorm(shape, **settings)
    assert list(ours.parameters_dict()) == list(theirs.parameters_dict())
    for own, other in zip(ours.get_parameters(), theirs.get_parameters()):
        np.testing.assert_array_equal(own.asnumpy(), other.asnumpy())
    x = Tensor(random(4, np.float32, (9, 5, 7))[0])
    np.testing.assert_allclose(ours(x).asnumpy(), theirs(x).asnumpy(), rtol=1e-4, atol=1e-5)
    for parameter in theirs.get_parameters():
        parameter.set_data(Tensor(random(5, np.float32, parameter.shape)[0]))
    mindspore.save_checkpoint(theirs, str(tmp_path / "norm.ckpt"))
    mindspore.load_param_into_net(ours, mindspore.load_checkpoint(str(tmp_path / "norm.ckpt")), strict_load=True)
    for own, other in zip(ours.get_parameters(), theirs.get_parameters()):
        np.testing.assert_array_equal(own.asnumpy(), other.asnumpy())
    np.testing.assert_allclose(ours(x).asnumpy(), theirs(x).asnumpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16"), ("float32", "float64")], ids=str)
def test_cell_casts_parameters_as_nn_layer_norm_does(mode, dtypes):
    x, gamma = random(6, "float32", (4, 8), (8,))
    net = msops.LayerNorm((8,), gamma_init=Tensor(gamma.astype(dtypes[1])), dtype=getattr(mindspore, dtypes[1]))
    y = net(Tensor(x.astype(dtypes[0])))
    assert y.dtype == getattr(mindspore, dtypes[0])
    np.testing.assert_allclose(y.asnumpy(), *layer_norm(x, gamma, eps=1e-7), rtol=3e-3, atol=3e-3)


def test_training(mode):
    x, gamma, beta = random(7, np.float32, (6, 8), (8,), (8,))
    check_training(msops.LayerNorm((8,), gamma_init=Tensor(gamma), beta_init=Tensor(beta)), x)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(normalized_shape=3), TypeError, "normalized_shape must be a tuple or a list, got 3"),
        (dict(normalized_shape=()), ValueError, "normalized_shape must have at least one axis"),
        (dict(normalized_shape=(3, 0)), ValueError, "normalized_shape must be at least 1"),
        (dict(normalized_shape=(3, 2.0)), TypeError, "normalized_shape must be an int or a tuple of ints"),
        (dict(begin_norm_axis=1.0), TypeError, "begin_norm_axis must be an int, got float"),
        (
            dict(begin_norm_axis=1, begin_params_axis=2),
            ValueError,
            "begin_params_axis must be begin_norm_axis, 1, got 2",
        ),
        (
            dict(begin_norm_axis=1, begin_params_axis=-2),
            ValueError,
            "begin_params_axis must be -1 for normalized_shape",
        ),
        (dict(begin_norm_axis=-2, begin_params_axis=-2), ValueError, "begin_norm_axis must be -1 for normalized_shape"),
        (dict(epsilon=-1), ValueError, "eps must be finite and at least 0, got -1"),
        (dict(gamma_init="onse"), ValueError, "gamma_init must be a number"),
        (dict(dtype=mindspore.int32), TypeError, "dtype must be float16, float32 or float64, got Int32"),
    ],
    ids=str,
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=f"^(LayerNorm|layer_norm): {words}"):
        msops.LayerNorm(**(dict(normalized_shape=(4,)) | settings))


def test_begin_norm_axis_that_does_not_fit_the_input(mode):
    for axes, name in (((1, 1), "begin_norm_axis"), ((1, -1), "begin_norm_axis"), ((-1, 1), "begin_params_axis")):
        net = msops.LayerNorm((4,), *axes)
        with pytest.raises(ValueError, match=f"LayerNorm: {name} must be 2 for an input of 3 axes"):
            net(ops.ones((2, 3, 4), mindspore.float32))
