import copy
import gc
import weakref

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from card import chain, length, random, unwritten, zeros
from guarded_call import GuardedCall
from msops.compat import VERSION
from msops.operators.depthwise_conv2d import operators
from msops.testing.entry import Status, prepare_operator
from operator_test import (
    Gradient,
    Net,
    OperatorTest,
    check_second_order,
    check_training,
    run,
    run_gradient,
    wide_in_graph_mode,
)


def pair(value):
    return value if isinstance(value, (tuple, list)) else (value, value)


class Taps:
    """Holds, for each tap of the kernel, the part of the padded image that it meets."""

    def __init__(self, x, weight, stride=1, pad_mode="valid", padding=0, dilation=1):
        self.kernel = weight.shape[2:]
        stride, dilation = pair(stride), pair(dilation)
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, self.kernel)]
        if pad_mode == "same":
            outs = [-(-length // s) for length, s in zip(x.shape[2:], stride)]
            total = [max(0, (o - 1) * s + r - n) for o, s, r, n in zip(outs, stride, reach, x.shape[2:])]
            self.padding = [(t // 2, t - t // 2) for t in total]
        else:
            pads = padding if isinstance(padding, (tuple, list)) and len(padding) == 4 else np.repeat(pair(padding), 2)
            self.padding = [tuple(pads[:2]), tuple(pads[2:])]
        padded = [n + sum(p) for n, p in zip(x.shape[2:], self.padding)]
        self.out = [(n - r) // s + 1 for n, r, s in zip(padded, reach, stride)]
        self.slices = {
            tap: tuple(
                slice(t * d, t * d + (o - 1) * s + 1 if o else 0, s)
                for t, d, s, o in zip(tap, dilation, stride, self.out)
            )
            for tap in np.ndindex(self.kernel)
        }

        self.multiplier = weight.shape[0] // max(1, x.shape[1])

    def pad(self, x):
        """Returns the padded images, repeated so that each kernel has one."""
        padded = np.pad(x, [(0, 0), (0, 0), *self.padding])
        return padded if self.multiplier == 1 else np.repeat(padded, self.multiplier, 1)


def convolve(x, weight, bias=None, **settings):
    taps = Taps(x, weight, **settings)
    padded = taps.pad(x)
    out = np.zeros((x.shape[0], weight.shape[0], *taps.out), x.dtype)
    for tap, (rows, columns) in taps.slices.items():
        out += weight[(slice(None), 0, *tap)][:, None, None] * padded[:, :, rows, columns]
    return (out if bias is None else out + bias[:, None, None],)


def convolve_gradient(x, weight, dout, **settings):
    taps = Taps(x, weight, **settings)
    padded = taps.pad(x)
    dpadded, dweight = np.zeros_like(padded), np.zeros_like(weight)
    for tap, (rows, columns) in taps.slices.items():
        dweight[(slice(None), 0, *tap)] = (dout * padded[:, :, rows, columns]).sum((0, 2, 3))
        dpadded[:, :, rows, columns] += weight[(slice(None), 0, *tap)][:, None, None] * dout
    (top, _), (left, _) = taps.padding
    dx = dpadded[:, :, top : top + x.shape[2], left : left + x.shape[3]]
    return dx.reshape(x.shape[0], x.shape[1], taps.multiplier, *x.shape[2:]).sum(2), dweight, dout.sum((0, 2, 3))


def case(image, kernel, multiplier=1, has_bias=True, **settings):
    channels = image[1] * multiplier
    return [image, (channels, 1, *kernel), (channels,)][: 2 + has_bias], settings


SAME = dict(pad_mode="same")
DISTINCT = dict(stride=(2, 1), dilation=(2, 1), pad_mode="pad", padding=(2, 0, 0, 2))


def kernels():
    """Yields the cases that the operator's kernels tell apart."""
    for k in (3, 5, 7):
        for stride in (1, 2):
            for padding in (
                (k // 2,) * 4,
                (0, 0, 0, 0),
                (k + 1, 0, 2, 2 * k),
                (k - 1, 0, 0, k - 1),
                (0, 0, k // 2, 0),
                (k // 2 - 1, k // 2) * 2,
            ):
                image = (2, 3, 19, 37) if padding[0] <= k else (3, 2, 8, 9)
                yield case(image, (k, k), stride=stride, pad_mode="pad", padding=padding)
        # Kernels move 4, 2 or 1 elements at once, depending on the width, and these images have enough strips for
        # several tiles of a block. Other widths are odd: below, at and above a strip, and of one element.
        aligned = ((9, 2, 40, 56), (3, 2, 29, 36), (7, 3, 15, 14), (3, 3, 14, 18))
        for image in (*aligned, (40, 2, 7, 7), (9, 2, 40, 57), (3, 2, 29, 35), (3, 2, 5, 9), (2, 3, 11, 1)):
            yield case(image, (k, k), **SAME)
    for image in ((5, 24, 14, 14), (3, 5, 14, 14), (1, 40, 7, 7), (9, 33, 7, 7)):  # groups are full or not
        yield case(image, (3, 3), **SAME)
    yield case((2, 3, 20, 21), (9, 9), **SAME)
    yield case((2, 2, 70, 66), (31, 31), **SAME)
    yield case((3, 2, 5, 90), (1, 8), **SAME)
    yield case((1, 2, 64, 64), (3, 5), **SAME)
    yield case((1, 1, 9, 9), (80, 70), **SAME)
    yield case((2, 3, 20, 21), (1, 1), **SAME)
    yield case((2, 3, 20, 21), (2, 5), has_bias=False, stride=(2, 3), **SAME)
    yield case((2, 3, 20, 21), (3, 3), dilation=2, **SAME)
    yield case((2, 3, 20, 21), (5, 4), dilation=(1, 2), **SAME)
    yield case((2, 3, 20, 21), (3, 3), 2, **SAME)
    yield case((2, 3, 20, 21), (9, 9), stride=2, **SAME)
    yield case((3, 1, 150, 151), (3, 3), pad_mode="pad", padding=1)
    yield case((2, 3, 0, 2), (1, 2), pad_mode="pad", padding=(2, 0, 0, 0))
    yield case((3, 7, 100, 101), (3, 2), 2, **DISTINCT)


K3 = ((1, 2, 5, 5), (2, 1, 3, 3))


class TestDepthwiseConv2d(OperatorTest):
    function = msops.depthwise_conv2d
    formulas = (convolve, convolve_gradient)
    cases = {
        "small": case((2, 2, 4, 3), (3, 2), 2, stride=(1, 2), pad_mode="pad", padding=(1, 0, 2, 1)),
        "one": case((1, 1, 1, 1), (1, 1)),
        "empty batch": case((0, 3, 5, 5), (3, 3)),
        "no channels": case((2, 0, 5, 5), (3, 3)),
        "no output rows": case((2, 3, 0, 5), (3, 3), **SAME),
        "k3": case((3, 5, 17, 19), (3, 3), **SAME),
        "k3 rows": case((2, 3, 40, 7), (3, 3)),
        "k3 s2": case((3, 5, 17, 19), (3, 3), stride=2, **SAME),
        "k3 s2 even": case((2, 4, 16, 32), (3, 3), stride=2, pad_mode="pad", padding=1),
        "k3 wide pad": case((2, 2, 6, 5), (3, 3), pad_mode="pad", padding=(5, 3, 4, 7)),
        "k3 s2 wide pad": case((2, 2, 6, 5), (3, 3), stride=2, pad_mode="pad", padding=(5, 3, 4, 6)),
        "k3 s3": case((2, 3, 14, 11), (3, 3), stride=3, **SAME),
        "k5": case((2, 3, 21, 9), (5, 5), **SAME),
        "k5 s2": case((2, 3, 21, 10), (5, 5), stride=2, pad_mode="pad", padding=(2, 1)),
        "k7": case((2, 3, 15, 33), (7, 7), **SAME),
        "k7 s2": case((2, 3, 15, 34), (7, 7), stride=2, **SAME),
        "k2": case((2, 3, 9, 8), (2, 2), **SAME),
        "k11": case((1, 2, 23, 20), (11, 11), pad_mode="pad", padding=5),
        "long kernel": case((2, 3, 12, 31), (1, 9), stride=(2, 3), pad_mode="pad", padding=(0, 4)),
        "dilated": case((2, 3, 16, 15), (3, 3), dilation=2, pad_mode="pad", padding=2),
        "dilated s2": case((2, 3, 16, 15), (3, 4), stride=2, dilation=(3, 2), **SAME),
        "multiplier": case((2, 3, 11, 13), (3, 3), 3, **SAME),
        "kernel in padding": case((1, 2, 2, 3), (5, 5), pad_mode="pad", padding=4),
        "stride past the image": case((2, 2, 5, 6), (3, 3), stride=7, **SAME),
        "stride 3, dilation 2, m2": case((2, 2, 14, 11), (3, 3), 2, stride=3, dilation=2, **SAME),
        "stride 4, dilation 6": case(
            (2, 2, 33, 41), (2, 5), stride=4, dilation=6, pad_mode="pad", padding=(3, 1, 9, 2)
        ),
        "stride past every tap": case((2, 2, 20, 40), (3, 3), stride=17, **SAME),
        "k31": case((1, 2, 40, 33), (31, 31), pad_mode="pad", padding=15),
        "more than a thousand taps": case((1, 1, 36, 35), (34, 33), pad_mode="pad", padding=3),
        "nothing but padding": case((1, 1, 0, 4), (3, 3), pad_mode="pad", padding=2),
        "wide rows": case((1, 2, 5, 700), (3, 3), **SAME),
        "large": case((4, 30, 56, 57), (3, 3), **SAME),
        "many positions": case((3, 1, 150, 151), (3, 3), **SAME),
        "many positions, k5 m2": case((3, 1, 150, 151), (5, 4), 2),
    }
    further = {
        "distinct": case((2, 4, 7, 5), (3, 2), 2, **DISTINCT),
        "distinct, no bias": case((2, 4, 7, 5), (3, 2), 2, has_bias=False, **DISTINCT),
        "far padding": case((1, 1, 10, 1), (3, 1), stride=(2**30, 1), pad_mode="pad", padding=(0, 2**31 - 1, 0, 0)),
        **{f"{shapes[0]}, {shapes[1]}, {settings}": (shapes, settings) for shapes, settings in kernels()},
    }
    small = "small"
    without_formula = ("far padding",)
    hostile = ("distinct", "distinct, no bias")
    huge = ((2**15 + 1, 3), (2**15 + 1, 4))
    second_order = True
    wrong = (
        (zeros(*K3, dtype=np.int8), {}, TypeError, "x must be float16, float32 or float64, got int8"),
        ([*zeros(K3[0]), 3.0], {}, TypeError, "depthwise_conv2d: weight must be a Tensor, got float"),
        (
            zeros(K3[0], (2, 2, 3, 3)),
            {},
            ValueError,
            "(K, 1, kh, kw) = (2, 1, 3, 3), got (2, 2, 3, 3)",
        ),
        (zeros(K3[0], (3, 1, 3, 3)), {}, ValueError, "multiple of the 2 channels of x as first size, got 3"),
        (zeros(K3[0], (2, 1, 3, 6)), {}, ValueError, "x must be at least as large as the kernel, got 5"),
        (zeros(K3[0], (2, 1, 0, 3)), {}, ValueError, "a kernel of at least 1 x 1, got shape (2, 1, 0, 3)"),
        (zeros(*K3), dict(stride=0), ValueError, "stride must be at least 1"),
        (zeros(*K3), dict(stride=1.0), TypeError, "stride must be an int or a tuple of ints, got 1.0"),
        (zeros(*K3), dict(dilation=(1, 2, 3)), ValueError, "dilation must have 2 numbers, got (1, 2, 3)"),
        (zeros(*K3), dict(pad_mode="pad", padding=-1), ValueError, "padding must be at least 0"),
        (zeros(*K3), dict(padding=1), ValueError, "padding must be 0 unless pad_mode is 'pad'"),
        (zeros(*K3), dict(pad_mode="full"), ValueError, "pad_mode must be one of valid, same, pad, got 'full'"),
    )

    def operators(self, shapes=(), stride=1, pad_mode="valid", padding=0, dilation=1):
        forward = operators(stride, pad_mode, padding, dilation)
        return chain(forward if len(shapes) > 2 else forward.without("bias"))

    def check_huge(self, gpu, n, kernel):
        shapes, settings = case((n, 64, 32, 32), (kernel, kernel), **SAME)
        forward, backward = self.operators(shapes, **settings)[:2]
        x, weight, _ = inputs = [gpu.random(*shape) for shape in shapes]
        (out,) = gpu.run(forward, *inputs)
        dout = gpu.random(*out.shape)
        outputs = _, dweight, dbias, _ = gpu.run(backward, x, weight, dout)
        gpu.check_parts(forward, inputs, [out], n, 3, gpu.assert_close)
        gpu.check_parts(backward, [x, weight, dout], outputs, n, 3, gpu.assert_close)
        gpu.assert_sums(dbias, gpu.sum(dout, (0, 2, 3), 1024))
        before = (kernel - 1) // 2  # this tap meets each output at its own position
        products = (d * i for d, i in zip(dout.split(1024), x.split(1024)))
        gpu.assert_sums(dweight[:, 0, before, before], sum(gpu.sum(each, (0, 2, 3)) for each in products))

    def random_case(self, random):
        """Chooses strides, and dilations of one tap, up to 2^31 - 1."""

        def choose(most):
            return 2**31 - 1 - random.randrange(2) if random.random() < 0.05 else random.randint(1, most)

        mode = random.choice(("valid", "same", "pad"))
        padding = tuple(random.randint(0, 6) if mode == "pad" else 0 for _ in range(4))
        kernel = tuple(1 + random.randrange(40 if random.random() < 0.03 else 6) for _ in range(2))
        stride = tuple(choose(4) for _ in range(2))
        dilation = tuple(choose(3) if taps == 1 else random.randint(1, 3) for taps in kernel)
        image = [length(random), length(random)]
        if mode != "same":
            for i, total in enumerate((sum(padding[:2]), sum(padding[2:]))):
                image[i] += max(0, dilation[i] * (kernel[i] - 1) + 1 - total)
        channels = random.randrange(5)
        settings = dict(stride=stride, dilation=dilation, pad_mode=mode, padding=padding)
        image = (random.randrange(4), channels, *image)
        return case(image, kernel, random.randint(1, 3), random.random() < 0.5, **settings)


def test_second_order_without_bias(mode):
    gradient = Gradient(Net(msops.depthwise_conv2d, stride=2, pad_mode="same"), 2)
    check_second_order(gradient, random(1, np.float64, *K3, (1, 2, 3, 3)), mode)


# These convolutions of one kernel differ in one attribute each, and MindSpore's caches must keep them apart.
IMAGE_AND_WEIGHT = random(7, np.float32, (2, 3, 9, 9), (3, 1, 3, 3))
SETTINGS = (
    dict(),
    dict(stride=2),
    dict(stride=(1, 2)),
    dict(dilation=2),
    dict(pad_mode="same"),
    dict(pad_mode="pad", padding=1),
    dict(pad_mode="pad", padding=(1, 0)),
    dict(pad_mode="pad", padding=(0, 1, 1, 0)),
)


@wide_in_graph_mode
def test_settings_one_after_the_other(mode):
    for settings in SETTINGS * 2:
        out = run(Net(msops.depthwise_conv2d, **settings), *IMAGE_AND_WEIGHT)[0]
        np.testing.assert_allclose(out, *convolve(*IMAGE_AND_WEIGHT, **settings), rtol=1e-5, atol=1e-5)
        dout = random(8, np.float32, out.shape)
        gradients = run_gradient(Net(msops.depthwise_conv2d, **settings), IMAGE_AND_WEIGHT, dout)
        for got, want in zip(gradients, convolve_gradient(*IMAGE_AND_WEIGHT, *dout, **settings)):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


class Nested(nn.Cell):
    """Nests a convolution in another one with other settings, without and with bias."""

    def __init__(self, weights):
        super().__init__()
        self.inner = msops.DepthwiseConv2d(3, 3, stride=2, weight_init=Tensor(weights[0]))
        weight, bias = map(Tensor, weights[1:])
        self.outer = msops.DepthwiseConv2d(
            3, 3, pad_mode="pad", padding=(0, 1, 2, 0), weight_init=weight, has_bias=True, bias_init=bias
        )

    def construct(self, x):
        return self.outer(self.inner(x))


def test_settings_one_inside_the_other(mode):
    (x, *weights) = random(9, np.float32, (2, 3, 9, 9), (3, 1, 3, 3), (3, 1, 3, 3), (3,))
    net = Nested(weights)
    inner, outer = dict(stride=2, pad_mode="same"), dict(pad_mode="pad", padding=(0, 1, 2, 0))
    (between,) = convolve(x, weights[0], **inner)
    (out,) = convolve(between, weights[1], weights[2], **outer)
    np.testing.assert_allclose(run(net, x)[0], out, rtol=1e-5, atol=1e-5)
    dbetween, *dlast = convolve_gradient(between, weights[1], np.ones_like(out), **outer)
    dx, dfirst, _ = convolve_gradient(x, weights[0], dbetween, **inner)
    got = ops.grad(net, 0, net.trainable_params())(Tensor(x))
    for gradient, want in zip((got[0], *got[1]), (dx, dfirst, *dlast)):
        np.testing.assert_allclose(gradient.asnumpy(), want, rtol=1e-4, atol=1e-4)


KERNELS = ((1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (11, 11), (4, 4), (1, 5), (6, 3))
PADDINGS = (
    dict(pad_mode="valid"),
    dict(pad_mode="same"),
    dict(pad_mode="pad", padding=2),
    dict(pad_mode="pad", padding=(3, 1)),
)


HAS_GROUPS = pytest.mark.skipif(VERSION < (2, 0), reason="MindSpore 1.10's ops.conv2d takes other arguments")


class Reference(nn.Cell):
    """Computes MindSpore's convolution with a group for each channel."""

    def __init__(self, channels, **settings):
        super().__init__()
        self.channels, self.settings = channels, settings

    def construct(self, x, weight, bias):
        return ops.conv2d(x, weight, bias, groups=self.channels, **self.settings)


@pytest.mark.wide
@HAS_GROUPS
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_equals_ops_conv2d(kernel, padding):
    """Forward equals MindSpore's convolution over strides, dilations and multipliers."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    for stride in (1, 2, (3, 1)):
        for dilation in (1, 2, (1, 3)):
            for multiplier in (1, 2):
                image = (2, 3, 24, 23) if max(kernel) < 11 else (2, 3, 34, 37)
                inputs = [
                    Tensor(a) for a in random(0, np.float32, image, (3 * multiplier, 1, *kernel), (3 * multiplier,))
                ]
                settings = dict(stride=stride, dilation=dilation, **padding)
                want = Reference(3, **settings)(*inputs).asnumpy()
                got = msops.depthwise_conv2d(*inputs, **settings).asnumpy()
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=str((stride, dilation, multiplier)))


@pytest.mark.wide
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(stride=2, pad_mode="same"),
        dict(dilation=2, pad_mode="pad", padding=2),
        dict(stride=(2, 1), pad_mode="pad", padding=(1, 0)),
    ],
    ids=str,
)
@HAS_GROUPS
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (2, 4)], ids=str)
def test_gradient_equals_ops_conv2d(mode, kernel, settings):
    inputs = random(0, np.float32, (2, 3, 13, 14), (3, 1, *kernel), (3,))
    dout = random(1, np.float32, run(Reference(3, **settings), *inputs)[0].shape)
    want = run_gradient(Reference(3, **settings), inputs, dout)
    for got, expected in zip(run_gradient(Net(msops.depthwise_conv2d, **settings), inputs, dout), want):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(has_bias=True),
        dict(kernel_size=(3, 2), stride=2, dilation=(1, 2)),
        dict(pad_mode="pad", padding=(1, 2, 0, 3)),
        dict(pad_mode="valid", channel_multiplier=2, has_bias=True),
        dict(weight_init="ones", bias_init="zeros", has_bias=True),
    ],
    ids=str,
)
@pytest.mark.skipif(VERSION < (2, 7), reason="nn.Conv2d has other initial values in MindSpore before 2.7")
def test_replaces_nn_conv2d(mode, settings, tmp_path):
    """DepthwiseConv2d has nn.Conv2d's initial values for the same seed, the same output, and loads its checkpoint."""
    settings = dict(kernel_size=3) | settings
    multiplier = settings.get("channel_multiplier", 1)
    builtin = {k: v for k, v in settings.items() if k != "channel_multiplier"}
    mindspore.set_seed(3)
    ours = msops.DepthwiseConv2d(4, **settings)
    mindspore.set_seed(3)
    theirs = nn.Conv2d(4, 4 * multiplier, group=4, **builtin)
    assert list(ours.parameters_dict()) == list(theirs.parameters_dict())
    for own, other in zip(ours.get_parameters(), theirs.get_parameters()):
        np.testing.assert_array_equal(own.asnumpy(), other.asnumpy())
    x = Tensor(random(4, np.float32, (2, 4, 9, 8))[0])
    np.testing.assert_allclose(ours(x).asnumpy(), theirs(x).asnumpy(), rtol=1e-4, atol=1e-5)
    for parameter in theirs.get_parameters():
        parameter.set_data(Tensor(random(5, np.float32, parameter.shape)[0]))
    mindspore.save_checkpoint(theirs, str(tmp_path / "conv.ckpt"))
    not_loaded, _ = mindspore.load_param_into_net(ours, mindspore.load_checkpoint(str(tmp_path / "conv.ckpt")))
    assert not not_loaded
    np.testing.assert_allclose(ours(x).asnumpy(), theirs(x).asnumpy(), rtol=1e-4, atol=1e-5)


def test_training(mode):
    check_training(
        msops.DepthwiseConv2d(3, 3, has_bias=True, channel_multiplier=2), *random(6, np.float32, (4, 3, 8, 8))
    )


class SharedWeight(nn.Cell):
    """Uses one weight in two convolutions, whose gradients add up."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(random(2, np.float32, (3, 1, 3, 3))[0]), name="weight")

    def construct(self, x):
        once = msops.depthwise_conv2d(x, self.weight, stride=2)
        return once + msops.depthwise_conv2d(x, self.weight, stride=2)


def test_shared_weight(mode):
    check_training(SharedWeight(), *random(6, np.float32, (4, 3, 8, 8)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-44])
def test_special_values(mode, value):
    """A value reaches only the outputs whose window holds it. Subnormal numbers are not flushed to 0."""
    x = np.zeros((1, 1, 9, 9), np.float32)
    x[0, 0, 4, 5] = value
    out = run(msops.DepthwiseConv2d(1, 3, weight_init="ones"), x)[0]
    expected = np.zeros_like(x)
    expected[0, 0, 3:6, 4:7] = value
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(in_channels=0), ValueError, "in_channels must be at least 1, got 0"),
        (dict(in_channels=2.0), TypeError, "in_channels must be an int, got float"),
        (dict(kernel_size=0), ValueError, "kernel_size must be at least 1"),
        (dict(kernel_size=(3, 3, 3)), ValueError, "kernel_size must have 2 numbers"),
        (dict(channel_multiplier=-1), ValueError, "channel_multiplier must be at least 1, got -1"),
        (dict(has_bias=1), TypeError, "has_bias must be a bool, got int"),
        (dict(dtype=mindspore.int32), TypeError, "dtype must be float16, float32 or float64, got Int32"),
        (dict(stride="2"), TypeError, "stride must be an int or a tuple of ints, got '2'"),
        (dict(stride=np.bool_(True)), TypeError, r"stride must be an int or a tuple of ints, got True \(bool_\)"),
        (dict(stride=2**70), ValueError, r"stride must be at least 1 and less than 2\^31"),
        (dict(weight_init="onse"), ValueError, r"weight_init must be a number, .* of shape \(2, 1, 3, 3\), got 'onse'"),
        (dict(weight_init=[1.0]), TypeError, r"weight_init must be a number, .*, got \[1.0\]"),
        (
            dict(weight_init=Tensor([0.0], mindspore.float32)),
            ValueError,
            r"weight_init must be .* of shape \(2, 1, 3, 3\), got a Tensor of shape \(1,\)",
        ),
        (dict(weight_init=Tensor([0.0], mindspore.float16)), TypeError, "weight_init must be float32 as dtype is"),
        (dict(padding=1), ValueError, "padding must be 0 unless pad_mode is 'pad'"),
    ],
    ids=str,
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=f"^(DepthwiseConv2d|depthwise_conv2d): {words}"):
        msops.DepthwiseConv2d(**(dict(in_channels=2, kernel_size=3) | settings))


def test_padding_past_32_bits(mode):
    """Windows far below the image hold nothing."""
    x, weight = random(0, np.float32, (1, 1, 10, 1), (1, 1, 3, 1))
    settings = dict(stride=(2**30, 1), pad_mode="pad", padding=(0, 2**31 - 1, 0, 0))
    out = run(Net(msops.depthwise_conv2d, **settings), x, weight)[0]
    np.testing.assert_allclose(out[0, 0, :, 0], [(x[0, 0, :3] * weight[0, 0]).sum(), 0, 0], rtol=1e-6)


def test_cells_are_freed(mode):
    """A Cell is freed as soon as the last reference goes, without waiting for the garbage collector."""
    if mode == "pynative" and VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 keeps Cells")
    cell = msops.DepthwiseConv2d(3, 3)
    run(cell, *zeros((1, 3, 5, 5)))
    seen = weakref.ref(cell)
    gc.disable()
    del cell
    gc.enable()
    assert seen() is None


def test_copies_have_their_own_parameters(mode):
    first = msops.DepthwiseConv2d(3, 3, weight_init="ones")
    second = copy.deepcopy(first)
    second.weight.set_data(second.weight * 2)
    x = np.ones((1, 3, 5, 5), np.float32)
    np.testing.assert_array_equal(2 * run(first, x)[0], run(second, x)[0])


def test_numpy_numbers(mode):
    """Sizes and flags may be NumPy numbers."""
    two = np.int64(2)
    settings = dict(stride=two, padding=(np.int32(1), np.uint8(0)), pad_mode="pad", dilation=two)
    cell = msops.DepthwiseConv2d(two, two, channel_multiplier=two, has_bias=np.bool_(True), **settings)
    plain = msops.DepthwiseConv2d(2, 2, channel_multiplier=2, has_bias=True, stride=2, padding=(1, 0), pad_mode="pad",
                                  dilation=2)  # fmt: skip
    assert cell.forward_op is plain.forward_op
    assert cell.weight.shape == plain.weight.shape
    x, weight = random(10, np.float32, (1, 2, 7, 7), (4, 1, 2, 2))
    want = run(Net(msops.depthwise_conv2d, stride=2, padding=(1, 0), pad_mode="pad", dilation=2), x, weight)
    np.testing.assert_array_equal(run(Net(msops.depthwise_conv2d, **settings), x, weight)[0], want[0])


@pytest.mark.wide
def test_many_settings_are_not_kept():
    """Operators with settings that were used long ago are freed. A Cell's operator lives as long as the Cell."""
    cell = msops.DepthwiseConv2d(1, 1, stride=(1, 99))
    seen = weakref.ref(cell.forward_op)
    alive = [weakref.ref(operators((1, 100 + i), "valid", 0, 1)) for i in range(300)]
    gc.collect()
    assert sum(each() is not None for each in alive) <= 256
    np.testing.assert_array_equal(run(cell, np.ones((1, 1, 2, 3), np.float32))[0].shape, (1, 1, 2, 1))
    assert seen() is cell.forward_op


def distinct_call(has_bias, i):
    """Returns a call of the forward operator (i = 0) or of its gradient (i = 1), whose lengths all differ."""
    name = "distinct" if has_bias else "distinct, no bias"
    return TestDepthwiseConv2d().entry_calls(*TestDepthwiseConv2d.further[name], "float32", parts=2)[i]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("i", [0, 1])
def test_entries_need_a_bias_if_they_are_told_so(capfd, has_bias, i):
    guarded = GuardedCall(distinct_call(has_bias, i), capfd)
    attributes = dict(guarded.operator.attributes, **{"has_dbias" if i else "has_bias": int(not has_bias)})
    guarded.refused(Status.BAD_RANK, Status.BAD_PARAMETER_COUNT, attributes=attributes)


def test_gradient_of_another_size_is_refused(capfd):
    guarded = GuardedCall(distinct_call(True, 1), capfd)
    for axis in range(4):
        shape = [*guarded.params["dout"].shape]
        shape[axis] += 1
        guarded.refused_with("dout", Status.BAD_SHAPE, shape=tuple(shape))


def test_scratch_of_too_many_rows(capfd):
    """Scratch of more than 65535 rows is refused, since rows are blocks on the y axis of a grid."""
    guarded = GuardedCall(distinct_call(True, 1), capfd)
    guarded.refused_with("partial", Status.BAD_SHAPE, shape=(65536, guarded.params["partial"].shape[1]))


def test_gradient_of_no_columns():
    """The gradient may have many rows and no columns, though no convolution has such a result. It has as many rows as
    the padding is high."""
    x, weight = random(11, np.float32, (1, 1, 4, 1), (1, 1, 1, 9))
    dout, dx, dweight = unwritten((1, 1, 2**31 + 3, 0), "float32"), unwritten(x.shape, "float32"), np.ones_like(weight)
    operator = operators((1, 1), "pad", (2**31 - 1, 0, 0, 0), (2, 1)).without("bias").gradient
    scratch = unwritten((1, 10), "float32")
    assert prepare_operator(operator, [x, weight, dout, dx, dweight, scratch])() == Status.OK
    assert not dx.any()
    assert not dweight.any()
