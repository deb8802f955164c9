import functools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import msops
from card import chain, length, lengths, random, results_of, zeros
from gpu import BIG
from msops.operators.group_norm import operators
from operator_test import OperatorTest, check_dtypes, check_training
from test_silu import silu, silu_backward


class Groups:
    """Holds the groups of an input, normalized, and what normalizes them: shape (N, groups, channels, positions)."""

    def __init__(self, x, num_groups, eps, layout):
        self.last, self.shape = layout == "NHWC", x.shape
        self.channels = x.shape[-1 if self.last else 1]
        self.num_groups = num_groups
        x = self.split(x)
        self.n = x.dtype.type(max(1, x.shape[2] * x.shape[3]))
        centred = self.centre(x)
        self.r = 1 / np.sqrt(self.mean(centred, centred) + x.dtype.type(eps))
        self.normal = centred * self.r

    def split(self, x):
        if self.last:
            x = np.moveaxis(x, -1, 1)
        return x.reshape(x.shape[0], self.num_groups, self.channels // self.num_groups, int(np.prod(x.shape[2:])))

    def joined(self, x):
        if not self.last:
            return x.reshape(self.shape)
        return np.moveaxis(x.reshape(self.shape[0], self.channels, *self.shape[1:-1]), 1, -1)

    def per_channel(self, parameter, otherwise):
        if parameter is None:
            return self.normal.dtype.type(otherwise)
        return parameter.reshape(1, self.num_groups, -1, 1)

    def mean(self, a, b):
        return (a * b).sum((2, 3), keepdims=True) / self.n

    def centre(self, a):
        return a - a.sum((2, 3), keepdims=True) / self.n


def parameters(given, only_bias):
    """Returns the weight and the bias, of which None, one or both are given."""
    if only_bias:
        return None, *given
    return (*given, None, None)[:2]


def group_norm(x, *given, num_groups, eps=1e-5, activation=None, layout="NCHW", only_bias=False):
    groups = Groups(x, num_groups, eps, layout)
    weight, bias = parameters(given, only_bias)
    z = groups.normal * groups.per_channel(weight, 1) + groups.per_channel(bias, 0)
    return (groups.joined(silu(z)[0] if activation else z),)


def group_norm_backward(x, *rest, num_groups, eps=1e-5, activation=None, layout="NCHW", only_bias=False):
    *given, dy = rest
    groups = Groups(x, num_groups, eps, layout)
    weight, bias = parameters(given, only_bias)
    factor, dz = groups.per_channel(weight, 1), groups.split(dy)
    if activation:
        (dz,) = silu_backward(groups.normal * factor + groups.per_channel(bias, 0), dz)
    g = dz * factor
    dx = groups.r * (groups.centre(g) - groups.normal * groups.mean(g, groups.normal))
    dweight, dbias = ((dz * a).sum((0, 3)).reshape(-1) for a in (groups.normal, np.ones_like(x[:1, :0].sum())))
    return groups.joined(dx), *([] if weight is None else [dweight]), *([] if bias is None else [dbias])


def case(shape, num_groups, has_weight=True, has_bias=True, **settings):
    channels = shape[-1 if settings.get("layout") == "NHWC" else 1]
    if has_bias and not has_weight:
        settings["only_bias"] = True
    return [shape, *[(channels,)] * (has_weight + has_bias)], dict(num_groups=num_groups, **settings)


LAST = dict(layout="NHWC")
SILU = dict(activation="silu")


class TestGroupNorm(OperatorTest):
    function = msops.group_norm
    formulas = (group_norm, group_norm_backward)
    cases = {
        "small": case((2, 6, 5), 3, eps=0.1, **SILU),
        "small, last": case((2, 5, 6), 3, eps=0.1, **SILU, **LAST),
        "weight": case((2, 4, 3), 2, True, False, eps=0.1),
        "neither": case((2, 4, 3), 2, False, False, eps=0.1),
        "rank 2": case((5, 12), 3, eps=0.1),
        "rank 5, last": case((2, 3, 1, 4, 6), 2, eps=0.1, **LAST),
        "no samples": case((0, 6, 5), 3),
        "no positions": case((3, 6, 0), 3),
        "no channels": case((3, 0, 5), 3),
        "packs": case((2, 16, 8, 8), 4, **SILU),
        "packs, last": case((2, 8, 8, 16), 4, **SILU, **LAST),
        "one group": case((1, 20, 30, 67), 1),
        "large": case((1, 20, 64, 64), 2, **SILU),
        "large, last": case((1, 64, 65, 20), 2, **LAST),
    }
    further = {
        "one": case((1, 1, 1), 1, eps=0.1),
        "bias": case((2, 4, 3), 2, False, True, eps=0.1, **SILU),
        "bias, last": case((2, 3, 4), 2, False, True, eps=0.1, **LAST),
        "lone": case((3, 7), 7, eps=1e-12),
        "lone, last": case((3, 1, 7), 7, eps=1e-12, **LAST),
        "each channel": case((3, 7, 9), 7, eps=0.1),
        "many groups": case((9, 64, 2), 32, eps=0.1, **SILU),
        "packs in two groups, last": case((2, 33, 24), 6, eps=0.1, **SILU, **LAST),
        "packs that end, last": case((1, 9, 8 * 41), 82, eps=0.1, **LAST),
        "wide": case((2, 1200, 3), 1, eps=0.1),
        "wide, last": case((2, 3, 1200), 1, eps=0.1, **SILU, **LAST),
        "wide groups without packs, last": case((1, 3, 1200), 2, eps=0.1, **LAST),
        "wide, packs": case((1, 1032, 16), 1, eps=0.1),
        "wide and long": case((1, 520, 40), 1, eps=0.1, **SILU),
        "wide and long, last": case((1, 40, 520), 1, eps=0.1, **SILU, **LAST),
        "several clusters": case((9, 2, 100, 100), 1, eps=0.1, **SILU),
        "long": case((1, 2, 300, 304), 1, eps=0.1, **SILU),
        "long, last": case((1, 301, 300, 2), 1, eps=0.1, **LAST),
    }
    small = "small"
    hostile = ("small", "small, last", "neither")
    roundings = 64  # gradients are differences of numbers that are larger than they are
    wrong = (
        (
            zeros((2, 4, 3), dtype=np.int64),
            {},
            TypeError,
            "group_norm: x must be float16, float32 or float64, got int64",
        ),
        ([*zeros((2, 4)), 2.0], {}, TypeError, "group_norm: weight must be a Tensor, got float"),
        ([*zeros((2, 4)), *zeros(4, dtype=np.float16)], {}, TypeError, "weight must be float32, got float16"),
        (zeros((2, 4, 3), 3), {}, ValueError, "weight must have shape (4,), one for each channel of x, got (3,)"),
        (zeros((2, 4, 6), 4), LAST, ValueError, "weight must have shape (6,), one for each channel of x, got (4,)"),
        (zeros((2, 4, 3), 4, (4, 1)), {}, ValueError, "bias must have shape (4,), one for each channel"),
        (zeros((2, 5, 3)), {}, ValueError, "group_norm: num_groups must divide the 5 channels of x, got 2"),
        (zeros(4), {}, ValueError, "group_norm: x must have at least two axes, got shape (4,)"),
        (zeros((2, 4)), dict(num_groups=0), ValueError, "group_norm: num_groups must be at least 1, got 0"),
        (zeros((2, 4)), dict(num_groups=2.0), TypeError, "group_norm: num_groups must be an int, got float"),
        (zeros((2, 4)), dict(eps=-1.0), ValueError, "group_norm: eps must be finite and at least 0, got -1.0"),
        (
            zeros((2, 4)),
            dict(activation="relu"),
            ValueError,
            "group_norm: activation must be None or 'silu', got 'relu'",
        ),
        (zeros((2, 4)), dict(layout="NCL"), ValueError, "layout must be one of NCHW, NHWC, got 'NCL'"),
    )
    huge = ((BIG // 64, 2, 32), (1, 2, BIG // 2))

    def net(self, num_groups=2, only_bias=False, **settings):
        return OnlyBias(num_groups, **settings) if only_bias else Norm(num_groups, **settings)

    def operators(self, shapes=((1, 2),) * 3, num_groups=1, eps=1e-5, activation=None, layout="NCHW", only_bias=False):
        given = (False, True) if only_bias else (len(shapes) > 1, len(shapes) > 2)
        absent = [name for name, is_given in zip(("weight", "bias"), given) if not is_given]
        return chain(operators(num_groups, eps, activation, layout).without(*absent))

    def reference_gradient(self, x, *rest, **settings):
        return group_norm_backward(x, *rest, **settings)

    def random_case(self, random):
        groups, width, layout = (
            random.randint(1, 4),
            random.choice((0, 1, 2, 5, 8, 13)),
            random.choice(("NCHW", "NHWC")),
        )
        outer, inner = length(random), lengths(random)[:3]
        channels = groups * width
        shape = (outer, channels, *inner) if layout == "NCHW" else (outer, *inner, channels)
        has = (random.random() < 0.7, random.random() < 0.7)
        return case(
            shape, groups, *has, eps=random.choice((0.1, 1.0)), activation=random.choice((None, "silu")), layout=layout
        )

    def check_huge(self, gpu, *shape):
        x = gpu.random(*shape)
        (y,) = gpu.run(self.operators(((1,),), num_groups=2)[0], x)[:1]
        # PyTorch's own group_norm adds up float32 numbers one after the other, which loses digits here.
        for sample in {0, shape[0] - 1}:
            of_groups = x[sample].reshape(2, -1)
            for group, got in zip(of_groups, y[sample].reshape(2, -1)):
                parts = group.split(2**28)
                mean = sum(part.sum(dtype=gpu.torch.float64) for part in parts) / group.numel()
                var = sum(((part.double() - mean) ** 2).sum() for part in parts) / group.numel()
                for at in (slice(0, 1000), slice(-1000, None)):
                    gpu.assert_close(got[at], (group[at].double() - mean) / (var + 1e-5).sqrt())


class Norm(nn.Cell):
    def __init__(self, num_groups, **settings):
        super().__init__()
        self.num_groups, self.settings = num_groups, settings

    def construct(self, x, weight=None, bias=None):
        return msops.group_norm(x, self.num_groups, weight, bias, **self.settings)


class OnlyBias(Norm):
    """Has a bias, and no weight."""

    def construct(self, x, bias):
        return msops.group_norm(x, self.num_groups, None, bias, **self.settings)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_mean_far_from_zero(layout, activation):
    """What the mean was rounded by is taken into account, so that no digit is lost beside those of x."""
    shape = (2, 8, 60, 70) if layout == "NCHW" else (2, 60, 70, 8)
    x, weight, bias, dy = random(2, np.float32, shape, 8, 8, shape)
    x += 1000
    settings = dict(num_groups=2, activation=activation, layout=layout)
    forward, backward = TestGroupNorm().operators(((1,),) * 3, **settings)
    calls = ((forward, group_norm, [x, weight, bias]), (backward, group_norm_backward, [x, weight, bias, dy]))
    for operator, formula, inputs in calls:
        wanted = formula(*(a.astype(np.float64) for a in inputs), **settings)
        for got, want in zip(results_of(operator, *inputs), wanted):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max() / 10))


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float64", "float32"), ("float16", "float16")], ids=str)
def test_dtypes_of_parameters(mode, dtypes):
    """Parameters may be float32, and so are their gradients then."""
    x, *rest = random(3, "float64", (3, 8, 15), 8, 8)
    inputs, settings = [x.astype(dtypes[0]), *(a.astype(dtypes[1]) for a in rest)], dict(num_groups=4, **SILU)
    formulas = (functools.partial(formula, **settings) for formula in (group_norm, group_norm_backward))
    check_dtypes(Norm(**settings), inputs, inputs[:1], *formulas)


@pytest.mark.parametrize("affine", [True, False])
def test_loads_checkpoints_of_nn_group_norm(mode, affine, tmp_path):
    ours, theirs = msops.GroupNorm(2, 6, affine=affine), nn.GroupNorm(2, 6, affine=affine)
    assert [(p.name, p.requires_grad) for p in ours.get_parameters()] == [
        (p.name, p.requires_grad) for p in theirs.get_parameters()
    ]
    for parameter in theirs.get_parameters():
        parameter.set_data(Tensor(random(5, np.float32, parameter.shape)[0]))
    mindspore.save_checkpoint(theirs, str(tmp_path / "norm.ckpt"))
    mindspore.load_param_into_net(ours, mindspore.load_checkpoint(str(tmp_path / "norm.ckpt")), strict_load=True)
    x = Tensor(random(4, np.float32, (3, 6, 4, 5))[0])
    np.testing.assert_allclose(ours(x).asnumpy(), theirs(x).asnumpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16"), ("float32", "float64")], ids=str)
def test_cell_casts_parameters_to_the_dtype_of_the_input(mode, dtypes):
    (x,) = random(6, "float32", (4, 5, 8))
    net = msops.GroupNorm(2, 8, layout="NHWC", activation="silu", dtype=getattr(mindspore, dtypes[1]))
    y = net(Tensor(x.astype(dtypes[0])))
    assert y.dtype == getattr(mindspore, dtypes[0])
    want = group_norm(x, np.ones(8, np.float32), num_groups=2, **SILU, **LAST)
    np.testing.assert_allclose(y.asnumpy(), *want, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_training(mode, layout):
    (x,) = random(7, np.float32, (3, 8, 8))
    check_training(msops.GroupNorm(4, 8, activation="silu", layout=layout), x)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(num_groups=0), ValueError, "num_groups must be at least 1, got 0"),
        (dict(num_channels=2.0), TypeError, "num_channels must be an int, got float"),
        (dict(num_groups=3), ValueError, "num_groups must divide num_channels, 4, got 3"),
        (dict(affine=1), TypeError, "affine must be a bool, got int"),
        (dict(eps=-1), ValueError, "eps must be finite and at least 0, got -1"),
        (dict(activation="relu"), ValueError, "activation must be None or 'silu', got 'relu'"),
        (dict(layout="CHW"), ValueError, "layout must be one of NCHW, NHWC, got 'CHW'"),
        (dict(dtype=mindspore.int32), TypeError, "dtype must be float16, float32 or float64, got Int32"),
    ],
    ids=str,
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=f"^(GroupNorm|group_norm): {words}"):
        msops.GroupNorm(**(dict(num_groups=2, num_channels=4) | settings))
