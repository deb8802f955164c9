"""Compares gradients with finite differences, also at kinks, where several gradients are right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .checks import as_tuple, at, is_floating, largest, run, some_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindspore import nn

    from .checks import Array, Arrays, Function


class Differences(NamedTuple):
    """Finite differences by some elements of an input. The gradients from `low` to `high` are right, which are equal
    where there is no kink; `size` is that of the sums whose difference they are."""

    elements: Array  # indices of the flat array
    low: Array
    high: Array
    size: float

    def nearest(self, gradient: Array) -> Array:
        """Returns the right gradients that are nearest to these elements of `gradient`."""
        return np.clip(gradient.reshape(-1)[self.elements], self.low, self.high)

    def finite(self) -> Differences:
        """Returns the differences that are finite."""
        known = np.isfinite(self.low) & np.isfinite(self.high)
        return Differences(self.elements[known], self.low[known], self.high[known], self.size)


def finite_differences(function: Function, inputs: Arrays, douts: Arrays, i: int, elements: Array) -> Differences:
    """Returns the gradients of some elements of input `i` that are right.

    At a kink of a result y_j, such as that of relu at 0 or of a maximum where values tie, its differences l_j to the
    left and r_j to the right disagree. Any number between them is right there. Several results may have a kink at one
    element, and each may choose: right is what lies between sum_j min(l_j, r_j) and sum_j max(l_j, r_j).
    """
    step = 1e-6
    low, high, size = np.empty(len(elements)), np.empty(len(elements)), 0.0

    def terms(moved: Array) -> Array:
        """Returns all results times their incoming gradients."""
        nonlocal size
        outs = map(np.asarray, as_tuple(function(*inputs[:i], moved, *inputs[i + 1 :])))
        found = [np.ravel(out * dout) for out, dout in zip(outs, douts) if is_floating(out)]
        all_terms = np.concatenate([*found, np.zeros(0)])
        size = max(size, float(np.abs(all_terms).sum()))
        return all_terms

    here = terms(inputs[i]) if len(elements) else np.zeros(0)
    for k, flat in enumerate(elements):
        sides = []
        for sign in (-1, 1):
            moved = np.array(inputs[i])
            moved.flat[flat] += sign * step
            sides.append(sign * (terms(moved) - here) / step)
        left, right = sides
        slope = np.maximum(np.abs(left), np.abs(right))
        kink = np.abs(right - left) > 1e-3 * (1e-3 + slope) + 1e-8 * largest(here)  # more than by curvature
        middle = float(((left + right) / 2)[~kink].sum())
        low[k] = middle + np.minimum(left, right)[kink].sum()
        high[k] = middle + np.maximum(left, right)[kink].sum()
    return Differences(elements, low, high, size)


def check_finite_differences(
    gradients: Arrays,
    net: nn.Cell,
    inputs: Arrays,
    douts: Arrays,
    names: Sequence[str] | None = None,
    which: Sequence[int] | None = None,
    most: int = 200,
) -> None:
    """Requires that gradients in float64 equal finite differences, at `most` elements of each input."""
    names = names or [f"input {i}" for i in range(len(inputs))]
    for i, (array, gradient) in enumerate(zip(inputs, gradients)):
        if not is_floating(array) or (which is not None and i not in which):
            continue
        name = f"gradient of {names[i]}"
        assert gradient.shape == array.shape, f"{name}: expected shape {array.shape}, got {gradient.shape}"
        found = finite_differences(functools.partial(run, net), inputs, douts, i, some_elements(array, most))
        assert_differences(gradient, found, name, names, inputs, i)


def assert_differences(
    gradient: Array, found: Differences, name: str, names: Sequence[str], inputs: Arrays, i: int
) -> None:
    """Requires that a gradient of input `i` is one of those that :func:`finite_differences` found."""
    # The error of the quotient itself is about 1e-16 size / step + step^2.
    got, expected = gradient.reshape(-1)[found.elements], found.nearest(gradient)
    wrong = ~(np.abs(got - expected) <= 1e-7 + 1e-9 * found.size + 1e-6 * np.abs(expected))
    if not wrong.any():
        return
    k = np.flatnonzero(wrong)[np.nan_to_num(np.abs(got - expected)[wrong], nan=np.inf).argmax()]
    flat, low, high = int(found.elements[k]), found.low[k], found.high[k]
    kink = high - low > 1e-9 * max(abs(low), abs(high))
    words = f"{low:.9g} to {high:.9g}" if kink else f"{low:.9g}"
    tie = tie_of(names, inputs, i, flat) if kink else None
    where = np.unravel_index(flat, gradient.shape)
    raise AssertionError(
        f"{at(name, where)}: finite differences give {words}, got {got[k]:.9g}; "
        f"{f'{tie}; ' if tie else ''}{wrong.sum()} of {len(got)} are wrong"
    )


def tie_of(names: Sequence[str], inputs: Arrays, i: int, flat: int) -> str | None:
    """Says which element is equal to an element of input `i`: the nearest of this input, or that of another input."""
    array = inputs[i]
    value, where = array.flat[flat], np.unravel_index(flat, array.shape)
    equal = np.flatnonzero(array == value)
    equal = equal[equal != flat]
    if len(equal):
        nearest = int(equal[np.abs(equal - flat).argmin()])
        return f"{at(names[i], where)} equals {at(names[i], np.unravel_index(nearest, array.shape))}: a tie"
    for name, other in zip(names, inputs):
        if other is not array and other.shape == array.shape and other[where] == value:
            return f"{at(names[i], where)} equals {at(name, where)}: a tie"
    return None
