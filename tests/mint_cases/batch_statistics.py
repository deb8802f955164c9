"""Programs that normalize a batch which lies on several devices, in steps."""

import numpy as np
from mindspore import mint, ops
from mindspore.mint.nn.layer import _functions

from . import case

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 3, 2, 5)) * 2 + 1
Y = RNG.standard_normal((6, 3))
MEANS, DEVIATIONS = RNG.standard_normal((2, 3)), RNG.uniform(0.5, 2, (2, 3))
COUNTS = np.array([40.0, 6.0])
WEIGHT, BIAS = RNG.standard_normal((2, 3))
EPS = 1e-3
BOTH = ("float16", "float32")


def statistics(x):
    axes = (0, *range(2, x.ndim))
    return x.mean(axes), 1 / np.sqrt(x.var(axes) + EPS)


@case(X, Y, reference=lambda x, y: (*statistics(x), *statistics(y)))
def statistics_of_channels(x, y):
    return *mint.batch_norm_stats(x, EPS), *mint.batch_norm_stats(y, EPS)


@case(X, reference=lambda x: tuple(map(np.float32, statistics(x))), dtypes=("float16",), differentiable=False)
def statistics_of_half(x):
    return mint.batch_norm_stats(x, EPS)


def joined_reference(means, deviations, counts, momentum=0.1):
    n, counts = counts.sum(), counts[:, None]
    mean = (means * counts).sum(0) / n
    squares = (counts * (1 / deviations**2 - EPS + (means - mean) ** 2)).sum(0)
    running = (1 - momentum) * WEIGHT + momentum * mean, (1 - momentum) * BIAS + momentum * squares / (n - 1)
    return mean, 1 / np.sqrt(squares / n + EPS), *running


def of_joined(means, deviations):
    equal = joined_reference(means, deviations, np.array([4, 4]))[:2]
    return *joined_reference(means, deviations, COUNTS)[:2], *equal


@case(MEANS, DEVIATIONS, reference=of_joined)
def joined(means, deviations):
    join, x = mint.batch_norm_gather_stats_with_counts, ops.zeros((2, 3, 2))
    several = join(x, means, deviations, momentum=0.1, eps=EPS, counts=mint.cat((ops.ones(1) * 40, ops.ones(1) * 6)))
    return *several, *join(x, means, deviations, eps=EPS)


def normalized(x, mean, deviation):
    return (x - mean[:, None, None]) * deviation[:, None, None]


@case(
    X,
    *(WEIGHT, BIAS, MEANS[0], DEVIATIONS[0]),
    reference=lambda x, w, b, mean, deviation: (
        normalized(x, mean, deviation) * w[:, None, None] + b[:, None, None],
        normalized(x, mean, deviation),
    ),
    dtypes=BOTH,
)
def elements(x, w, b, mean, deviation):
    return mint.batch_norm_elemt(x, w, b, mean, deviation), mint.batch_norm_elemt(x, mean=mean, invstd=deviation)


def gradient(x, dout, w):
    """Returns the gradient of a batch normalization, and its sums."""
    mean, deviation = (each[:, None, None] for each in statistics(x))
    n, axes = x.size / 3, (0, 2, 3)
    total, weighted = dout.sum(axes), (dout * (x - mean)).sum(axes)
    y = (x - mean) * deviation
    dx = dout - (total[:, None, None] + y * (dout * y).sum(axes, keepdims=True)) / n
    return total, weighted, weighted * deviation[:, 0, 0], total, dx * deviation * w[:, None, None]


@case(X, RNG.standard_normal(X.shape), WEIGHT, reference=gradient, differentiable=False)
def gradients(x, dout, w):
    mean, deviation = mint.batch_norm_stats(x, EPS)
    sums = _functions.batch_norm_reduce_grad(dout, x, mean, deviation, w, True, True, True)
    count = ops.full((1,), x.size // 3, dtype=x.dtype)
    dx = _functions.batch_norm_elemt_grad(dout, x, mean, deviation, w, sums[0], sums[1], count)
    return *sums, dx
