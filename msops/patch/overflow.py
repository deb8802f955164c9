"""Holds what `patch_mindspore` puts in place of Ascend's flag of overflows, which GPU and CPU do not have."""

from __future__ import annotations

import warnings

import mindspore
from mindspore import Tensor, ops

from .replacement import Replacement


def no_overflow(input: Tensor) -> Tensor:  # noqa: A002 (MindSpore's name)
    return ops.zeros_like(input)


class NPUAllocFloatStatus(Replacement):
    """Returns a flag that tells of no overflow."""

    def __call__(self) -> Tensor:
        return ops.zeros((8,), mindspore.float32)


class NPUClearFloatStatus(Replacement):
    """Returns a flag that tells of no overflow."""

    def __call__(self, x: Tensor) -> Tensor:
        return ops.zeros_like(x)


class NPUClearFloatStatusV2(NPUClearFloatStatus):
    """Returns a flag that tells of no overflow."""


class NPUGetFloatStatus(NPUClearFloatStatus):
    """Returns a flag that tells of no overflow, and warns that nobody looks."""

    def __init__(self) -> None:
        warnings.warn(
            f"{type(self).__name__}: GPU and CPU have no flag of overflows, so that it tells of none: an overflow "
            "shows as inf or NaN in the gradients, which mindspore.amp.all_finite finds",
            stacklevel=2,
        )


class NPUGetFloatStatusV2(NPUGetFloatStatus):
    """Returns a flag that tells of no overflow, and warns that nobody looks."""
