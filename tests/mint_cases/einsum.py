"""Programs that compute Einstein's sums."""

import numpy as np
from mindspore import mint

from . import case

RNG = np.random.default_rng(0)
A, B, SQUARE = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 5)), RNG.standard_normal((3, 3))
Q, K, ONE = RNG.standard_normal((2, 3, 4, 5)), RNG.standard_normal((2, 3, 6, 5)), RNG.standard_normal((2, 1, 4))


def of(*equations):
    """Returns a reference that computes each equation for the tensors that follow it."""
    return lambda *inputs: tuple(np.einsum(words, *(inputs[i] for i in which)) for words, *which in equations)


@case(A, B, reference=of(("ij,jk->ik", 0, 1), ("ij,jk->ki", 0, 1), ("ij,jk", 0, 1)), dtypes=("float16", "float32"))
def products(a, b):
    return mint.einsum("ij,jk->ik", a, b), mint.einsum(" ij , jk -> ki ", a, b), mint.einsum("ij,jk", a, b)


def of_diagonals(square, a):
    cube = square[:, :, None] * square[None]
    equations = ("ii->i", 0), ("ii", 0), ("ij->", 1), ("ij->ji", 1), ("iii->i", 2), ("iij,kj->ki", 2, 0)
    return of(*equations)(square, a, cube)


@case(SQUARE, A, reference=of_diagonals)
def diagonals(square, a):
    cube = square.expand_dims(2) * square.expand_dims(0)
    traces = mint.einsum("ii->i", square), mint.einsum("ii", square), mint.einsum("ij->", a), mint.einsum("ij->ji", a)
    return (*traces, mint.einsum("iii->i", cube), mint.einsum("iij,kj->ki", cube, square))


@case(Q, K, reference=of(("bhqd,bhkd->bhqk", 0, 1), ("bhqd,bhkd->q", 0, 1), ("...qd,...kd->...qk", 0, 1)))
def attention(q, k):
    scores = mint.einsum("bhqd,bhkd->bhqk", q, k), mint.einsum("bhqd,bhkd->q", q, k)
    return (*scores, mint.einsum("...qd,...kd->...qk", q, k))


@case(A, B, ONE, reference=of(("ij,jk,lmj->lik", 0, 1, 2), ("a...,bc...->...abc", 0, 2)))
def several(a, b, one):
    return mint.einsum("ij,jk,lmj->lik", a, b, one), mint.einsum("a...,bc...->...abc", a, one)


@case(A, B, reference=of(("ij,jk->ik", 0, 1)))
def sublists(a, b):
    return mint.einsum(a, [0, 1], b, [1, 2], [0, 2])


@case(np.arange(12).reshape(3, 4), np.arange(20).reshape(4, 5), reference=of(("ij,jk->ik", 0, 1), ("ij->j", 0)))
def whole_numbers(a, b):
    return mint.einsum("ij,jk->ik", a, b), mint.einsum("ij->j", a)
