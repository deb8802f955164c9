"""This operator serves patch_mindspore alone: msops has no public name for it."""

import itertools

import numpy as np

from card import chain, length, zeros
from msops.operators.rotary_position_embedding import operators, rotary_position_embedding
from operator_test import OperatorTest


def turned(x, interleaved):
    """Returns (-b, a) for each pair (a, b)."""
    if interleaved:
        return np.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    return np.concatenate((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotate(x, cos, sin, interleaved=False):
    return (x * cos + turned(x, interleaved) * sin,)


def rotate_back(dout, cos, sin, interleaved=False):
    return (dout * cos - turned(dout * sin, interleaved),)


def case(x, table, interleaved=False):
    return [x, table, table], dict(interleaved=interleaved)


def table_of(x, axes):
    return (*(n if has else 1 for n, has in zip(x, axes)), x[3])


EVERY = list(itertools.product((0, 1), repeat=3))


class TestRotaryPositionEmbedding(OperatorTest):
    function = rotary_position_embedding
    formulas = (rotate, rotate_back)
    cases = {
        "small": case((2, 3, 4, 6), (2, 1, 4, 6), interleaved=True),
        "empty": case((2, 0, 4, 6), (1, 1, 4, 6)),
        "BNSD": case((2, 5, 9, 64), (1, 1, 9, 64)),
        "large": case((2, 8, 150, 128), (2, 1, 150, 128)),
    }
    further = {
        f"{size} by {axes}, {'pairs' if interleaved else 'halves'}": case(x, table_of(x, axes), interleaved)
        for size, x in {"packs": (3, 2, 5, 64), "elements": (2, 3, 5, 10), "no features": (2, 3, 4, 0)}.items()
        for axes in EVERY
        for interleaved in (False, True)
    } | {"many rows": case((2, 10, 500, 128), (2, 1, 500, 128), interleaved=True)}
    small = "small"
    hostile = ("small", "BNSD")
    roundings = 4
    second_order = True
    constants = (1, 2)
    wrong = (
        (
            zeros((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4), dtype=np.int32),
            dict(interleaved=False),
            TypeError,
            "rotary_position_embedding: x must be float16, float32 or float64, got int32",
        ),
        (
            zeros((1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)),
            dict(interleaved=False),
            ValueError,
            "rotary_position_embedding: cos must have the sizes of x, (1, 3, 2, 4), or 1 in their place",
        ),
        (
            zeros((1, 3, 2, 3), (1, 1, 2, 3), (1, 1, 2, 3)),
            dict(interleaved=False),
            ValueError,
            "rotary_position_embedding: x must have an even number of features, got shape (1, 3, 2, 3)",
        ),
    )

    def operators(self, shapes=(), interleaved=False):
        return chain(operators(interleaved))

    def random_case(self, random):
        x = (*(length(random) for _ in range(3)), 2 * length(random))
        return case(x, table_of(x, random.choice(EVERY)), random.random() < 0.5)
