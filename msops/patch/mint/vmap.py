"""Gives TensorScatterElements, of which `scatter` and `scatter_add` are composed, a rule for `mindspore.vmap`.

MindSpore's own rule asks the primitive for its axis, but in MindSpore 2.10 the axis is an argument of the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore.ops import _vmap

if TYPE_CHECKING:
    from collections.abc import Callable

    from mindspore import Tensor

_NAME = "TensorScatterElements"
_with_batch_first: Any = getattr(_vmap.vmap_base, "_bdim_at_front", None)


def _make_rule(prim: Any, axis_size: int) -> Callable[..., Any]:
    def rule(data: Any, indices: Any, updates: Any, axis: Any, reduce: Any) -> tuple[Tensor, int]:
        """Takes each input with the axis of its batch, or None, and returns the result with its axis."""
        x = _with_batch_first(data[0], data[1], axis_size)
        places = _with_batch_first(indices[0], indices[1], axis_size)
        source = _with_batch_first(updates[0], updates[1], axis_size)
        along = axis[0] if axis[0] < 0 else axis[0] + 1
        return prim(x, places, source, along, reduce[0]), 0

    return rule


def get_vmap_rule(own: Any) -> Any:
    """Makes the function by which MindSpore gets the rule of a primitive."""

    def function(prim: Any, axis_size: int) -> Any:
        if getattr(prim, "name", "") == _NAME and not hasattr(prim, "axis"):
            return _make_rule(prim, axis_size)
        return own(prim, axis_size)

    return own and function
