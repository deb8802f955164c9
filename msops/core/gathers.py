"""Provides the scratch of operators that gather points, as text for their signatures.

The numbers are those of aot_kernels/gather: kTerms, kRangePoints and kRecordWords of tiles.h, kMostStaged of forward.h.
"""

from __future__ import annotations

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
