"""Keeps transposes of one tensor apart in graph mode on a GPU.

MindSpore's pass RemoveRedundantFormatTransform, which runs there, takes the second of two `Transpose` of one tensor for
the first: it compares the shapes of their orders of axes, (n,) and (n,), instead of the orders. So each order gets a
tensor of its own. It has the same elements and further axes of size 1, whose places tell the orders apart. No kernel
runs for these: MindSpore leaves out expand_dims and squeeze on a GPU, and its transpose leaves out axes of size 1.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from mindspore import Tensor, ops

from msops.core.compiled import compiling, is_on_gpu, once

from .replacement import Replacement

_LEAST, _MOST = 5, 8  # axes: MindSpore itself transposes tensors of 4 for convolutions, and none of more than 8
_transpose = ops.Transpose()
_view: Any = getattr(getattr(ops, "auto_generate", None), "transpose_view_op", _transpose)


class Apart(NamedTuple):
    """Says where to insert axes of size 1, one after another, then how to transpose, then which axes to take away."""

    places: tuple[int, ...]
    order: tuple[int, ...]
    ones: tuple[int, ...]


def transpose(input: Tensor, input_perm: tuple[int, ...]) -> Tensor:  # noqa: A002
    """Returns the input with its axes in this order."""
    if compiling() and is_on_gpu():
        apart = _apart(input_perm)
        if apart is not None:
            places, order, ones = apart
            x = input
            for place in places:
                x = ops.expand_dims(x, place)
            return ops.squeeze(_transpose(x, order), ones)
    return _transpose(input, input_perm)


def transpose_view(input: Tensor, input_perm: tuple[int, ...]) -> Tensor:  # noqa: A002
    """Does the same; in PyNative mode the result shares the input's memory."""
    return transpose(input, input_perm) if compiling() else _view(input, input_perm)


class Transpose(Replacement):
    """The primitive of :func:`transpose`."""

    def __call__(self, x: Tensor, perm: tuple[int, ...]) -> Tensor:
        return transpose(x, perm)


@once
def _apart(order: Any) -> Apart | None:
    """Returns None if the order is not known, or if there is no place for more axes. From 5 axes on, there are fewer
    places than orders, so that some orders share one."""
    n = 0 if order is None else len(order)
    if n < 3 or n >= _MOST:  # matrices have one transpose
        return None
    order = [axis % n for axis in order]
    choices: list[tuple[int, ...]] = []
    for count in range(max(1, _LEAST - n), _MOST - n + 1):
        choices += itertools.combinations_with_replacement(range(n + 1), count)
    rank = sum(sum(b < a for b in order[i:]) * math.factorial(n - 1 - i) for i, a in enumerate(order))
    before = choices[rank % len(choices)]  # the axes that the ones stand before
    count = len(before)
    moved = [axis + sum(each <= axis for each in before) for axis in range(n)]
    places = [i for i in range(n + count) if i not in moved]
    return Apart(tuple(places), (*places, *(moved[axis] for axis in order)), tuple(range(count)))
