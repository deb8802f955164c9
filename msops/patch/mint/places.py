"""Writes numbers at places of a tensor, and returns a new one."""

from __future__ import annotations

import math
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from msops.core.compiled import once


def fill_diagonal(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    return ops.where(_diagonal(self.shape, wrap), ops.full_like(self, fill_value), self)


@once
def _diagonal(shape: tuple[int, ...], wrap: bool) -> Tensor:
    if len(shape) < 2 or (len(shape) > 2 and len(set(shape)) > 1):
        raise ValueError(
            f"mint.Tensor.fill_diagonal_: the tensor must be a matrix, or have axes of one length, got shape {shape}"
        )
    mask = np.zeros(shape, bool)
    np.fill_diagonal(mask, True, wrap)
    return Tensor(mask)


def index_put(self: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """Replaces or adds to self[indices], where an index that is true or false takes all places that are true."""
    parts: list[Tensor] = []
    for index in indices:
        if index.dtype in (mindspore.bool_, mindspore.uint8):
            parts += ops.unbind(ops.nonzero(index), 1)
        else:
            parts.append(ops.cast(index, mindspore.int64))
    shape, inner = self.shape[: len(parts)], self.shape[len(parts) :]
    flat = sum(
        ops.where(each < 0, each + n, each) * math.prod(shape[i + 1 :]) for i, (each, n) in enumerate(zip(parts, shape))
    )
    values = ops.broadcast_to(values, (*flat.shape, *inner)).reshape(flat.size, *inner)
    write = ops.tensor_scatter_add if accumulate else ops.tensor_scatter_update
    return write(self.reshape(-1, *inner), flat.reshape(-1, 1), values).reshape(self.shape)


def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Replaces or adds to the elements at places in the flat tensor."""
    flat = index_put(self.reshape(-1), (index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.reshape(self.shape)


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Replaces the elements where the mask is true by those of the source, one after another."""
    mask, source = ops.broadcast_to(mask, self.shape), source.reshape(-1)
    order = ops.cumsum(ops.cast(mask.reshape(-1), mindspore.int32), 0)
    count = int(order[-1]) if order.size else 0
    if count > source.size:
        raise ValueError(
            f"mint.Tensor.masked_scatter_: source must have an element for each of {count} places, got {source.size}"
        )
    if count == 0:
        return self
    found = ops.gather(source, ops.maximum(order - 1, ops.zeros_like(order)), 0)
    return ops.where(mask, found.reshape(self.shape), self)
