"""Calls the searches of points of a cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core.inputs import as_int32, present

if TYPE_CHECKING:
    from typing import Any

    from mindspore import Tensor

    from msops.core.primitive import Primitive


def call_with_lengths(
    search: Primitive, xyz: Tensor, new_xyz: Tensor, lengths: Tensor | None, new_lengths: Tensor | None
) -> Any:
    """Calls an operator of clouds and queries with the lengths that are given."""
    return search(xyz, new_xyz, *present((as_int32(lengths), as_int32(new_lengths))))
