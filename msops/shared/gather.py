"""Provides operators that gather points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, ops

from msops.core.factory import custom_op

if TYPE_CHECKING:
    from msops.core.library import Entry
    from msops.core.operator import Operator


def gather_operators(name: str, gather: Entry, scatter: Entry, places: str) -> tuple[Operator, Operator]:
    """Returns the operator that takes the features of points, and its gradient; idx has the axes `places`."""

    def gradient_of_backward(
        idx: Tensor, dout: Tensor, features: Tensor, dfeatures: Tensor, ddfeatures: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the operator itself: it is linear, and its gradient is its transpose."""
        return ops.zeros_like(idx), forward(ddfeatures, idx), ops.zeros_like(features)

    backward = custom_op(
        scatter,
        f"idx(B, {places}, dtype=index), dout(B, C, {places}), features(B, C, N) -> dfeatures(B, C, N); "
        "scratch(..., dtype=int32)",
        gradient=gradient_of_backward,
        name=name,
    )
    forward = custom_op(
        gather,
        f"features(B, C, N), idx(B, {places}, dtype=index) -> out(B, C, {places}); packs(..., dtype=common)",
        gradient=backward,
        name=name,
    )
    return forward, backward
