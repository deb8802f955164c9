"""Infers the shape that inputs broadcast to, for kernels that take a limited number of axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core.rules import broadcast

if TYPE_CHECKING:
    from msops.core.spec import Spec

MAX_RANK = 16  # kMaxRank in aot_kernels/common/axes.h


def broadcast_of(**inputs: Spec) -> Spec:
    """Returns the Spec of the shape to which the inputs broadcast, and of the first one's dtype."""
    names = ", ".join(list(inputs)[:-1]) + f" and {list(inputs)[-1]}"
    try:
        out = broadcast(*inputs.values())
    except ValueError:
        shapes = [str(spec.shape) for spec in inputs.values()]
        got = ", ".join(shapes[:-1]) + f" and {shapes[-1]}"
        raise ValueError(f"{names} must have shapes that broadcast, got {got}") from None
    if len(out.shape) > MAX_RANK:
        raise ValueError(f"{names} must have at most {MAX_RANK} axes, got {len(out.shape)}")
    return out
