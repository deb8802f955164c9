"""Every C entry against NumPy, some operators through MindSpore, and their scratch, for what hypothesis chooses."""

import functools
import math

import mindspore
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msops
from msops.check import Spec
from msops.library import of_package
from msops.operators.add import backward as add_backward
from msops.operators.depthwise_conv2d import make_forward as _convolution
from msops.operators.lltm import forward as _pointwise
from msops.testing.checks import assert_accurate, assert_near, largest, unit
from msops.testing.entry import Status, call
from operator_test import Net, run
from test_add import sum_to
from test_depthwise_conv2d import convolve, convolve_gradient
from test_lltm import TestPointwise as LLTMCase
from test_sigmoid import TestSigmoid as SigmoidCase
from test_trilinear_interpolation import TestTrilinearInterpolation as TrilinearCase

settings.register_profile(
    "msops", max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("msops")

lengths = st.one_of(st.integers(0, 9), st.integers(0, 70))
rows = st.integers(1, 4)  # of scratch


@st.composite
def broadcast(draw):
    """Two shapes that broadcast to one another, of up to four axes."""
    axes = draw(st.lists(st.integers(0, 9).flatmap(lambda n: st.sampled_from([(n, n), (n, 1), (1, n)])), max_size=4))
    shapes = [[pair[k] for pair in axes] for k in (0, 1)]
    short = draw(st.integers(0, 1))
    while shapes[short] and shapes[short][0] == 1 and draw(st.booleans()):
        del shapes[short][0]
    return tuple(map(tuple, shapes))


@st.composite
def numbers(draw):
    """A function that makes arrays of one dtype, of small or of large numbers."""
    dtype, scale = draw(st.sampled_from(["float16", "float32", "float64"])), draw(st.sampled_from([0.1, 1, 5]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return lambda *shape: np.asarray(random.normal(scale=scale, size=shape), dtype)


def check(library, entry, reference, inputs, scratch=(), **attributes):
    """Calls an entry, whose outputs must be those of a function of NumPy, but for scratch of these shapes.

    Errors may be 8 roundings of the largest number on the way, which that of the inputs' magnitudes tells, and that of
    the result.
    """
    dtype = inputs[0].dtype
    wide = np.dtype("float64" if dtype == np.float64 else "float32")
    exact = [x.astype(np.longdouble) for x in inputs]
    expected, magnitudes = reference(*exact), reference(*map(np.abs, exact))
    outs = [np.full(want.shape, np.nan, dtype) for want in expected]
    partial = [np.full(shape, np.nan, wide) for shape in scratch]
    assert call(getattr(of_package(library), entry), [*inputs, *outs, *partial], attributes) == Status.OK
    for got, want, magnitude in zip(outs, expected, magnitudes):
        size = max(map(largest, (want, magnitude, *exact)))
        assert_near(got, want, 8 * np.finfo(wide).eps * size + 0.75 * unit(want, dtype), entry)


@given(broadcast(), numbers(), rows)
def test_add(shapes, array, splits):
    x, y = (array(*shape) for shape in shapes)
    check("add", "AddForward", lambda x, y: (x + y,), [x, y])
    dout = array(*np.broadcast_shapes(*shapes))
    scratch = (splits, x.size if splits > 1 else 1)
    check("add", "AddBackward", lambda dout, x: (sum_to(dout, x.shape),), [dout, x], [scratch])


@given(st.lists(st.integers(0, 12), max_size=4), numbers())
def test_sigmoid(shape, array):
    check("sigmoid", "SigmoidForward", SigmoidCase.reference, [array(*shape)])
    check("sigmoid", "SigmoidBackward", lambda y, dy: (dy * y * (1 - y),), [array(*shape), array(*shape)])


@given(lengths, lengths, numbers(), rows)
def test_lltm(batch, hidden, array, groups):
    inputs = [array(batch, 3 * hidden), array(3 * hidden), array(batch, hidden)]
    check("lltm", "LLTMForward", LLTMCase.reference, inputs)
    inputs += [array(batch, hidden), array(batch, hidden)]
    check("lltm", "LLTMBackward", LLTMCase.reference_gradient, inputs, [(groups, 3 * hidden)])


@given(lengths, lengths, numbers())
def test_trilinear_interpolation(n, features, array):
    of, library = TrilinearCase, "trilinear_interpolation"
    inputs = [array(n, 8, features), array(n, 3)]
    check(library, "TrilinearInterpolationForward", of.reference, inputs)
    check(library, "TrilinearInterpolationBackward", of.reference_gradient, [*inputs, array(n, features)])


@st.composite
def convolutions(draw):
    """Shapes of images and kernels, and settings, of a result with elements or without."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride, dilation = draw(st.tuples(st.integers(1, 6), st.integers(1, 6))), draw(pair), draw(pair)
    mode = draw(st.sampled_from(["valid", "same", "pad"]))
    padding = draw(st.tuples(*[st.integers(0, 4)] * 4)) if mode == "pad" else (0, 0, 0, 0)
    image = [draw(st.integers(max(0, d * (k - 1) + 1 - sum(padding[2 * i : 2 * i + 2]) * (mode == "pad")), 40))
             for i, (k, d) in enumerate(zip(kernel, dilation))]  # fmt: skip
    batch, channels, multiplier = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    of = dict(stride=stride, dilation=dilation, pad_mode=mode, padding=padding)
    return (batch, channels, *image), (channels * multiplier, 1, *kernel), of


@given(convolutions(), numbers(), rows)
def test_depthwise_conv2d(convolution, array, splits):
    of_x, of_weight, of = convolution
    attributes = dict(pad_mode=("valid", "same", "pad").index(of["pad_mode"]), has_bias=1)
    attributes.update(zip(("pad_top", "pad_bottom", "pad_left", "pad_right"), of["padding"]))
    for name in ("stride", "dilation"):
        attributes[f"{name}_h"], attributes[f"{name}_w"] = of[name]
    x, weight, bias = array(*of_x), array(*of_weight), array(of_weight[0])
    forward, backward = (functools.partial(f, **of) for f in (convolve, convolve_gradient))
    library = "depthwise_conv2d"
    check(library, "DepthwiseConv2dForward", lambda *inputs: (forward(*inputs),), [x, weight, bias], **attributes)
    inputs = [x, weight, array(*forward(x, weight).shape)]
    scratch = (splits, weight.size + bias.size)
    check(library, "DepthwiseConv2dBackward", backward, inputs, [scratch], **attributes)


@settings(max_examples=25)
@given(broadcast(), numbers())
def test_through_mindspore(shapes, array):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, y = (array(*shape) for shape in shapes)
    assert_accurate(run(Net(msops.add), x, y), lambda x, y: (x + y,), [x, y])
    assert_accurate(run(Net(msops.sigmoid), x), SigmoidCase.reference, [x])


sizes = st.one_of(lengths, st.integers(1, 2**22))


@given(
    st.tuples(sizes, sizes),
    st.sampled_from([(0,), (1,), (0, 1)]),
    sizes,
    sizes,
    st.integers(1, 40),
    st.integers(0, 2**14),
)
def test_scratch(shape, summed, batch, channels, taps, hidden):
    """Is no more than docs/speed.md says."""

    def numbers(operator, *shapes):
        return math.prod(operator.infer(*(Spec(shape, mindspore.float32) for shape in shapes))[-1].shape)

    x = tuple(1 if axis in summed else size for axis, size in enumerate(shape))
    assert numbers(add_backward, shape, x) <= 2**19
    convolution = _convolution("", 1, "same", 0, 1, False).gradient
    image = (batch, channels, 56, 56)
    scratch = numbers(convolution, image, (channels, 1, taps, taps), image)
    assert scratch <= max(2048, channels) * (taps**2 + 1)
    state = (batch, hidden)
    assert numbers(_pointwise.gradient, (batch, 3 * hidden), (3 * hidden,), *[state] * 3) <= 3 * max(2**16, hidden)
