import numpy as np
import pytest
import scipy.special

import msops
from card import DTYPES, chain, results_of, zeros
from gpu import BIG
from msops.operators.gelu import operators
from operator_test import OperatorTest, run, run_gradient
from test_geglu import NONE, TANH, gelu as value_slope_bend

NAMES = "none", "tanh", "sigmoid"
SIGMOID = dict(approximate="sigmoid")


def gelu(x, approximate="none"):
    return (value_slope_bend(x, approximate)[0],)


def gelu_backward(x, dy, approximate="none"):
    return (dy * value_slope_bend(x, approximate)[1],)


def gelu_backward_backward(x, dy, ddx, approximate="none"):
    _, slope, bend = value_slope_bend(x, approximate)
    return ddx * dy * bend, ddx * slope


class TestGelu(OperatorTest):
    function, cell = msops.gelu, msops.GELU
    formulas = (gelu, gelu_backward, gelu_backward_backward)
    cases = {
        "scalar": ([()], NONE),
        "empty": ([(2, 0)], NONE),
        "one": ([(1,)], TANH),
        "prime": ([(7, 13)], NONE),
        "prime, tanh": ([(7, 13)], TANH),
        "prime, sigmoid": ([(7, 13)], SIGMOID),
        "past a pack": ([(1025,)], TANH),
        "large": ([(3, 100_003)], NONE),
    }
    further = {f"{n}, {name}": ([(n,)], dict(approximate=name)) for n in (2, 31, 257, 4099) for name in NAMES}
    small = "prime"
    hostile = ("prime", "prime, tanh", "prime, sigmoid")
    roundings = 64  # the second derivative is a difference of numbers that are larger than it
    second_order = True
    wrong = (
        (zeros(3, dtype=np.int32), {}, TypeError, "gelu: x must be float16, float32 or float64, got int32"),
        ([1.5], {}, TypeError, "gelu: x must be a Tensor, got float"),
        (zeros(3), dict(approximate="erf"), ValueError, "gelu: approximate must be one of none, tanh, sigmoid, got"),
        (zeros(3), dict(approximate=True), TypeError, "gelu: approximate must be a str, got bool"),
    )
    huge = tuple((BIG, name) for name in NAMES)

    def operators(self, shapes=(), approximate="none"):
        return chain(operators(approximate))

    def random_case(self, random):
        return super().random_case(random)[0], dict(approximate=random.choice(NAMES))

    def check_huge(self, gpu, n, approximate):
        forward, *_ = self.operators(approximate=approximate)
        x = gpu.random(n)
        (y,) = gpu.run(forward, x)
        if approximate == "sigmoid":
            gpu.assert_close(y, x * gpu.torch.sigmoid(1.702 * x))
        else:
            gpu.assert_close(y, gpu.torch.nn.functional.gelu(x, approximate=approximate))


def test_default_is_exact():
    (x,) = zeros(1)
    assert msops.GELU().approximate == "none"
    np.testing.assert_array_equal(run(msops.GELU(), x + 2)[0], run(msops.GELU("none"), x + 2)[0])
    assert run(msops.GELU(), x + 2)[0] != run(msops.GELU("tanh"), x + 2)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", NAMES)
def test_extremes(mode, approximate, dtype):
    """Large numbers pass or become 0; the slope there is 1 or 0. NaN stays."""
    info = np.finfo(dtype)
    x = np.array([info.min, -1e4, -0.0, 0.0, 1e4, info.max, np.inf, np.nan], dtype)
    want = np.array([0, 0, 0, 0, 1e4, info.max, np.inf, np.nan], dtype)
    net = msops.GELU(approximate)
    np.testing.assert_array_equal(run(net, x)[0], want)
    slope = run_gradient(net, [x], [np.ones_like(x)])[0]
    np.testing.assert_allclose(slope, [0, 0, 0.5, 0.5, 1, 1, 1, np.nan], rtol=2e-7 if dtype == "float32" else 1e-15)


def exact(x):
    """Returns x Phi(x) in extended precision, where Phi(-|x|) = e^(-x^2/2) erfcx(|x| / sqrt 2) / 2."""
    wide = x.astype(np.longdouble)
    lower = np.exp(-wide * wide / 2) * scipy.special.erfcx(np.abs(x.astype(float)) * np.sqrt(0.5)) / 2
    return wide * np.where(x < 0, lower, 1 - lower)


@pytest.mark.parametrize(
    ("dtype", "least", "units"), [("float16", -3.5, 0.55), ("float32", -12, 6), ("float64", -37, 8)]
)
def test_results_keep_their_digits(dtype, least, units):
    """Results for negative numbers do so, too, as long as they are normal numbers."""
    x = np.linspace(least, 9, 20_001).astype(dtype)
    (y,) = results_of(operators("none"), x)
    error = np.abs(y - exact(x)) / np.spacing(np.abs(exact(x)).astype(dtype))
    assert error.max() <= units
