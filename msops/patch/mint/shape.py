"""Moves, copies and selects elements."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from msops.core.compiled import compiling, is_on_gpu

from . import reduction

_masked_fill: Any = getattr(getattr(ops, "auto_generate", None), "masked_fill_op", None)
_search_sorted: Any = getattr(ops.function.array_func, "search_sorted_", None)
_where: Any = getattr(getattr(ops, "functional_overload", None), "_where_instance", None)


def stack(tensors: tuple[Tensor, ...], dim: int) -> Tensor:
    return ops.stack(tensors, dim)


def clone(input: Tensor) -> Tensor:  # noqa: A002
    return ops.deepcopy(input)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:  # noqa: A002
    return ops.swapaxes(input, dim0, dim1)


def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:  # noqa: A002
    """Takes every (n + 1)-th element of the matrices.

    In graph mode on a GPU, MindSpore's own diagonal at times holds other tensors' numbers."""
    x = input if input.ndim == 2 and (dim1, dim2) == (0, 1) else ops.moveaxis(input, (dim1, dim2), (-2, -1))
    m, n = x.shape[-2], x.shape[-1]
    first = offset if offset >= 0 else -offset * n
    count = max(0, min(m, n - offset) if offset >= 0 else min(m + offset, n))
    return x.reshape((*x.shape[:-2], m * n))[..., first : first + count * (n + 1) : n + 1]


def t(input: Tensor) -> Tensor:  # noqa: A002
    return ops.swapaxes(input, 0, 1) if input.ndim == 2 else input


def split_evenly(input: Tensor, split_size: int, dim: int = 0) -> tuple[Tensor, ...]:  # noqa: A002
    return ops.split(input, split_size, dim)


def split_into(input: Tensor, split_size: tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:  # noqa: A002
    return ops.split(input, split_size, dim)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:  # noqa: A002
    return ops.chunk(input, chunks, dim)


def broadcast_to(input: Tensor, shape: tuple[int, ...]) -> Tensor:  # noqa: A002
    return ops.broadcast_to(input, shape)


def expand_dims(input: Tensor, dim: int) -> Tensor:  # noqa: A002
    return ops.expand_dims(input, dim)


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:  # noqa: A002
    dim = dim % input.ndim
    if start < 0:
        start += input.shape[dim]
    if not 0 <= start <= start + length <= input.shape[dim]:
        raise ValueError(
            f"mint.narrow: start and length must fit an axis of {input.shape[dim]} elements, got {start} and {length}"
        )
    return ops.narrow(input, dim, start, length)


def slice_along(input: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:  # noqa: A002
    """Takes input[start:end:step] of an axis."""
    places = [slice(None) for _ in range(input.ndim)]
    places[dim] = slice(start, end, step)
    return input[tuple(places)]


def select(input: Tensor, dim: int, index: int) -> Tensor:  # noqa: A002
    if index < 0:
        index += input.shape[dim]
    return ops.narrow(input, dim, index, 1).squeeze(dim)


def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:  # noqa: A002
    return ops.unbind(input, dim)


def masked_fill(input_x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """In PyNative mode on a GPU, MindSpore's primitive needs a value of the input's dtype; the method casts it."""
    if compiling() or not is_on_gpu():
        return _masked_fill(input_x, mask, value)
    return input_x.masked_fill(mask, value)


def searchsorted(
    sorted_sequence: Tensor, values: Tensor, sorter: Tensor | None, dtype: mindspore.Type, right: bool
) -> Tensor:
    """Finds places by bisection where MindSpore's kernel does not: on a GPU it takes all rows for the first one."""
    if sorter is not None or sorted_sequence.ndim == 1 or not is_on_gpu():
        return _search_sorted(sorted_sequence, values, sorter, dtype, right)
    n = sorted_sequence.shape[-1]
    place = ops.zeros(values.shape, mindspore.int32)
    for step in _powers_of_two(n):  # from the greatest one on
        after = place + step
        held = ops.gather_elements(sorted_sequence, -1, ops.clamp(after, 1, n) - 1)
        is_before = ops.logical_not(held > values if right else held >= values)
        place = ops.where(ops.logical_and(is_before, after <= n), after, place)
    return ops.cast(place, dtype)


@ops.constexpr
def _powers_of_two(n: int) -> tuple[int, ...]:
    return tuple(2**k for k in reversed(range(n.bit_length())))


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    return ops.gather(input, index, dim)


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:  # noqa: A002
    return add_at(input, dim, index, source, alpha)


def add_at(input: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:  # noqa: A002
    shape = (*[1] * (dim % input.ndim), -1, *[1] * (input.ndim - dim % input.ndim - 1))
    places = ops.broadcast_to(index.reshape(shape), source.shape)
    return ops.tensor_scatter_elements(input, places, source * alpha, dim, "add")


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    if index.shape != src.shape:
        src = _corner(src, index.shape)
    return ops.tensor_scatter_elements(input, index, src, dim, "add")


def scatter(input: Tensor, dim: int, index: Tensor, src: Any, reduce: str = "none") -> Tensor:  # noqa: A002
    if not isinstance(src, Tensor):
        src = ops.full(index.shape, src, dtype=input.dtype)
    elif index.shape != src.shape:
        src = _corner(src, index.shape)
    if reduce not in ("none", "add", "mul", "multiply", 0, 1, 2):
        raise ValueError(f"mint.scatter: reduce must be 'none', 'add' or 'multiply', got {reduce!r}")
    how = "none" if reduce in ("none", 0) else "add" if reduce in ("add", 1) else "mul"
    return ops.tensor_scatter_elements(input, index, src, dim, how)


def unique(
    input: Tensor,  # noqa: A002
    sorted: bool = True,  # noqa: A002
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the values in order, which of them each element is, and how many elements are each."""
    values, order = reduction.sort(input.reshape(-1))
    found, runs, counts = unique_consecutive(values)
    places = ops.tensor_scatter_elements(ops.zeros_like(runs), order, runs)
    return found, places.reshape(input.shape), counts


def unique_consecutive(
    input: Tensor,  # noqa: A002
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one of each run of equal values, which run each element is in, and how long the runs are."""
    x = input.reshape(-1) if dim is None else ops.moveaxis(input, dim, 0)
    n = x.shape[0]
    if n < 2:  # there are no changes
        runs = ops.zeros((n,), mindspore.int64)
        return (
            x if dim is None else input,
            runs.reshape(input.shape) if dim is None else runs,
            ops.ones((n,), mindspore.int64),
        )
    rows = x.reshape(n, -1)
    changes = (rows[1:] != rows[:-1]).any(1)
    runs = ops.concat((ops.zeros((1,), mindspore.int64), ops.cumsum(ops.cast(changes, mindspore.int64), 0)))
    starts = ops.concat((ops.zeros((1,), mindspore.int64), ops.nonzero(changes).reshape(-1) + 1))
    ends = ops.concat((starts[1:], ops.full((1,), n, dtype=mindspore.int64)))
    found = ops.gather(x, starts, 0)
    if dim is None:
        return found, runs.reshape(input.shape), ends - starts
    return ops.moveaxis(found, 0, dim), runs, ends - starts


def unique_along(
    input: Tensor,  # noqa: A002
    sorted: bool,  # noqa: A002
    return_inverse: bool,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the unique slices on the host: MindSpore has no kernel for GPU and CPU that orders them."""
    if compiling():
        raise NotImplementedError("mint.unique: graph mode cannot have dim, since the result's size depends on values")
    found, places, counts = np.unique(input.asnumpy(), return_inverse=True, return_counts=True, axis=dim)
    return Tensor(found), Tensor(places.reshape(-1).astype(np.int64)), Tensor(counts.astype(np.int64))


def _corner(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ops.slice(x, (0,) * len(shape), shape)


def take(input: Tensor, index: Tensor) -> Tensor:  # noqa: A002
    flat = input.reshape(-1)
    index = ops.where(index < 0, index + flat.shape[0], index)
    return ops.gather(flat, index, 0)


def roll(input: Tensor, shifts: Any, dims: Any = None) -> Tensor:  # noqa: A002
    if dims is None or dims == ():
        shift = shifts if isinstance(shifts, int) else shifts[0]
        return _rolled(input.reshape(-1), shift, 0).reshape(input.shape)
    if isinstance(dims, int):
        dims = (dims,)
    if isinstance(shifts, int):
        shifts = (shifts,)
    for shift, dim in zip(shifts, dims):
        input = _rolled(input, shift, dim)  # noqa: A001
    return input


def _rolled(x: Tensor, shift: int, dim: int) -> Tensor:
    n = x.shape[dim]
    start = -shift % n if n else 0
    if start == 0:
        return x
    return ops.concat((ops.narrow(x, dim, start, n - start), ops.narrow(x, dim, 0, start)), dim)


def repeat_interleave(
    input: Tensor,  # noqa: A002
    repeats: Any,
    dim: int | None = None,
    output_size: int | None = None,
) -> Tensor:
    if dim is None:
        input, dim = input.reshape(-1), 0  # noqa: A001
    if isinstance(repeats, int):
        shape = input.shape
        dim = dim % len(shape)
        wide = ops.broadcast_to(input.expand_dims(dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
        return wide.reshape((*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :]))
    if isinstance(repeats, Tensor) and compiling():
        raise NotImplementedError(
            "mint.repeat_interleave: graph mode cannot have repeats in a Tensor, since the result's size depends on "
            "values: give a tuple"
        )
    return ops.repeat_interleave(input, repeats, dim)


def nonzero(input: Tensor) -> tuple[Tensor, ...]:  # noqa: A002
    return ops.unbind(ops.nonzero(input), 1)


def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:  # noqa: A002
    """Calls MindSpore's own where, unless the condition stands alone."""
    if input is None and other is None:
        return nonzero(condition)
    return _where(condition, input, other)


def constant_pad(input: Tensor, padding: tuple[int, ...], value: float = 0.0) -> Tensor:  # noqa: A002
    if min(padding) < 0:
        for i in range(len(padding) // 2):
            dim, left, right = input.ndim - 1 - i, -min(padding[2 * i], 0), -min(padding[2 * i + 1], 0)
            input = ops.narrow(input, dim, left, input.shape[dim] - left - right)  # noqa: A001
        padding = tuple([max(each, 0) for each in padding])
    if input.dtype == mindspore.bool_:
        return ops.cast(ops.pad(ops.cast(input, mindspore.int32), padding, "constant", int(value)), mindspore.bool_)
    return ops.pad(input, padding, "constant", value)


def reflection_pad(input: Tensor, padding: tuple[int, ...]) -> Tensor:  # noqa: A002
    return _padded(input, padding, True)


def replication_pad(input: Tensor, padding: tuple[int, ...]) -> Tensor:  # noqa: A002
    return _padded(input, padding, False)


def _padded(x: Tensor, padding: tuple[int, ...], reflects: bool) -> Tensor:
    """Gathers rows along each axis: those that a reflection at the first and the last one meets, or these two."""
    for i in range(len(padding) // 2):
        dim = x.ndim - 1 - i
        x = ops.gather(x, Tensor(_places(x.shape[dim], padding[2 * i], padding[2 * i + 1], reflects)), dim)
    return x


@ops.constexpr
def _places(n: int, left: int, right: int, reflects: bool) -> tuple[int, ...]:
    if reflects and not max(left, right) < n:
        raise ValueError(f"mint: a reflection pads less than the {n} elements along an axis, got ({left}, {right})")
    places = range(-left, n + right)
    if reflects:
        return tuple([min(abs(i), 2 * (n - 1) - abs(i)) if i >= n else abs(i) for i in places])
    return tuple([min(max(i, 0), n - 1) for i in places])
