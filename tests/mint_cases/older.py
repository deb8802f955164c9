"""Programs that call what `mindspore.ops` has for GPUs alone, or for no device."""

import warnings

import numpy as np
from mindspore import Tensor, nn, ops

from . import case

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 3, 4))
V, W = RNG.standard_normal((2, 5))
IMAGES = RNG.standard_normal((2, 3, 2, 5))
LEVELS = np.array([0.0, 0.25, 0.4, 1.0])
WITH_NAN = X.copy()
WITH_NAN[0, 1] = WITH_NAN[1] = np.nan
INFINITE = np.array([[np.inf, 1.0, -np.inf, np.inf], [2.0, 1.0, 2.0, 3.0]])


@case(X, Y, V, reference=lambda x, y, v: (x @ y.T, np.sum(v * v)[None], x.sum(0)), dtypes=("float32", "float64"))
def einsum(x, y, v):
    return ops.einsum("ij,kj->ik", x, y), ops.einsum("i,i->", v, v), ops.einsum("ij->j", x)


@case(V, W, X, Y, reference=lambda v, w, x, y: (v @ w, v @ w, x @ y.T))
def dot(v, w, x, y):
    return ops.dot(v, w), v.dot(w), ops.dot(x, y.T)


def quantiles(x):
    single = np.quantile(x, 0.3, axis=1), np.quantile(x, 1.0, axis=-2, keepdims=True)
    return *single, np.quantile(x, LEVELS, axis=0), np.quantile(x, LEVELS, keepdims=True)


@case(X, reference=quantiles, dtypes=("float64", "float32"))
def quantile(x):
    q = ops.cast(Tensor(LEVELS), x.dtype)
    single = ops.quantile(x, 0.3, axis=1), x.quantile(1.0, -2, True)
    return *single, ops.quantile(x, q, axis=0), ops.quantile(x, q, keepdims=True)


def quantiles_beside_nan(x, y):
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")  # NumPy warns of rows that are all NaN
        of_nan = np.quantile(x, 0.3, axis=1), np.nanquantile(x, 0.3, axis=1), np.nanquantile(x, [0.1, 0.9], axis=0)
    return *of_nan, np.array([np.inf, 2.0]), np.array([-np.inf, 1.0])


@case(WITH_NAN, INFINITE, reference=quantiles_beside_nan, differentiable=False)
def quantile_beside_nan(x, y):
    single = ops.quantile(x, 0.3, 1), ops.nanquantile(x, 0.3, axis=1)
    return *single, x.nanquantile(Tensor([0.1, 0.9]), 0), ops.quantile(y, 2 / 3, 1), ops.quantile(y, 0.0, 1)


@case(X, Y, reference=lambda x, y: (np.fmin(x, y), np.fmin(x, y[0]), np.fmin(x, 0.5)), dtypes=("float32", "float64"))
def fmin(x, y):
    return ops.fmin(x, y), x.fmin(y[0]), ops.fmin(x, Tensor(0.5, x.dtype))


@case(WITH_NAN, X, reference=lambda x, y: (np.fmin(x, y), np.fmin(y, x), np.fmin(x, x)), differentiable=False)
def fmin_beside_nan(x, y):
    return ops.fmin(x, y), ops.fmin(y, x), ops.fmin(x, x)


@case(X, WITH_NAN, INFINITE, reference=lambda x, y, z: (np.zeros(1), np.ones(1), np.ones(1)), differentiable=False)
def float_status(x, y, z):
    status = ops.FloatStatus()
    return status(x), status(y), status(z)


def normalized(x):
    axes = tuple(range(2, x.ndim))
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    scale, shift = (np.reshape(each, (3, *[1] * (x.ndim - 2))) for each in ((1, 2, 3), (0.5, 0, -1)))
    return (x - mean) / np.sqrt(variance + 1e-3) * scale + shift


@case(IMAGES, reference=lambda x: (normalized(x[:, :, 0]), normalized(x), normalized(x[..., None])))
class InstanceNorms(nn.Cell):
    def __init__(self):
        super().__init__()
        settings = {"eps": 1e-3, "gamma_init": Tensor([1.0, 2.0, 3.0]), "beta_init": Tensor([0.5, 0.0, -1.0])}
        self.norms = nn.CellList(
            [norm(3, **settings) for norm in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)]
        )

    def construct(self, x):
        of_rows, of_planes, of_volumes = self.norms
        return of_rows(x[:, :, 0]), of_planes(x), of_volumes(x.expand_dims(-1))
