"""Programs that call what MindSpore has for all devices."""

import numpy as np
import scipy.special
from mindspore import Tensor, mint

from . import case

F = mint.nn.functional
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 3, 4))
PART = RNG.uniform(0.1, 0.9, (3, 4))
LARGE = RNG.uniform(1.1, 3, (3, 4))
WHOLE, OTHER = RNG.integers(1, 9, (2, 3, 4))
ORDERED = np.array([[1, 3, 5, 7], [2, 2, 4, 9], [0, 1, 2, 3]])
BOTH = ("float16", "float32")


@case(X, Y, reference=lambda x, y: (x + 2 * y, x + y, x - 3 * y, x - y, x * y, x / y, x / y), dtypes=BOTH)
def arithmetic(x, y):
    scaled = mint.add(x, y, alpha=2), mint.add(x, y), mint.sub(x, y, alpha=3), mint.sub(x, y)
    return *scaled, mint.mul(x, y), mint.div(x, y), mint.divide(x, y)


@case(WHOLE, OTHER, reference=lambda x, y: (x + 2 * y, x - y, x * y, np.float32(x / y), np.gcd(x, y), x**2, -x, x * x))
def arithmetic_of_whole_numbers(x, y):
    several = mint.add(x, y, alpha=2), mint.sub(x, y), mint.mul(x, y), mint.div(x, y), mint.gcd(x, y)
    return *several, mint.pow(x, 2), mint.neg(x), mint.square(x)


@case(X, Y, LARGE, reference=lambda x, y, z: (x + y * z, x + 0.5 * (y * z), scipy.special.xlogy(x, z)), dtypes=BOTH)
def combinations(x, y, z):
    return mint.addcmul(x, y, z), mint.addcmul(x, y, z, value=0.5), mint.xlogy(x, z)


@case(
    *(LARGE, PART),
    reference=lambda x, y: (x**1.5, x**y, 2.0**y, 1 / x, np.sqrt(x), x * x, -x, -x, np.exp(y)),
    dtypes=BOTH,
)
def powers(x, y):
    single = mint.reciprocal(x), mint.sqrt(x), mint.square(x), mint.neg(x), mint.negative(x), mint.exp(y)
    return mint.pow(x, 1.5), mint.pow(x, y), mint.pow(2.0, y), *single


@case(WHOLE, LARGE, reference=lambda n, x: (np.float64(n) ** 2, np.float64(x) ** 0.5), differentiable=False)
def powers_in_float64(n, x):
    return mint.float_power(n, 2), mint.float_power(x, 0.5)


@case(
    *(PART, LARGE),
    reference=lambda x, z: (np.arccos(x), np.arcsin(x), np.arcsinh(x), np.arctan(x), np.arctanh(x), np.arccosh(z)),
)
def inverse_functions(x, z):
    inner = mint.arccos(x), mint.asin(x), mint.arcsinh(x), mint.arctan(x), mint.atanh(x)
    return *inner, mint.arccosh(z)


@case(X, Y, reference=lambda x, y: (np.arctan2(x, y), scipy.special.expit(x), np.sign(x), np.abs(y)), dtypes=BOTH)
def signs(x, y):
    return mint.arctan2(x, y), mint.sigmoid(x), mint.sign(x), mint.abs(y)


@case(
    X * 3,
    reference=lambda x: (np.ceil(x), np.floor(x), np.trunc(x), np.trunc(x), np.round(x)),
    dtypes=BOTH,
    differentiable=False,
)
def roundings(x):
    return mint.ceil(x), mint.floor(x), mint.trunc(x), mint.fix(x), mint.special.round(x)


@case(
    *(X, Y, PART),
    reference=lambda x, y, z: (np.clip(x, -0.5, 0.5), np.clip(x, 0, None), np.minimum(x, z), np.clip(x, -1, 1)),
)
def cut(x, y, z):
    return mint.clamp(x, -0.5, 0.5), mint.clamp(x, min=0), mint.clip(x, max=z), F.clamp(x, -1, 1)


@case(X, reference=lambda x: (scipy.special.softmax(x, 0), np.repeat(x, 2, 1)[None]), dtypes=BOTH)
def other_words(x):
    return mint.softmax(x, 0), F.upsample(mint.unsqueeze(x, 0), 8)


@case(X, Y, reference=lambda x, y: (np.maximum(x, y), np.minimum(x, y), x.max(), x.max(1), x.min(0)), dtypes=BOTH)
def extremes(x, y):
    return mint.maximum(x, y), mint.minimum(x, y), mint.max(x), mint.max(x, 1)[0], mint.amin(x, 0)


def compared(x, y):
    return (x == y, x == y, x != y, x != y, x > y, x > y, x >= y, x >= y, x < y, x < y, x <= y, x <= y)


@case(WHOLE, OTHER, reference=compared)
def comparisons(x, y):
    equal = mint.eq(x, y), mint.eq(y, x), mint.ne(x, y), mint.not_equal(x, y)
    above = mint.gt(x, y), mint.greater(x, y), mint.ge(x, y), mint.greater_equal(x, y)
    return *equal, *above, mint.lt(x, y), mint.less(x, y), mint.le(x, y), mint.less_equal(x, y)


@case(X, Y, reference=lambda x, y: compared(x, y)[2::2], dtypes=BOTH, differentiable=False)
def comparisons_of_floats(x, y):
    return mint.ne(x, y), mint.gt(x, y), mint.ge(x, y), mint.lt(x, y), mint.le(x, y)


@case(X > 0, Y > 0, reference=lambda x, y: (x & y, x | y, ~x))
def truths(x, y):
    return mint.logical_and(x, y), mint.logical_or(x, y), mint.logical_not(x)


SPECIAL = np.array([1, np.inf, -np.inf, np.nan, -2.5])


@case(
    SPECIAL,
    reference=lambda x: (np.isinf(x), np.isnan(x), np.nan_to_num(x, nan=1, posinf=2, neginf=-3), np.isclose(x, 1)),
    differentiable=False,
)
def classes(x):
    return mint.isinf(x), mint.isnan(x), mint.nan_to_num(x, 1.0, 2.0, -3.0), mint.isclose(x, x * 0 + 1)


@case(
    *(X, X > 0),
    reference=lambda x, mask: (x[mask], np.concatenate((x, x), 1), x.ravel(), x.reshape(2, 6), x.T, x, x[None]),
    dtypes=BOTH,
)
def moved(x, mask):
    shapes = mint.ravel(x), mint.reshape(x, (2, 6)), mint.swapaxes(x, 0, 1), mint.squeeze(mint.unsqueeze(x, 1), 1)
    return mint.masked_select(x, mask), mint.concat((x, x), 1), *shapes, F.broadcast_to(x, (1, 3, 4))


@case(
    ORDERED,
    np.array([[2, 6], [2, 10], [0, 3]]),
    reference=lambda rows, values: (
        np.stack([np.searchsorted(row, value) for row, value in zip(np.sort(rows, 1), values)]),
        np.stack([np.searchsorted(row, value, "right") for row, value in zip(np.sort(rows, 1), values)]),
    ),
)
def places_in_order(rows, values):
    return mint.searchsorted(rows, values), mint.searchsorted(rows, values, right=True)


@case(X[0], Y[:, 0], reference=lambda x, y: (*np.meshgrid(x, y, indexing="ij"), *np.meshgrid(x, y)))
def grids(x, y):
    return *mint.meshgrid(x, y), *mint.meshgrid(x, y, indexing="xy")


def distances(x, y):
    apart = x[:, None] - y[None]
    return np.sqrt((apart * apart).sum(-1)), np.abs(apart).sum(-1), (np.abs(apart) ** 3).sum(-1) ** (1 / 3)


@case(X, Y, reference=distances)
def distances_of_rows(x, y):
    return mint.cdist(x, y), mint.cdist(x, y, 1.0), mint.cdist(x, y, 3.0)


@case(LARGE, X, reference=lambda r, angle: (r * np.cos(angle), r * np.sin(angle)), differentiable=False)
def complex_numbers(r, angle):
    z = mint.polar(r, angle)
    return mint.real(z), mint.imag(z)


LOWER = np.tril(RNG.standard_normal((3, 3))) + 3 * np.eye(3)


@case(LOWER, X, reference=lambda a, b: (np.linalg.solve(a, b), np.linalg.solve(a.T, b)), differentiable=False)
def triangles(a, b):
    return mint.triangular_solve(b, a, upper=False)[0], mint.triangular_solve(b, mint.t(a))[0]


def bounded(x):
    return (
        np.where(np.abs(x) > 0.5, x, 0),
        np.clip(x / 6 + 0.5, 0, 1),
        x * np.clip(x / 6 + 0.5, 0, 1),
        np.where(x > 0.5, x - 0.5, np.where(x < -0.5, x + 0.5, 0)),
        np.where(x > 0, x, 0.25 * x),
        x @ Y.T + np.arange(3),
    )


@case(X * 3, reference=bounded, dtypes=BOTH)
def activations(x):
    weight, bias = Tensor(Y.astype(np.float32)).astype(x.dtype), Tensor(np.arange(3.0)).astype(x.dtype)
    hard = F.hardshrink(x, 0.5), F.hardsigmoid(x), F.hardswish(x), F.softshrink(x, 0.5)
    return *hard, F.prelu(x, Tensor(np.float32([0.25])).astype(x.dtype)), F.linear(x, weight, bias)


def sampled(x, grid):
    """Samples planes between their elements; what is outside is 0."""
    n, _, height, width = x.shape
    out = np.zeros((n, x.shape[1], *grid.shape[1:3]))
    for b, i, j in np.ndindex(n, *grid.shape[1:3]):
        column, row = (grid[b, i, j] + 1) / 2 * np.array([width - 1, height - 1])
        for r in (int(np.floor(row)), int(np.floor(row)) + 1):
            for c in (int(np.floor(column)), int(np.floor(column)) + 1):
                if 0 <= r < height and 0 <= c < width:
                    out[b, :, i, j] += max(0, 1 - abs(row - r)) * max(0, 1 - abs(column - c)) * x[b, :, r, c]
    return out


@case(RNG.standard_normal((2, 3, 4, 5)), RNG.uniform(-1.2, 1.2, (2, 3, 2, 2)), reference=sampled)
def samples(x, grid):
    return F.grid_sample(x, grid, align_corners=True)


@case(X, np.array([[0, 3, 1], [2, 2, 0]]), reference=lambda x, i: (np.take_along_axis(x[:2], i, 1), x.reshape(12)))
def gathered(x, i):
    return mint.gather(x, 1, i), F.flatten(x)


@case(reference=lambda: (np.ones((2, 3)), np.linspace(-1, 1, 6)))
def constants():
    return mint.ones((2, 3)), mint.linspace(-1, 1, 6)
