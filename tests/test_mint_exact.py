"""Tests patched functions of `mindspore.mint` in float64 with random numbers, equal ones, NaN and infinity among them,
against NumPy: their results have float64's digits, and order NaN as the greatest number."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint
from scipy import special

import msops
from msops.testing.checks import as_tuple

F = mint.nn.functional
TIMES = 40  # that each function is called
TOLERANCE = 2e-14


def any_number(random, shape):
    """Returns numbers of many sizes, with some NaN, infinities and zeros."""
    x = random.normal(size=shape) * 10.0 ** random.integers(-12, 2, shape)
    for wrong in (np.nan, np.inf, -np.inf, 0.0):
        x[random.random(shape) < 0.05] = wrong
    return x


def number(random, shape):
    return random.normal(size=shape) * 10.0 ** random.integers(-12, 2, shape)


def equals(random, shape):
    """Returns numbers of which many are equal, or differ beyond float32's digits alone."""
    x = random.integers(-2, 3, shape) + random.integers(0, 3, shape) * 1e-12
    x[random.random(shape) < 0.1] = np.nan
    x[random.random(shape) < 0.1] = np.inf
    return x


def sorted_last(x, descending=False):
    """Returns numbers in order along the last axis; NaN is the greatest. Equal ones keep their order."""
    key = np.where(np.isnan(x), np.inf, x)
    order = np.lexsort((np.isnan(x), key), axis=-1)
    if descending:
        order = np.lexsort((~np.isnan(x), -key), axis=-1)
    return np.take_along_axis(x, order, -1), order


def top(x):
    k = (x.shape[-1] + 1) // 2
    return tuple(each[..., :k] for each in sorted_last(x, descending=True))


def kth(x):
    return tuple(each[..., 0] for each in sorted_last(x))


def unique(x):
    """Returns what mint.unique does, where each NaN is a value of its own. NumPy may give several NaN in any order."""
    values, order = sorted_last(x.reshape(-1))
    starts = np.append(True, values[1:] != values[:-1])
    places = np.empty(x.size, np.int64)
    places[order] = np.cumsum(starts) - 1
    return values[starts], places.reshape(x.shape), np.bincount(places)


def where_greatest(x):
    nan = np.isnan(x)
    return np.where(nan.any(-1), nan.argmax(-1), np.where(nan, -np.inf, x).argmax(-1))


def clipped(low, high):
    return lambda x: np.clip(x, low, high)


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def selu(x):
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def shrunk(x):
    return np.where(np.abs(x) <= 0.5, 0, x - 0.5 * np.sign(x))


OF_ONE = {  # what draws the numbers, mint's function, NumPy's
    "sort": (equals, mint.sort, sorted_last),
    "sort, descending": (equals, lambda x: mint.sort(x, descending=True), lambda x: sorted_last(x, True)),
    "argsort": (equals, mint.argsort, lambda x: sorted_last(x)[1]),
    "topk": (equals, lambda x: mint.topk(x, (x.shape[-1] + 1) // 2), top),
    "kthvalue": (equals, lambda x: mint.kthvalue(x, 1), kth),
    "unique": (equals, lambda x: mint.unique(x, return_inverse=True, return_counts=True), unique),
    "argmax": (equals, lambda x: mint.argmax(x, -1), where_greatest),
    "argmin": (equals, lambda x: mint.argmin(x, -1), lambda x: where_greatest(-x)),
    "hardtanh": (any_number, F.hardtanh, clipped(-1, 1)),
    "relu6": (any_number, F.relu6, clipped(0, 6)),
    "threshold": (any_number, lambda x: F.threshold(x, 0.5, -2.0), lambda x: np.where(x <= 0.5, -2, x)),
    "softshrink": (any_number, F.softshrink, shrunk),
    "log1p": (number, lambda x: mint.log1p(mint.abs(x)), lambda x: np.log1p(np.abs(x))),
    "expm1": (number, mint.expm1, np.expm1),
    "elu": (number, F.elu, elu),
    "selu": (number, F.selu, selu),
    "softplus": (number, F.softplus, softplus),
    "logsigmoid": (number, F.logsigmoid, lambda x: -softplus(-x)),
    "mish": (number, F.mish, lambda x: x * np.tanh(np.logaddexp(0, x))),
    "tanh": (number, mint.tanh, np.tanh),
    "log2": (number, lambda x: mint.log2(mint.abs(x)), lambda x: np.log2(np.abs(x))),
    "log10": (number, lambda x: mint.log10(mint.abs(x)), lambda x: np.log10(np.abs(x))),
    "exp2": (number, mint.exp2, np.exp2),
    "cumsum": (number, lambda x: mint.cumsum(x, -1), lambda x: np.cumsum(x, -1)),
    "cumprod": (number, lambda x: mint.cumprod(x, -1), lambda x: np.cumprod(x, -1)),
}
OF_TWO = {
    "logaddexp": (mint.logaddexp, np.logaddexp),
    "logaddexp2": (mint.logaddexp2, np.logaddexp2),
    "xlogy": (lambda x, y: mint.xlogy(x, mint.abs(y)), lambda x, y: special.xlogy(x, np.abs(y))),
}
OF_MATRICES = {  # and of how many axes
    "mm": (mint.mm, np.matmul, 2),
    "matmul": (mint.matmul, np.matmul, 3),
    "bmm": (mint.bmm, np.matmul, 3),
    "linear": (lambda x, y: F.linear(x, y.T), np.matmul, 2),
    "einsum": (lambda x, y: mint.einsum("bij,bjk->bik", x, y), np.matmul, 3),
    "addmm": (lambda x, y: mint.addmm(Tensor(np.nan, x.dtype), x, y, beta=0), np.matmul, 2),
}


@pytest.fixture(scope="module", autouse=True)
def patched():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with msops.patch_mindspore():
        yield


def agree(got, want, size=0):
    got, want = ([x if isinstance(x, np.ndarray) else x.asnumpy() for x in as_tuple(each)] for each in (got, want))
    for result, expected in zip(got, want):
        assert result.shape == expected.shape
        if expected.dtype.kind == "f":
            assert result.dtype == np.float64
            np.testing.assert_allclose(result, expected, TOLERANCE, TOLERANCE * size)
        else:
            np.testing.assert_array_equal(result, expected)


def shape_of(random):
    return *random.integers(1, 6, random.integers(0, 3)).tolist(), int(random.integers(1, 40))


@pytest.mark.wide
@pytest.mark.parametrize("name", OF_ONE)
def test_of_one(name):
    random = np.random.default_rng(0)
    draw, function, reference = OF_ONE[name]
    for _ in range(TIMES):
        x = draw(random, shape_of(random))
        size = np.abs(x).sum() if name.startswith("cum") else 0
        with np.errstate(all="ignore"):
            agree(function(Tensor(x)), reference(x), size)


@pytest.mark.wide
@pytest.mark.parametrize("name", OF_TWO)
def test_of_two(name):
    random = np.random.default_rng(0)
    function, reference = OF_TWO[name]
    for _ in range(TIMES):
        shape = shape_of(random)
        x, y = number(random, shape), number(random, shape)
        y[random.random(shape) < 0.1] = np.inf
        x[random.random(shape) < 0.1] = 0
        agree(function(Tensor(x), Tensor(y)), reference(x, y), 1)


@pytest.mark.wide
@pytest.mark.parametrize("name", OF_MATRICES)
def test_of_matrices(name):
    """Sums of no terms are 0."""
    random = np.random.default_rng(0)
    function, reference, axes = OF_MATRICES[name]
    for _ in range(TIMES):
        batch, rows, inner, columns = (int(n) for n in random.integers((1, 1, 0, 1), 8))
        shapes = [(batch, rows, inner)[3 - axes :], (batch, inner, columns)[3 - axes :]]
        x, y = (number(random, shape) for shape in shapes)
        agree(function(Tensor(x), Tensor(y)), reference(x, y), np.abs(x).sum() * np.abs(y).max(initial=0))


def test_ranges():
    random = np.random.default_rng(0)
    for _ in range(TIMES):
        start, step, n = random.normal(), random.normal(), int(random.integers(2, 50))
        end = start + step * (n - 0.5)
        agree(mint.arange(start, end, step, dtype=mindspore.float64), np.arange(start, end, step), 100)
        agree(mint.linspace(start, end, n, dtype=mindspore.float64), np.linspace(start, end, n), 100)


def test_float16_and_float32():
    ones = Tensor(np.ones(4096, np.float16))
    assert mint.cumsum(ones, 0).asnumpy()[-1] == 4096
    x = np.float32([5.5, -7, 1e-8, 44, 90, -3])
    for function, reference in ((mint.tanh, np.tanh), (F.mish, OF_ONE["mish"][2]), (F.elu, elu)):
        np.testing.assert_allclose(function(Tensor(x)).asnumpy(), reference(x.astype(np.float64)), 5e-6)


def test_digits_of_log_softmax(device_target):
    """The gradient of one logarithm is the difference of 1 and a probability, and those of the others are these."""
    x = np.random.default_rng(0).normal(0, 4, (8, 1000))
    for dtype, tolerance in ((np.float32, 1.5e-7), (np.float64, 1e-15)):
        if device_target == "GPU" and dtype == np.float64:
            continue  # MindSpore has no such kernel
        values = x.astype(dtype)
        gradient = mindspore.grad(lambda x: F.log_softmax(x, 1)[:, 0].sum())(Tensor(values)).asnumpy()
        want = np.eye(1, 1000) - special.softmax(values.astype(np.float64), 1)
        np.testing.assert_allclose(gradient, want, tolerance * 4, tolerance)
        want = special.log_softmax(values.astype(np.float64), 1)
        np.testing.assert_allclose(F.log_softmax(Tensor(values), 1).asnumpy(), want, 2 * tolerance)


def test_largest_of_windows_beside_nan():
    """NaN is the largest, at its own place, beside infinity, too."""
    x = np.float32([[[[np.nan, 1, np.inf, 3, np.inf, 2], [2, 1, np.nan, 2, 3e38, 1]]]])
    y, places = F.max_pool2d(Tensor(x), 2, return_indices=True)
    np.testing.assert_array_equal(y.asnumpy(), [[[[np.nan, np.nan, np.inf]]]])
    np.testing.assert_array_equal(places.asnumpy(), [[[[0, 8, 4]]]])
    gradient = mindspore.grad(lambda x: F.max_pool2d(x, 2).sum())(Tensor(x)).asnumpy()
    np.testing.assert_array_equal(gradient.reshape(-1).nonzero()[0], [0, 4, 8])


def test_gradient_of_median(device_target):
    """Elements that equal it share its gradient; along an axis, one of them has it."""
    dtype = np.float32 if device_target == "GPU" else np.float64  # which MindSpore sorts there
    x = Tensor(np.array([[1.0, 2, 2, 2, 5], [0.1, 3, 0.1, 0.1, 3]], dtype))
    np.testing.assert_allclose(mindspore.grad(mint.median)(x[0]).asnumpy(), [0, *[dtype(1 / 3)] * 3, 0])
    assert mint.median(x[1]).asnumpy() == dtype(0.1)
    gradient = mindspore.grad(lambda x: mint.median(x, 1)[0].sum())(x).asnumpy()
    np.testing.assert_array_equal(np.sort(gradient), [[0, 0, 0, 0, 1]] * 2)
    assert np.isnan(mint.median(Tensor([np.nan, np.nan, 1.0])).asnumpy())
    assert np.isposinf(mint.median(Tensor([np.inf, np.inf, 1.0])).asnumpy())


def test_gradients_of_running_extremes():
    """They reach the numbers that are taken. A scalar weight of prelu is for all channels; no integer is infinite."""
    x = Tensor([[3.0, 1.0, 4.0], [0.0, 5.0, -1.0]], mindspore.float64)
    for function, want in ((mint.cummax, [[2, 0, 1], [1, 2, 0]]), (mint.cummin, [[1, 2, 0], [2, 0, 1]])):
        gradient = mindspore.grad(lambda x, function=function: function(x, 1)[0].sum())(x)
        np.testing.assert_array_equal(gradient.asnumpy(), want)
    np.testing.assert_array_equal(F.prelu(-x.float(), Tensor(0.5)).asnumpy()[0], [-1.5, -0.5, -2])
    assert not mint.isinf(Tensor([1, 2])).asnumpy().any()


def test_gradient_beside_zero():
    """A product's gradient with respect to a 0 is the product of the others."""
    gradient = mindspore.grad(lambda x: mint.cumprod(x, 0).sum())(Tensor([2.0, 0.0, 3.0], mindspore.float64))
    np.testing.assert_array_equal(gradient.asnumpy(), [1, 8, 0])
