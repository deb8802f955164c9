"""Programs that compute products of matrices."""

import numpy as np
from mindspore import mint, ops

from . import case

RNG = np.random.default_rng(0)
A, B, C = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 5)), RNG.standard_normal((3, 5))
P, Q = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 4, 5))
V = RNG.standard_normal(4)
SQUARE = RNG.standard_normal((4, 4)) + 4 * np.eye(4)
THREE = RNG.standard_normal((2, 5, 3))


@case(A, B, V, reference=lambda a, b, v: (a @ b, a @ v, a @ b, v @ v, np.outer(v, a[0])))
def products(a, b, v):
    return mint.mm(a, b), mint.mv(a, v), mint.matmul(a, b), mint.dot(v, v), mint.outer(v, a[0])


@case(
    *(V, V[::-1].copy(), np.arange(1, 5)),
    reference=lambda x, y, n: (x @ y, n @ n[::-1], (x - 2j * y) @ (y + 1j * x)),
    differentiable=False,
)
def products_of_conjugates(x, y, n):
    numbers = ops.Complex()
    return mint.vdot(x, y), mint.vdot(n, mint.flip(n, (0,))), mint.vdot(numbers(x, 2 * y), numbers(y, x))


@case(V, V[::-1].copy(), reference=lambda x, y: x @ y, dtypes=("float16", "float32"))
def products_of_reals(x, y):
    return mint.vdot(x, y)


@case(
    *(C, A[:, 0], B[0]),
    reference=lambda c, x, y: (2 * c + np.outer(x, y), 1.5 * c + 2 * np.outer(x, y), np.outer(x, y)),
    dtypes=("float16", "float32"),
)
def outer_products_in_place(c, x, y):
    first, second, third = c * 2, c * 3, c + np.nan  # graph mode would join equal ones
    return mint.addr_(first, x, y), mint.addr_(second, x, y, beta=0.5, alpha=2), mint.addr_(third, x, y, beta=0)


@case(A, B, C, V, reference=lambda a, b, c, v: (c + a @ b, 0.5 * c + 2 * (a @ b), c[:, 0] + a @ v))
def sums_of_products(a, b, c, v):
    return mint.addmm(c, a, b), mint.addmm(c, a, b, beta=0.5, alpha=2), mint.addmv(c[:, 0], a, v)


@case(P, Q, C, reference=lambda p, q, c: (p @ q, c + p @ q, c + (p @ q).sum(0), 0.5 * c + 2 * (p @ q)))
def batches(p, q, c):
    scaled = mint.baddbmm(c.broadcast_to((2, 3, 5)), p, q, beta=0.5, alpha=2)
    return mint.bmm(p, q), mint.baddbmm(c.broadcast_to((2, 3, 5)), p, q), mint.addbmm(c, p, q), scaled


@case(SQUARE, THREE, reference=lambda a, x: (np.trace(a), np.linalg.inv(a), np.cross(x, x[::-1])))
def of_squares(a, x):
    return mint.trace(a), mint.inverse(a), mint.cross(x, mint.flip(x, (0,)))


def signed(a):
    """Returns a matrix's factors with a sign that does not depend on the way."""
    q, r = np.linalg.qr(a)
    return np.abs(q), np.abs(r)


@case(A, SQUARE, reference=lambda a, square: (*signed(a.T), *signed(a), *signed(square)), dtypes=("float32", "float64"))
def factors(a, square):
    tall, wide, even = mint.linalg.qr(a.T), mint.linalg.qr(a), mint.linalg.qr(square)
    return tuple([mint.abs(part) for part in (*tall, *wide, *even)])


@case(SQUARE, reference=lambda a: (np.eye(4), a[:, :2], np.abs(np.linalg.qr(a)[1])), differentiable=False)
def complete_factors(a):
    q, r = mint.linalg.qr(a[:, :2], "complete")
    return mint.matmul(q.T, q), mint.matmul(q, r), mint.abs(mint.linalg.qr(a, "r")[1])
