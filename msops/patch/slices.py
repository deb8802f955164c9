"""Gives slices with steps, such as `x[:, ::2]`, a gradient on the CPU.

MindSpore's kernel of it, StridedSliceGrad, writes out of bounds there, or for steps below 0 to other places. So a slice
with a step is composed: of windows of as many elements as the step, one element each is taken, by a slice without a
step. On a GPU, MindSpore's own kernel is right, and runs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mindspore
from mindspore import Tensor, ops

from msops.compat import VERSION
from msops.core.compiled import is_on_gpu, once, records_gradients

from .replacement import Choice

_FLOATING = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)
_WHOLE = slice(None)
_OwnSlice = ops.StridedSlice
_slice = ops.StridedSlice()
_indexing: Any = getattr(ops.composite.multitype_ops, "_compile_utils", None)
_own_by_slice: Any = getattr(_indexing, "tensor_index_by_slice", None)
_own_by_tuple: Any = getattr(_indexing, "tensor_index_by_tuple", None)


class Steps(NamedTuple):
    """Says how to take `taken` elements along an axis of a tensor of shape (outer, n, inner)."""

    shape: tuple[int, int, int]
    first: int  # where the windows begin
    windows: int  # elements along the axis that they cover, of which those beyond the last one are zeros
    zeros: int
    taken: int
    place: int  # of the element in each window, times inner
    backwards: bool
    result: tuple[int, ...]


def _stepped(x: Tensor, axes: tuple[Steps, ...]) -> Tensor:
    """Takes elements along one axis after another."""
    for (outer, n, inner), first, windows, zeros, count, place, backwards, result in axes:
        x = x.reshape(outer, n, inner)
        if zeros:
            x = ops.concat((x, ops.zeros((outer, zeros, inner), x.dtype)), 1)
        elif windows < n:
            x = _slice(x, (0, first, 0), (outer, first + windows, inner), (1, 1, 1))
        x = _slice(x.reshape(outer, count, -1), (0, 0, place), (outer, count, place + inner), (1, 1, 1))
        if backwards:
            x = ops.reverse(x, (1,))
        x = x.reshape(result)
    return x


def _plan(shape: tuple[int, ...], axis: int, part: slice) -> Steps | None:
    """Returns None if there is no step, or nothing to take."""
    n = shape[axis]
    places = range(n)[part]
    step, count = abs(places.step), len(places)
    if places.step == 1 or count == 0:
        return None
    low, windows = min(places[0], places[-1]), count * step
    first = min(low, max(n - windows, 0))
    inner = math.prod(shape[axis + 1 :])
    rows = (math.prod(shape[:axis]), n, inner)
    result = (*shape[:axis], count, *shape[axis + 1 :])
    zeros = max(windows - n, 0)
    return Steps(rows, first, windows, zeros, count, (low - first) * inner, places.step < 0, result)


def _split(shape: tuple[int, ...], parts: list[tuple[int, Any]]) -> tuple[tuple[Steps, ...], tuple[int, ...]]:
    """Returns what to take along which axes, and at which places of an index this stands.

    Each part of the index is the number of axes that it takes, -1 for the rest, and what it is."""
    rest = len(shape) - sum(max(takes, 0) for takes, _ in parts)
    axes, at, axis = [], [], 0
    for i, (takes, part) in enumerate(parts):
        if isinstance(part, slice) and axis < len(shape):
            steps = _plan(shape, axis, part)
            if steps is not None:
                axes.append(steps)
                at.append(i)
                shape = steps.result
        axis += takes if takes >= 0 else rest
    return tuple(axes), tuple(at)


@once
def _split_index(shape: Any, dtype: Any, parts: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns (), () if MindSpore's own gradient serves, also if a size or a part of the index is open.

    A part is a slice or another constant, or (n,) for a tensor that takes n axes."""
    if parts is None or not _is_composed(shape, dtype):
        return (), ()
    if not _has_step(parts):
        return (), ()
    return _split(shape, [(_axes_of(part), part) for part in parts])


def _has_step(parts: tuple[Any, ...]) -> bool:
    return any(isinstance(part, slice) and part.step not in (None, 1) for part in parts)


def _is_composed(shape: Any, dtype: Any) -> bool:
    """Tells whether a tensor may have a gradient, no size is open, and none is 0."""
    return dtype in _FLOATING and shape is not None and all(shape)


def _axes_of(part: Any) -> int:
    if isinstance(part, tuple):
        return part[0]
    if part is None or isinstance(part, bool):
        return 0
    return -1 if part is Ellipsis else 1


def tensor_index_by_slice(data: Tensor, slice_index: slice) -> Tensor:
    """Indexes in graph mode."""
    if is_on_gpu():
        return _own_by_slice(data, slice_index)
    axes, at = _split_index(data.shape, data.dtype, (slice_index,))
    return _stepped(data, axes) if at else _own_by_slice(data, slice_index)


def tensor_index_by_tuple(data: Tensor, tuple_index: tuple[Any, ...]) -> Tensor:
    """Indexes in graph mode."""
    if is_on_gpu():
        return _own_by_tuple(data, tuple_index)
    parts = ()  # type: tuple[Any, ...]
    for part in tuple_index:
        parts += (_described(part),)
    axes, at = _split_index(data.shape, data.dtype, parts)
    if not at:
        return _own_by_tuple(data, tuple_index)
    rest = ()  # type: tuple[Any, ...]
    for i in range(len(tuple_index)):
        rest += (_WHOLE if i in at else tuple_index[i],)
    return _own_by_tuple(_stepped(data, axes), rest)


def _described(part: Any) -> Any:
    if isinstance(part, Tensor):
        return (part.ndim if part.dtype == mindspore.bool_ else 1,)
    if isinstance(part, (list, tuple)):
        return (1,)
    return part


def getitem(own: Any) -> Any:
    """Makes the method that indexes in PyNative mode."""

    def method(self: Tensor, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if not _has_step(parts) or is_on_gpu() or not records_gradients():
            return own(self, index)
        axes, at = _split_index(self.shape, self.dtype, tuple([_described(part) for part in parts]))
        if not at:
            return own(self, index)
        rest = tuple([_WHOLE if i in at else part for i, part in enumerate(parts)])
        taken = own(_stepped(self, axes), rest)
        taken.parent_tensor_, taken.index_of_parent_ = self, index  # by which MindSpore writes into the whole tensor
        return taken

    return own and method


class StridedSlice(Choice):
    """Slices with steps that have a gradient."""

    def __init__(
        self,
        begin_mask: int = 0,
        end_mask: int = 0,
        ellipsis_mask: int = 0,
        new_axis_mask: int = 0,
        shrink_axis_mask: int = 0,
    ) -> None:
        self.masks = (begin_mask, end_mask, shrink_axis_mask)
        self.has_own_axes = bool(ellipsis_mask or new_axis_mask)  # MindSpore's kernel takes wrong axes beside these
        self.own = _OwnSlice(begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask)

    def __call__(self, input_x: Tensor, begin: Any, end: Any, strides: Any) -> Tensor:
        if is_on_gpu() or self.has_own_axes:
            return self.own(input_x, begin, end, strides)
        axes, bounds = _split_bounds(input_x.shape, input_x.dtype, begin, end, strides, self.masks)
        return self.own(_stepped(input_x, axes), *bounds) if axes else self.own(input_x, begin, end, strides)


@once
def _split_bounds(
    shape: Any, dtype: Any, begin: Any, end: Any, strides: Any, masks: tuple[int, ...]
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """Returns what to take along which axes, and bounds of what is left to take."""
    bounds = begin, end, strides
    if not _is_composed(shape, dtype):
        return (), ()
    if not all(isinstance(each, (tuple, list)) and all(isinstance(i, int) for i in each) for each in bounds):
        return (), ()
    parts = []
    for i, (first, last, step) in enumerate(zip(*bounds)):
        no_first, no_last, is_one = (mask >> i & 1 for mask in masks)
        whole = slice(None if no_first else first, None if no_last else last, step)
        parts.append((1, None if is_one or step == 0 else whole))
    axes, at = _split(shape, parts)
    counts = dict(zip(at, [each.taken for each in axes]))
    left = [(0, counts[i], 1) if i in counts else each for i, each in enumerate(zip(*bounds))]
    return axes, tuple(zip(*left))


FUNCTIONS: dict[str, Any] = {
    "auto_generate.StridedSlice": StridedSlice,
    "composite.multitype_ops._compile_utils.tensor_index_by_slice": tensor_index_by_slice,
    "composite.multitype_ops._compile_utils.tensor_index_by_tuple": tensor_index_by_tuple,
}
METHODS: dict[str, Any] = {"Tensor._getitem_origin": getitem}
if VERSION < (2, 9):  # which index in other ways
    FUNCTIONS, METHODS = {}, {}
