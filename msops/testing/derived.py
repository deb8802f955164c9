"""Derives further inputs of an operator from its signature and from inputs that it takes."""

from __future__ import annotations

import ast
import functools
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from ..compat import VERSION
from ..core.factory import custom_op
from ..core.spec import Spec, dtype_called, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from ..core.operator import Operator
    from .checks import Array, Arrays

PACKS = 128  # a size that is a multiple of each pack, and of most tiles
LARGEST = 2**20  # elements that small and odd inputs have at most, all together
LARGE = 2**20 + 2**12  # elements that the largest of large inputs has at least


def specs_of(arrays: Arrays) -> list[Spec]:
    return [Spec(a.shape, dtype_called(a.dtype.name)) for a in arrays]


def small_inputs(operator: Operator, arrays: Arrays) -> Iterator[tuple[str, list[Array]]]:
    """Yields (words, inputs) with each named size 0 and 1, with all named sizes 1, and with tensors of any shape."""
    names = _named_sizes(operator, arrays)
    changes: list[tuple[str, dict[str, int]]] = [(f"{name} = {n}", {name: n}) for name in names for n in (0, 1)]
    if names:
        changes.append(("all sizes 1", dict.fromkeys(names, 1)))
    return _with_sizes(operator, arrays, changes, ((0,), (1,), ()))


def odd_inputs(operator: Operator, arrays: Arrays) -> Iterator[tuple[str, list[Array]]]:
    """Yields (words, inputs) with odd sizes, with each size one of whole packs, and with each size beyond 1024, the
    most threads of a block; the other sizes are odd, or the given ones where the operator refuses these."""
    names = _named_sizes(operator, arrays)
    odd = dict(zip(names, itertools.count(3, 2)))

    def made(sizes: dict[str, int]) -> list[tuple[str, list[Array]]]:
        words = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        return list(_with_sizes(operator, arrays, [(words, sizes)] if sizes else [], ()))

    all_odd = made(odd)
    yield from all_odd
    for n in (PACKS, 1031) if all_odd else (7, PACKS, 1031):
        for name in names:
            yield from made(odd | {name: n}) or made({name: n})
    yield from _with_sizes(operator, arrays, [], ((3, 5), (3, PACKS), (3, 1031)))


def large_inputs(operator: Operator, arrays: Arrays) -> Iterator[Callable[[int], tuple[str, list[Array]] | None]]:
    """Yields for each named size, and for tensors of any shape, a function that returns (words, inputs) where this size
    is a part of a large one, LARGE divided by its argument."""

    def made(sizes: dict[str, int], any_shapes: Sequence[tuple[int, ...]]) -> tuple[str, list[Array]] | None:
        words = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        changes = [(words, sizes)] if sizes else []
        return next(_with_sizes(operator, arrays, changes, any_shapes, 8 * LARGE), None)

    def of_name(name: str, part: int) -> tuple[str, list[Array]] | None:
        one, two = made({name: 64}, ()), made({name: 128}, ())
        if one is None or two is None:
            return None
        grows = max(b.size - a.size for a, b in zip(one[1], two[1])) / 64
        n = math.ceil(LARGE / grows / part) | 1 if grows else 0  # an odd number
        return made({name: n}, ()) if n > 64 else None

    for name in _named_sizes(operator, arrays):
        yield functools.partial(of_name, name)
    if any(tensor.sizes is None for tensor in operator.signature.inputs):
        yield lambda part: made({}, ((3, LARGE // 3 // part | 1),))


def drawn(a: Array, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Returns an array of this shape with new values, which lie between neighbours of one sign among the values of `a`:
    so none is out of their range, and no two tie. Where many of these tie, as those of a mask do, they are chosen."""
    if a.size == 0:
        return np.zeros(shape, a.dtype)
    values = np.unique(a)
    between = np.flatnonzero(np.sign(values[:-1]) * np.sign(values[1:]) >= 0)
    if a.dtype.kind != "f" or len(values) <= a.size / 2 or len(between) == 0 or not np.isfinite(values).all():
        return np.asarray(rng.choice(a.reshape(-1), shape), a.dtype)
    low = rng.choice(between, shape)
    return np.asarray(values[low] + rng.random(shape) * (values[low + 1] - values[low]), a.dtype)


def _named_sizes(operator: Operator, arrays: Arrays) -> list[str]:
    values = operator.signature.check(operator.label, *specs_of(arrays))
    return [name for name in values if name not in operator.signature.values]


def _with_sizes(
    operator: Operator,
    arrays: Arrays,
    changes: Sequence[tuple[str, dict[str, int]]],
    any_shapes: Sequence[tuple[int, ...]],
    largest: int = LARGEST,
) -> Iterator[tuple[str, list[Array]]]:
    """Yields (words, inputs) with other values of the sizes that the signature names; tensors without sizes have one of
    `any_shapes`. Inputs that the operator refuses, and large ones, are left out."""
    tensors = operator.signature.inputs
    values = operator.signature.check(operator.label, *specs_of(arrays))
    cases: list[tuple[str, dict[str, Any], tuple[int, ...] | None]] = [
        (words, values | {name: (n,) if isinstance(values[name], tuple) else n for name, n in sizes.items()}, None)
        for words, sizes in changes
    ]
    if any(tensor.sizes is None for tensor in tensors):
        cases += [(f"shape {shape}", values, shape) for shape in any_shapes]
    for words, sizes, any_shape in cases:
        try:
            found = [any_shape if t.sizes is None else t.shape(operator.label, sizes) for t in tensors]
            shapes = [a.shape if shape is None else shape for a, shape in zip(arrays, found)]
            if sum(map(math.prod, shapes)) > largest:
                continue
            rng = np.random.default_rng(0)
            changed = [drawn(a, shape, rng) for a, shape in zip(arrays, shapes)]
            outputs = operator.infer(*specs_of(changed))
            if sum(out.size for out in outputs) > 8 * largest:
                continue
        except (TypeError, ValueError, ZeroDivisionError):
            continue  # the operator refuses these inputs
        if VERSION < (2, 7) and 0 in [*(a.size for a in changed), *(out.size for out in outputs)]:
            continue  # MindSpore before 2.7 has no empty tensors
        yield words, changed


def other_attributes(operator: Operator) -> Iterator[tuple[str, Operator]]:
    """Yields (words, operator) of the same entry, with another value of each attribute."""
    for name, value in operator.settings.items():
        values = (not value,) if isinstance(value, bool) else (value + 1, value - 1)
        for changed in values:
            attributes: dict[str, Any] = {**operator.settings, name: changed}
            same: dict[str, Any] = {"infer": operator.rule, "name": operator.label, "dtypes": operator.signature.dtypes}
            other = custom_op(operator.entry, operator.signature.text, **same, **attributes)
            yield f"{name} = {changed}", other.without(*operator.absent)


def wrong_inputs(operator: Operator, arrays: list[Array]) -> Iterator[tuple[str, list[Array]]]:
    """Yields (words, inputs) that the signature rules out."""
    tensors, known = operator.signature.inputs, set(operator.signature.values)
    dtypes = {tensor.name: spec.dtype for tensor, spec in zip(tensors, specs_of(arrays))}
    common = next((dtypes[tensor.name] for tensor in tensors if tensor.dtype is None), None)
    if not tensors[-1].optional:
        yield "one input too few", arrays[:-1]
    for i, (tensor, a) in enumerate(zip(tensors, arrays)):

        def replaced(array: Array, i: int = i) -> list[Array]:
            return [*arrays[:i], array, *arrays[i + 1 :]]

        allowed = set(map(dtype_name, operator.signature.dtypes))
        if tensor.dtype:
            allowed = set(map(dtype_name, operator.signature.allowed(tensor, common, dtypes)))
        dtype = next(name for name in ("int8", "int16", "uint8", "float32") if name not in allowed)
        yield f"{tensor.name} of {dtype}", replaced(np.zeros(a.shape, dtype))
        sizes = tensor.sizes or ()
        star = next((k for k, size in enumerate(sizes) if isinstance(size, ast.Starred)), None)
        if sizes and star is None:
            yield f"{tensor.name} of shape {(*a.shape, 1)}", replaced(a[..., None])
        for k, size in enumerate(sizes):
            name = size.value if isinstance(size, ast.Starred) else size
            if isinstance(name, ast.Constant) or (isinstance(name, ast.Name) and name.id in known):
                axis = k if star is None or k <= star else k - len(sizes)
                if k != star or a.ndim >= len(sizes):
                    shape = [*a.shape]
                    shape[axis] += 1
                    yield f"{tensor.name} of shape {tuple(shape)}", replaced(np.resize(a, shape).astype(a.dtype))
        known |= {node.id for size in sizes for node in ast.walk(size) if isinstance(node, ast.Name)}
