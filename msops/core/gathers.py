"""Provides operators that gather points, and their scratch as text for signatures.

The numbers are those of aot_kernels/shared/gather: kTerms, kRangePoints and kRecordWords of tiles.h, kMostStaged of
forward.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, ops

from .factory import custom_op

if TYPE_CHECKING:
    from .library import Entry
    from .operator import Operator

_TERMS, _RANGE_POINTS, _RECORD_WORDS, _MOST_STAGED = 4096, 40960, 4100, 28000


def staged(points: str) -> str:
    """Returns the scratch of a forward entry, where channels of many points are stored as packs."""
    return f"packs(16 + B * ((C + 15) // 16 * 16) * {points} * min(1, {points} // {_MOST_STAGED + 1}), dtype=common)"


def sorted_terms(places: str, points: str, taps: int = 1) -> str:
    """Returns the scratch of a gradient's entry, where the terms of `places`, of `taps` points each, are sorted."""
    of_tile = _TERMS // taps // 8 * 8  # places
    tiles, ranges = (
        f"(({places} + {of_tile - 1}) // {of_tile})",
        f"(({points} + {_RANGE_POINTS - 1}) // {_RANGE_POINTS})",
    )
    terms = f"{taps} * {places}" if taps > 1 else places
    lists = f"{terms} + max(1, min(32, {terms} // 1024)) * {points} + 128"
    return f"scratch(max(B * {tiles} * {ranges} * {_RECORD_WORDS} + 4, B * ({lists})), dtype=int32)"


def gather_operators(gather: Entry, scatter: Entry, places: str) -> tuple[Operator, Operator]:
    """Returns the operator that takes the features of points, and its gradient; idx has the axes `places`."""

    def gradient_of_backward(
        idx: Tensor, dout: Tensor, features: Tensor, dfeatures: Tensor, ddfeatures: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the operator itself: it is linear, and its gradient is its transpose."""
        return ops.zeros_like(idx), forward(ddfeatures, idx), ops.zeros_like(features)

    backward = custom_op(
        scatter,
        f"idx(B, {places}, dtype=index), dout(B, C, {places}), features(B, C, N) -> dfeatures(B, C, N); "
        + sorted_terms(places.replace(",", " *"), "N"),
        gradient=gradient_of_backward,
    )
    forward = custom_op(
        gather,
        f"features(B, C, N), idx(B, {places}, dtype=index) -> out(B, C, {places}); {staged('N')}",
        gradient=backward,
    )
    return forward, backward
