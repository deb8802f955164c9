"""Checks the settings of operators of rays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msops.core import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    Corner = float | Sequence[float]


def box(operator: str, low: Corner, high: Corner) -> dict[str, Any]:
    """Requires the corners of a box, each of three finite numbers or one for all axes, and returns the attributes low_x
    to high_z."""
    attributes = {}
    for name, corner in (("low", low), ("high", high)):
        each: Any = corner if isinstance(corner, (tuple, list)) else (corner,) * 3
        if len(each) != 3:
            raise ValueError(f"{operator}: {name} must have 3 numbers, got {corner!r}")
        attributes.update(
            {f"{name}_{axis}": settings.number(operator, name, value) for axis, value in zip("xyz", each)}
        )
    if not all(attributes[f"low_{axis}"] < attributes[f"high_{axis}"] for axis in "xyz"):
        raise ValueError(f"{operator}: high must be more than low, got low {low} and high {high}")
    return attributes
