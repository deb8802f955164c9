"""Computes Einstein's sums by products of batches of matrices."""

from __future__ import annotations

import math
from typing import NamedTuple

import mindspore
from mindspore import Tensor, ops

from .linear import bmm
from .shape import diagonal

_ELLIPSIS = 100  # the labels of the axes of ... count back from here


class Pair(NamedTuple):
    """Says how two tensors become one: both are summed, broadcast, permuted, and multiplied as batches of matrices."""

    sums: tuple[tuple[int, ...], tuple[int, ...]]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # after the sums, to broadcast to
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    matrices: tuple[tuple[int, ...], tuple[int, ...]]  # (batch, rows, inner) and (batch, inner, columns)
    result: tuple[int, ...]


class Plan(NamedTuple):
    """Says what to compute: for each tensor the pairs of axes whose diagonal stays, then a Pair for each tensor after
    the first, then the last sum, order and dtype-free scale."""

    diagonals: tuple[tuple[tuple[int, int], ...], ...]
    pairs: tuple[Pair, ...]
    last_sum: tuple[int, ...]
    last_order: tuple[int, ...]


def einsum(equation: str, operands: tuple[Tensor, ...]) -> Tensor:
    shapes = ()  # type: tuple[tuple[int, ...], ...]
    for x in operands:
        shapes += (x.shape,)
    diagonals, pairs, last_sum, last_order = _plan(equation, shapes)
    parts = []
    for x, steps in zip(operands, diagonals):
        for first, second in steps:
            x = diagonal(x, 0, first, second)  # noqa: PLW2901
        parts.append(x)
    total = parts[0]
    for i in range(len(pairs)):
        total = _product(total, parts[i + 1], pairs[i])
    if last_sum:
        total = ops.sum(total, last_sum)
    return ops.transpose(total, last_order)


def _product(x: Tensor, y: Tensor, pair: Pair) -> Tensor:
    sums, shapes, orders, matrices, result = pair
    x, y = _arranged(x, sums[0], shapes[0], orders[0]), _arranged(y, sums[1], shapes[1], orders[1])
    x, y = x.reshape(matrices[0]), y.reshape(matrices[1])
    if matrices[0][2] == 1 or x.dtype not in (mindspore.float16, mindspore.float32, mindspore.float64):
        if matrices[0][2] == 1:
            return (x * y).reshape(result)
        return ops.sum(x.expand_dims(3) * y.expand_dims(1), 2).reshape(result)
    return bmm(x, y).reshape(result)


def _arranged(x: Tensor, sums: tuple[int, ...], shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    if sums:
        x = ops.sum(x, sums)
    if x.shape != shape:
        x = ops.broadcast_to(x, shape)
    return ops.transpose(x, order)


def _labels(term: str, rank: int, equation: str) -> list[int]:
    """Returns a label for each axis: a letter's code, or a number below 100 for an axis of the ellipsis."""
    before, dots, after = term.partition("...")
    if not all(letter.isascii() and letter.isalpha() for letter in before + after):
        raise ValueError(f"mint.einsum: the equation has letters, commas, -> and ..., got {equation!r}")
    more = rank - len(before) - len(after)
    if more < 0 or (more > 0 and not dots):
        raise ValueError(f"mint.einsum: {term!r} of {equation!r} does not fit a tensor of {rank} axes")
    middle = [_ELLIPSIS - i for i in range(more, 0, -1)]
    return [*(ord(letter) + _ELLIPSIS for letter in before), *middle, *(ord(letter) + _ELLIPSIS for letter in after)]


def _output_labels(words: str | None, terms: list[list[int]], equation: str) -> list[int]:
    used = [label for term in terms for label in term]
    ellipsis = sorted({label for label in used if label < _ELLIPSIS})
    if words is None:  # each letter that stands once, in the order of the alphabet
        return ellipsis + sorted({label for label in used if label > _ELLIPSIS and used.count(label) == 1})
    before, dots, after = words.partition("...")
    first, last = (_labels(part, len(part), equation) for part in (before, after))
    output = [*first, *(ellipsis if dots else ()), *last]
    if len(set(output)) < len(output) or not set(output) <= set(used):
        raise ValueError(f"mint.einsum: the result's letters must each stand once, and in a term, got {equation!r}")
    return output


def _diagonal_steps(labels: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Returns the pairs of equally labelled axes, and leaves one of each, at the end, as diagonal does."""
    steps = []
    while len(set(labels)) < len(labels):
        first = next(i for i, label in enumerate(labels) if label in labels[i + 1 :])
        second = labels.index(labels[first], first + 1)
        if sizes[first] != sizes[second]:
            raise ValueError(f"mint.einsum: axes of one letter have sizes {sizes[first]} and {sizes[second]}")
        steps.append((first, second))
        label, size = labels[first], sizes[first]
        for axis in (second, first):
            del labels[axis], sizes[axis]
        labels.append(label)
        sizes.append(size)
    return steps


@ops.constexpr
def _plan(equation: str, shapes: tuple[tuple[int, ...], ...]) -> Plan:
    words, arrow, result = equation.replace(" ", "").partition("->")
    texts = words.split(",")
    if len(texts) != len(shapes):
        raise ValueError(f"mint.einsum: {equation!r} has {len(texts)} terms for {len(shapes)} tensors")
    terms = [_labels(text, len(shape), equation) for text, shape in zip(texts, shapes)]
    output = _output_labels(result if arrow else None, terms, equation)
    sizes = [list(shape) for shape in shapes]
    diagonals = [tuple(_diagonal_steps(term, size)) for term, size in zip(terms, sizes)]
    labels, lengths, pairs = terms[0], sizes[0], []
    for i in range(1, len(terms)):
        kept = {*output, *(label for later in terms[i + 1 :] for label in later)}
        pair, labels, lengths = _pair(labels, lengths, terms[i], sizes[i], kept)
        pairs.append(pair)
    last_sum = tuple(i for i, label in enumerate(labels) if label not in output)
    rest = [label for label in labels if label in output]
    return Plan(tuple(diagonals), tuple(pairs), last_sum, tuple(rest.index(label) for label in output))


def _pair(
    a: list[int], a_sizes: list[int], b: list[int], b_sizes: list[int], kept: set[int]
) -> tuple[Pair, list[int], list[int]]:
    """Returns how two tensors of these labels become one, and its labels and sizes."""
    sums = [
        tuple(i for i, label in enumerate(one) if label not in kept and label not in other)
        for one, other in ((a, b), (b, a))
    ]
    sized = [dict(zip(a, a_sizes)), dict(zip(b, b_sizes))]
    both = [label for label in a if label in b]
    joint = {**sized[0], **sized[1]}
    for label in both:
        first, second = sized[0][label], sized[1][label]
        if first != second and 1 not in (first, second):
            raise ValueError(f"mint.einsum: axes of one letter have sizes {first} and {second}")
        joint[label] = second if first == 1 else first
    left = [[label for i, label in enumerate(one) if i not in gone] for one, gone in zip((a, b), sums)]
    batch, inner = [label for label in both if label in kept], [label for label in both if label not in kept]
    rows, columns = [label for label in left[0] if label not in both], [label for label in left[1] if label not in both]
    n, m, k, p = (math.prod(joint[label] for label in group) for group in (batch, rows, inner, columns))
    orders = [batch + rows + inner, batch + inner + columns]
    labels = batch + rows + columns
    lengths = [joint[label] for label in labels]
    pair = Pair(
        (sums[0], sums[1]),
        (tuple(joint[label] for label in left[0]), tuple(joint[label] for label in left[1])),
        (tuple(map(left[0].index, orders[0])), tuple(map(left[1].index, orders[1]))),
        ((n, m, k), (n, k, p)),
        tuple(lengths),
    )
    return pair, labels, lengths
