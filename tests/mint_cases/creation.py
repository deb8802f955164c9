"""Programs that make tensors."""

import mindspore
import numpy as np
from mindspore import mint

from . import case

X = np.random.default_rng(0).standard_normal((3, 4))
ROW = X[0]


@case(reference=lambda: (np.arange(7), np.arange(2, 9, 3), np.arange(0.5, 4, 0.5)))
def arange():
    return mint.arange(7), mint.arange(2, 9, 3), mint.arange(0.5, 4, 0.5)


@case(reference=lambda: np.arange(1.0, 5.0))
def arange_of_dtype():
    return mint.arange(1, 5, dtype=mindspore.float32)


@case(
    X,
    reference=lambda x: (np.zeros_like(x), np.ones_like(x), np.full_like(x, 2.5)),
    dtypes=("float16", "float32"),
    differentiable=False,
)
def likes(x):
    return mint.zeros_like(x), mint.ones_like(x), mint.full_like(x, 2.5)


@case(X, reference=lambda x: (np.zeros(x.shape, np.int64), np.ones(x.shape, np.int64)), differentiable=False)
def likes_of_dtype(x):
    return mint.zeros_like(x, dtype=mindspore.int64), mint.ones_like(x, dtype=mindspore.int64)


@case(
    reference=lambda: (np.full((2, 3), 7), np.full((2, 3), 0.5), np.eye(3, 4), np.zeros((2, 3)), np.linspace(0, 1, 5))
)
def constants():
    full = mint.full((2, 3), 7, dtype=mindspore.int64)
    return full, mint.full((2, 3), 0.5), mint.eye(3, 4), mint.zeros((2, 3)), mint.linspace(0, 1, 5)


def shapes(x):
    return x * 0


@case(X, reference=shapes, differentiable=False)
def empty_tensors(x):
    return x * 0 + mint.empty((3, 4)) * 0 + mint.empty_like(x) * 0


@case(X, reference=lambda x: (np.tril(x), np.tril(x, 1), np.triu(x, -1)))
def triangles(x):
    return mint.tril(x), mint.tril(x, 1), mint.triu(x, -1)


@case(X, ROW, reference=lambda x, row: (*(np.diag(x, i) for i in (0, 1, -1)), *(np.diag(row, i) for i in (0, -2, 1))))
def diagonals(x, row):
    return mint.diag(x), mint.diag(x, 1), mint.diag(x, -1), mint.diag(row), mint.diag(row, -2), mint.diag(row, 1)


@case(np.array([2, 0, 1, 2]), reference=lambda x: np.eye(4, dtype=np.int64)[x])
def one_hot(x):
    return mint.nn.functional.one_hot(x, 4)
