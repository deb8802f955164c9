"""Programs that compute sums, statistics and orders along axes."""

import mindspore
import numpy as np
import scipy.special
from mindspore import mint

from . import case

RNG = np.random.default_rng(0)
X = RNG.permutation(np.linspace(-2, 2, 24)).reshape(2, 3, 4)
WHOLE = RNG.permutation(24).reshape(4, 6)
BOTH = ("float16", "float32")


@case(X, reference=lambda x: (np.cumsum(x, 1), np.cumprod(x, -1)))
def running(x):
    return mint.cumsum(x, 1), mint.cumprod(x, -1)


@case(WHOLE, reference=lambda x: (np.cumsum(x, 0), np.float32(np.cumsum(x, 1))))
def running_sums_of_whole_numbers(x):
    return mint.cumsum(x, 0), mint.cumsum(x, 1, dtype=mindspore.float32)


@case(X, reference=lambda x: (np.minimum.accumulate(x, 1), np.maximum.accumulate(x, 2)), differentiable=False)
def running_extremes(x):
    return mint.cummin(x, 1)[0], mint.cummax(x, 2)[0]


@case(
    X,
    reference=lambda x: (np.argmax(x), np.argmax(x, 1), np.argmin(x, -1)[..., None], np.max(x, 1), np.min(x)),
    dtypes=BOTH,
)
def extremes(x):
    return mint.argmax(x), mint.argmax(x, 1), mint.argmin(x, -1, keepdim=True), mint.amax(x, 1), mint.min(x)


@case(WHOLE, reference=lambda x: (np.argmax(x), np.argmin(x, 1)))
def places_of_extremes_of_whole_numbers(x):
    return mint.argmax(x), mint.argmin(x, 1)


@case(X, reference=lambda x: (np.sort(x), np.argsort(x), -np.sort(-x, 1), np.argsort(-x, 1)), dtypes=BOTH)
def orders(x):
    down = mint.sort(x, dim=1, descending=True)
    return *mint.sort(x), down[0], mint.argsort(x, dim=1, descending=True)


@case(X, reference=lambda x: (-np.sort(-x)[..., :2], np.argsort(-x)[..., :2], np.sort(x, 1)[:, :2]))
def largest(x):
    least = mint.topk(x, 2, dim=1, largest=False)
    return *mint.topk(x, 2), least[0]


@case(X, reference=lambda x: (np.sort(x, 1)[:, 1], np.sort(x, -1)[..., 1], np.sort(x.ravel())[11]))
def middles(x):
    return mint.kthvalue(x, 2, 1)[0], mint.median(x, -1)[0], mint.median(x)


@case(X, reference=lambda x: (np.var(x, ddof=1), np.var(x, 1), np.std(x, (0, 2), ddof=1), np.std(x, 1, keepdims=True)))
def spreads(x):
    return mint.var(x), mint.var(x, 1, correction=0), mint.std(x, (0, 2)), mint.std(x, 1, correction=0, keepdim=True)


@case(X, reference=lambda x: (np.var(x, 1, ddof=1), np.mean(x, 1), np.std(x, 2, ddof=1), np.mean(x, 2)))
def spreads_and_means(x):
    return *mint.var_mean(x, 1), *mint.std_mean(x, 2)


@case(X * 100, reference=lambda x: (scipy.special.logsumexp(x, 1), scipy.special.logsumexp(x, (0, 2), keepdims=True)))
def logarithms_of_sums(x):
    return mint.logsumexp(x, 1), mint.logsumexp(x, (0, 2), keepdim=True)


def norms_of(x):
    return (
        np.sqrt((x * x).sum()),
        np.abs(x).sum(1),
        np.abs(x).max(-1),
        (np.abs(x) ** 3).sum(0) ** (1 / 3),
        np.sqrt((x * x).sum((1, 2))),
    )


@case(X, reference=norms_of)
def norms(x):
    several = mint.linalg.norm(x, 1, 1), mint.linalg.vector_norm(x, float("inf"), -1), mint.norm(x, 3, 0)
    return mint.norm(x), *several, mint.linalg.matrix_norm(x)


@case(X, reference=lambda x: x / np.sqrt((x * x).sum(1, keepdims=True)), dtypes=BOTH)
def normalized(x):
    return mint.nn.functional.normalize(x)


@case(WHOLE % 3, reference=lambda x: (np.count_nonzero(x), np.count_nonzero(x, 1)))
def counts(x):
    return mint.count_nonzero(x), mint.count_nonzero(x, 1)


@case(X, reference=lambda x: np.float32(np.histogram(x, 5)[0]), differentiable=False)
def histogram(x):
    return mint.histc(x, 5)


@case(np.where(X > 1, np.nan, X), reference=lambda x: (np.nansum(x), np.nansum(x, 1)), differentiable=False)
def sums_without_nan(x):
    return mint.nansum(x), mint.nansum(x, 1)


@case(X, reference=lambda x: (x.sum(1), x.mean((0, 2)), x.prod(2), np.any(x > 1, 1), np.all(x > -3)))
def sums(x):
    return mint.sum(x, 1), mint.mean(x, (0, 2)), mint.prod(x, 2), mint.any(x > 1, 1), mint.all(x > -3)
