"""Makes tensors."""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import constant, once

from . import shape


def arange(start: float, end: float, step: float = 1, dtype: mindspore.Type | None = None) -> Tensor:
    is_tensor = isinstance(start, Tensor) or isinstance(end, Tensor) or isinstance(step, Tensor)
    if dtype == mindspore.float64 and not is_tensor:
        return _steps(start, step, _count(start, end, step))
    return ops.arange(start, end, step, dtype=dtype)


def full_like(input: Tensor, fill_value: float, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    return ops.full_like(input, fill_value, dtype=input.dtype if dtype is None else dtype)


def ones_like(input: Tensor, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    return ops.ones_like(input, dtype=input.dtype if dtype is None else dtype)


def zeros_like(input: Tensor, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    return ops.zeros_like(input, dtype=input.dtype if dtype is None else dtype)


def empty(
    *size: Any, dtype: mindspore.Type | None = None, device: str | None = None, pin_memory: bool = False
) -> Tensor:
    """Returns zeros: memory that nothing wrote would bring no speed here."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return ops.zeros(tuple(shape), mindspore.float32 if dtype is None else dtype)


def empty_like(
    input: Tensor,  # noqa: A002
    *,
    dtype: mindspore.Type | None = None,
    device: str | None = None,
    pin_memory: bool = False,
) -> Tensor:
    return zeros_like(input, dtype)


def tril(input: Tensor, diagonal: int = 0) -> Tensor:  # noqa: A002
    return ops.tril(input, diagonal)


def diag(input: Tensor, diagonal: int = 0) -> Tensor:  # noqa: A002
    if input.ndim == 2:
        return shape.diagonal(input, diagonal)
    n = input.shape[0] + abs(diagonal)
    rows = ops.pad(input, (max(-diagonal, 0), max(diagonal, 0))).expand_dims(1)
    return ops.where(_on_diagonal(n, n, diagonal), rows, ops.zeros_like(rows))


def eye(n: int, m: int, dtype: mindspore.Type | None = None) -> Tensor:
    """Writes zeros, too: MindSpore's kernel for GPUs writes the ones alone."""
    if n == 0 or m == 0:
        return ops.zeros((n, m), dtype)
    return ops.cast(_on_diagonal(n, m, 0), mindspore.float32 if dtype is None else dtype)


def _on_diagonal(n: int, m: int, diagonal: int) -> Tensor:
    """Returns which elements of a matrix are on this diagonal."""
    return ops.arange(m).expand_dims(0) - ops.arange(n).expand_dims(1) == diagonal


def one_hot(tensor: Tensor, num_classes: int, on_value: Any, off_value: Any, axis: int = -1) -> Tensor:
    if num_classes == -1:
        num_classes = int(tensor.max()) + 1
    return ops.one_hot(tensor, num_classes, on_value, off_value, axis)


def full(size: tuple[int, ...], fill_value: float, dtype: mindspore.Type | None = None) -> Tensor:
    if dtype is None:
        dtype = mindspore.float32
        if isinstance(fill_value, bool):
            dtype = mindspore.bool_
        elif isinstance(fill_value, int):
            dtype = mindspore.int64
    return ops.full(size, fill_value, dtype=dtype)


def linspace(start: float, end: float, steps: int, dtype: mindspore.Type | None = None) -> Tensor:
    if dtype == mindspore.float64 and not isinstance(start, Tensor) and not isinstance(end, Tensor):
        values = _steps(start, (end - start) / max(steps - 1, 1), steps)
        return ops.where(ops.arange(steps) == max(steps - 1, 1), constant(end, dtype), values)
    return ops.cast(ops.linspace(start, end, steps), mindspore.float32 if dtype is None else dtype)


@once
def _count(start: float, end: float, step: float) -> int:
    return max(0, math.ceil((end - start) / step))


def _steps(start: float, step: float, n: int) -> Tensor:
    """Returns n numbers in float64, of which MindSpore's operators would have float32's digits."""
    places = ops.cast(ops.arange(n), mindspore.float64)
    return places * constant(step, mindspore.float64) + constant(start, mindspore.float64)
