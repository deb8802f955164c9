import math

import numpy as np
import pytest

import msops
from card import DTYPES, chain, zeros
from gpu import BIG
from msops.operators.geglu import operators, packed_operators
from operator_test import run, run_gradient
from test_sigmoid import sigmoid
from test_swiglu import GatedTest, taking_halves

NAMES = ("none", "tanh")
NONE, TANH = (dict(approximate=name) for name in NAMES)


def normal(x):
    """Returns the normal distribution and its density: Phi(x) = 1/2 + p(x) (x + x^3/3 + x^5/15 + x^7/105 + ...)."""
    x = np.clip(x, -40, 40)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi).astype(x.dtype)
    inner = np.clip(x, -9, 9)
    series, term, n = inner, inner, 1
    while np.any(np.abs(term) > np.finfo(x.dtype).eps / 8 * np.abs(series)):
        n += 2
        term = term * (inner * inner / n)
        series = series + term
    inside = np.exp(-inner * inner / 2) / np.sqrt(2 * np.pi).astype(x.dtype)
    return np.clip(x.dtype.type(0.5) + inside * series, 0, 1), density


def gelu(x, approximate="tanh"):
    """Returns gelu of x, its slope and the slope's slope."""
    if approximate == "none":
        phi, density = normal(x)
        return x * phi, phi + x * density, (2 - x * x) * density
    if approximate == "sigmoid":
        slope = np.longdouble("1.702").astype(x.dtype)
        u, s = slope * x, sigmoid(slope * x)
        return x * s, s + u * s * (1 - s), slope * s * (1 - s) * (2 + u * (1 - 2 * s))
    linear = (2 * np.sqrt(2 / np.longdouble(np.pi))).astype(x.dtype)
    cubic = x.dtype.type(linear * x.dtype.type(0.044715))
    s = sigmoid(linear * x + cubic * x * x * x)
    first, second = linear + 3 * cubic * x * x, 6 * cubic * x
    slope = s + x * s * (1 - s) * first
    return x * s, slope, s * (1 - s) * (2 * first + x * ((1 - 2 * s) * first * first + second))


def geglu(gate, up, **settings):
    return (gelu(gate, **settings)[0] * up,)


def geglu_backward(gate, up, dout, **settings):
    value, slope, _ = gelu(gate, **settings)
    return dout * up * slope, dout * value


def geglu_backward_backward(gate, up, dout, ddgate, ddup, **settings):
    value, slope, bend = gelu(gate, **settings)
    return (
        dout * (ddgate * up * bend + ddup * slope),
        dout * ddgate * slope,
        ddgate * up * slope + ddup * value,
    )


class TestGeglu(GatedTest):
    function, cell = msops.geglu, msops.GeGLU
    formulas = taking_halves(geglu, geglu_backward, geglu_backward_backward)
    cases = {
        "scalar": ([(), ()], {}),
        "empty": ([(2, 0)] * 2, NONE),
        "one": ([(1,)] * 2, NONE),
        "prime": ([(7, 13)] * 2, NONE),
        "prime, tanh": ([(7, 13)] * 2, TANH),
        "past a pack": ([(1025,)] * 2, TANH),
        "large": ([(3, 100_003)] * 2, NONE),
        **{name: (shapes, (TANH, NONE)[i % 2]) for i, (name, shapes) in enumerate(GatedTest.packed.items())},
    }
    further = {
        **{f"{n}, {name}": ([(n,)] * 2, dict(approximate=name)) for n in (2, 31, 257, 4099) for name in NAMES},
        **{name: (shapes, (TANH, NONE)[i % 2]) for i, (name, shapes) in enumerate(GatedTest.further_packed.items())},
    }
    small = "prime"
    hostile = ("prime", "prime, tanh", "packed, prime")
    roundings = 64  # the second derivative is a difference of numbers that are larger than it
    second_order = True
    wrong = (
        (zeros(3, 3, dtype=np.int32), {}, TypeError, "geglu: gate must be float16, float32 or float64, got int32"),
        ([*zeros(3), 1.5], {}, TypeError, "geglu: up must be a Tensor, got float"),
        (zeros((2, 3)), NONE, ValueError, "geglu: gate must have a last axis of even length where there is no up, got"),
        (zeros(3, 3), dict(approximate="erf"), ValueError, "geglu: approximate must be one of none, tanh, got 'erf'"),
        (zeros(3, 3), dict(approximate=True), TypeError, "geglu: approximate must be a str, got bool"),
    )
    huge = ((BIG, "none"), (BIG, "tanh"))

    def operators(self, shapes=(), approximate="tanh"):
        return chain((packed_operators if len(shapes) == 1 else operators)(approximate))

    def random_case(self, random):
        return super().random_case(random)[0], dict(approximate=random.choice(NAMES))

    def check_huge(self, gpu, n, approximate):
        forward, backward, _ = self.operators(approximate=approximate)
        gate = gpu.random(n)
        up = gate.flip(0)
        (out,) = gpu.run(forward, gate, up)
        gpu.assert_close(out, gpu.torch.nn.functional.gelu(gate, approximate=approximate) * up)
        del out
        _, dup = gpu.run(backward, gate, up, up)
        gpu.assert_close(dup, gpu.torch.nn.functional.gelu(gate, approximate=approximate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", NAMES)
def test_extremes(mode, approximate, dtype):
    """Large gates pass the other input or become 0; their slope is 1 or 0. NaN stays."""
    info = np.finfo(dtype)
    gate = np.array([info.min, -1e4, -0.0, 0.0, 1e4, info.max, np.inf, np.nan], dtype)
    want = np.array([0, 0, 0, 0, 1e4, info.max, np.inf, np.nan], dtype)
    net = msops.GeGLU(approximate)
    np.testing.assert_array_equal(run(net, gate, np.ones_like(gate))[0], want)
    slope = run_gradient(net, [gate, np.ones_like(gate)], [np.ones_like(gate)])[0]
    np.testing.assert_allclose(slope, [0, 0, 0.5, 0.5, 1, 1, 1, np.nan], rtol=2e-7 if dtype == "float32" else 1e-15)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_small_results_keep_their_digits(mode, dtype):
    """1 + erf(x) would lose them for negative x. The last factor e^(-x^2/2) has the rounding of its exponent."""
    gate = np.linspace(-8, -2, 25).astype(dtype)
    (got,) = run(msops.GeGLU("none"), gate, np.ones_like(gate))
    want = [x / 2 * math.erfc(-x / math.sqrt(2)) for x in gate.astype(float)]
    np.testing.assert_allclose(got, want, rtol=40 * np.finfo(dtype).eps)
