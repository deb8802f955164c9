"""Moves and copies elements."""

from __future__ import annotations

from mindspore import Tensor, ops


def stack(tensors: tuple[Tensor, ...], dim: int) -> Tensor:
    return ops.stack(tensors, dim)


def clone(x: Tensor) -> Tensor:
    return ops.deepcopy(x)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return ops.swapaxes(x, dim0, dim1)
