"""Inputs of an operator that follow from its signature and some inputs that it takes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import mindspore
import numpy as np

from ..check import Spec, dtype_name
from ..compat import VERSION
from .checks import is_floating

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ..custom import Operator
    from .checks import Array, Arrays


def specs_of(arrays: Arrays) -> list[Spec]:
    return [Spec(a.shape, getattr(mindspore, a.dtype.name)) for a in arrays]


def small_inputs(operator: Operator, arrays: Arrays) -> Iterator[tuple[str, list[Array]]]:
    """(words, inputs) with each size that the signature names 0 and 1, all 1, and of tensors of any shape."""
    if not all(map(is_floating, arrays)):
        return
    tensors = operator.signature.inputs
    values = operator.signature.check(operator.label, *specs_of(arrays))
    names = [name for name in values if name not in operator.signature.values]

    def of(length: int, *changed: str) -> dict[str, Any]:
        return values | {name: (length,) if isinstance(values[name], tuple) else length for name in changed}

    changes: list[tuple[str, dict[str, Any], tuple[int, ...] | None]]
    changes = [(f"{name} = {n}", of(n, name), None) for name in names for n in (0, 1)]
    if names:
        changes.append(("all sizes 1", of(1, *names), None))
    if any(tensor.sizes is None for tensor in tensors):
        changes += [(f"shape {shape}", values, shape) for shape in ((0,), (1,), ())]
    for words, sizes, any_shape in changes:
        try:
            shapes = [any_shape if t.sizes is None else t.shape(operator.label, sizes) for t in tensors]
            changed = [np.resize(a, a.shape if shape is None else shape) for a, shape in zip(arrays, shapes)]
            outputs = operator.infer(*specs_of(changed))
        except (TypeError, ValueError, ZeroDivisionError):
            continue  # the operator refuses that
        if VERSION < (2, 7) and 0 in [*(a.size for a in changed), *(out.size for out in outputs)]:
            continue  # MindSpore has no empty tensors
        yield words, changed


def wrong_inputs(operator: Operator, arrays: list[Array]) -> Iterator[tuple[str, list[Array]]]:
    """(words, inputs) that the signature rules out."""
    tensors, known = operator.signature.inputs, set(operator.signature.values)
    yield "one input too few", arrays[:-1]
    for i, (tensor, a) in enumerate(zip(tensors, arrays)):

        def replaced(array: Array, i: int = i) -> list[Array]:
            return [*arrays[:i], array, *arrays[i + 1 :]]

        allowed = {a.dtype.name} if tensor.dtype else set(map(dtype_name, operator.signature.dtypes))
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
