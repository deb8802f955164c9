"""Takes means and largest numbers of windows, and makes columns of windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import once

from .conv import along
from .elementwise import GREATEST
from .shape import constant_pad

if TYPE_CHECKING:
    from collections.abc import Callable

    Numbers = int | tuple[int, ...]
    Operator = Callable[..., Any]


def avg_pool1d(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    return _avg_pool(input, 1, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


def avg_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers | None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    return _avg_pool(input, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    return _avg_pool(input, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _avg_pool(
    x: Tensor,
    rank: int,
    kernel_size: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    name = f"mint.nn.functional.avg_pool{rank}d"
    is_batch, sizes = _batch_and_sizes(name, x.shape, rank)
    operator, pads, factors = _make_avg_pool(
        name, sizes, x.dtype, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    volume = _as_volume(x, rank, is_batch)
    y = operator(volume if pads is None else constant_pad(volume, pads))
    if factors is not None:
        y = y * factors
    return _as_before(y, rank, is_batch)


def _as_volume(x: Tensor, rank: int, is_batch: bool) -> Tensor:
    """Returns a batch of planes or volumes. This does not need the sizes, which may be open."""
    if not is_batch:
        x = x.expand_dims(0)
    return x.expand_dims(2) if rank == 1 else x


def _as_before(y: Tensor, rank: int, is_batch: bool) -> Tensor:
    if rank == 1:
        y = y.squeeze(2)
    return y if is_batch else y.squeeze(0)


# MindSpore fails to slice a tuple in a graph that it compiles after one of a BatchNorm in training and one of x[0].
@once
def rest(shape: tuple[int, ...], begin: int) -> tuple[int, ...]:
    return shape[begin:]


@once
def joined(shape: tuple[int, ...], end: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of a shape before axis `end`, then `sizes`."""
    return (*shape[:end], *sizes)


@once
def _batch_and_sizes(name: str, shape: tuple[int | None, ...] | None, rank: int) -> tuple[bool, tuple[int | None, ...]]:
    """Tells whether an input has an axis for samples, and returns the sizes of its planes or volumes."""
    if shape is None:
        raise ValueError(f"{name}: the input's rank must be known when MindSpore compiles")
    if len(shape) not in (rank + 1, rank + 2):
        raise ValueError(f"{name}: input must have {rank + 1} or {rank + 2} axes, got shape {shape}")
    return len(shape) == rank + 2, shape[-rank:]


@once
def _make_avg_pool(
    name: str,
    sizes: Any,
    dtype: mindspore.Type,
    kernel_size: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> tuple[Operator, tuple[int, ...] | None, Tensor | None]:
    """Returns an operator that takes means of whole windows, the zeros to put around its input, and factors that make
    its result the one asked for.
    """
    rank = len(sizes)
    kernel = along(name, kernel_size, rank)
    strides = kernel if stride is None or stride == () else along(name, stride, rank)
    pads = along(name, padding, rank)
    if any(2 * pad > size for pad, size in zip(pads, kernel)):
        raise ValueError(f"{name}: padding must be half of kernel_size at most, got {padding} and {kernel_size}")
    if divisor_override == 0:
        raise ValueError(f"{name}: divisor_override must not be 0")
    whole = math.prod(kernel)
    front = (1,) * (2 - rank)
    make = operations.AvgPool3D if rank == 3 else operations.AvgPool
    operator = make(front + kernel, front + strides, "valid")
    if None in sizes:
        if any(pads) or ceil_mode:
            raise ValueError(f"{name}: {sizes} must be known when MindSpore compiles, for padding and ceil_mode")
        return operator, None, None if divisor_override is None else Tensor(whole / divisor_override, dtype)
    counts = np.ones(())
    zeros: list[int] = []
    for n, size, step, pad in zip(sizes, kernel, strides, pads):
        length = n + 2 * pad - size
        if length < 0:
            raise ValueError(f"{name}: a window of {kernel_size} is larger than the padded input of {sizes}")
        windows = (-(-length // step) if ceil_mode else length // step) + 1
        if (windows - 1) * step >= n + pad:
            windows -= 1  # no window begins in the padding on the right
        starts = np.arange(windows) * step - pad
        ends = starts + size
        first, last = (-pad, n + pad) if count_include_pad else (0, n)  # of those that count
        counts = np.multiply.outer(counts, np.minimum(ends, last) - np.maximum(starts, first))
        zeros = [pad, max(int(ends[-1]) - n, 0), *zeros]
    if divisor_override is not None:
        counts = np.full_like(counts, divisor_override)
    factors = None if np.all(counts == whole) else Tensor(whole / counts, dtype)
    return operator, tuple(zeros) if any(zeros) else None, factors


def max_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the largest numbers and their places in each plane. NaN counts as the largest."""
    operator = _make_max_pool(kernel_size, stride, padding, dilation, ceil_mode)
    x = input.expand_dims(0) if input.ndim == 3 else input
    greatest = _greatest(x.dtype)
    if greatest is None:
        y, indices = operator(x)
    else:  # MindSpore's kernels compare NaN with others
        finite = ops.minimum(ops.stop_gradient(x), greatest)
        _, indices = operator(ops.where(ops.isnan(x), ops.full_like(finite, math.inf), finite))
        places = ops.flatten(indices, start_dim=2)
        y = ops.gather_elements(ops.flatten(x, start_dim=2), 2, places).reshape(indices.shape)
    return (y.squeeze(0), indices.squeeze(0)) if input.ndim == 3 else (y, indices)


@once
def _greatest(dtype: mindspore.Type) -> Tensor | None:
    """Returns the greatest finite number of a dtype that has NaN."""
    return Tensor(GREATEST[dtype], dtype) if dtype in GREATEST else None


@once
def _make_max_pool(
    kernel_size: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers, ceil_mode: bool
) -> Operator:
    name = "mint.nn.functional.max_pool2d"
    kernel = along(name, kernel_size, 2)
    strides = kernel if stride is None or stride == () else along(name, stride, 2)
    pads, dilations = along(name, padding, 2), along(name, dilation, 2)
    return operations.MaxPoolWithArgmaxV2(kernel, strides, pads, dilations, ceil_mode, mindspore.int64)


def adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    return _adaptive_avg_pool(input, 1, output_size)


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    return _adaptive_avg_pool(input, 2, output_size)


def adaptive_avg_pool3d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    return _adaptive_avg_pool(input, 3, output_size)


def _adaptive_avg_pool(x: Tensor, rank: int, output_size: Any) -> Tensor:
    name = f"mint.nn.functional.adaptive_avg_pool{rank}d"
    is_batch, own = _batch_and_sizes(name, x.shape, rank)
    sizes = _sizes(name, output_size, own, rank)
    if sizes == (1,) * rank:
        return ops.mean(x, _last_axes(rank), True)
    y = _make_adaptive_avg_pool((1,) * (2 - rank) + sizes)(_as_volume(x, rank, is_batch))
    return _as_before(y, rank, is_batch)


@once
def _last_axes(rank: int) -> tuple[int, ...]:
    return tuple(range(-rank, 0))


@once
def _sizes(name: str, output_size: Any, shape: tuple[int | None, ...], rank: int) -> tuple[Any, ...]:
    """Returns the sizes of a result, where None and -1 stand for those of the input."""
    sizes = (output_size,) * rank if output_size is None else along(name, output_size, rank)
    return tuple([own if size in (None, -1) else size for size, own in zip(sizes, shape[-rank:])])


@once
def _make_adaptive_avg_pool(sizes: tuple[int, ...]) -> Operator:
    return (operations.AdaptiveAvgPool3D if len(sizes) == 3 else operations.AdaptiveAvgPool2D)(sizes)


def adaptive_max_pool1d(input: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:  # noqa: A002
    y, indices = adaptive_max_pool2d(input.expand_dims(-2), (1, _sizes(_MAX_1D, output_size, input.shape, 1)[0]))
    return y.squeeze(-2), indices.squeeze(-2)


def adaptive_max_pool2d(input: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Returns the largest numbers and their places in each plane."""
    return _make_adaptive_max_pool(_sizes(_MAX_2D, output_size, input.shape, 2))(input)


_MAX_1D, _MAX_2D = "mint.nn.functional.adaptive_max_pool1d", "mint.nn.functional.adaptive_max_pool2d"


@once
def _make_adaptive_max_pool(sizes: tuple[int, ...]) -> Operator:
    return operations.AdaptiveMaxPool2D(sizes)


def max_unpool2d(
    input: Tensor,  # noqa: A002
    indices: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    output_size: tuple[int, ...] | None = None,
) -> Tensor:
    planes, sizes = _unpooled(input.shape, kernel_size, stride, padding, output_size)
    flat = (planes, -1)
    zeros = ops.zeros((planes, sizes[0] * sizes[1]), input.dtype)
    out = ops.tensor_scatter_elements(zeros, indices.reshape(flat), input.reshape(flat), 1)
    return out.reshape(joined(input.shape, -2, sizes))


@once
def _unpooled(
    shape: tuple[int, ...],
    kernel_size: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    output_size: tuple[int, ...] | None,
) -> tuple[int, tuple[int, int]]:
    """Returns the number of planes, and the size of each in the result."""
    name = "mint.nn.functional.max_unpool2d"
    if len(shape) not in (3, 4):
        raise ValueError(f"{name}: input must have 3 or 4 axes, got shape {shape}")
    kernel = along(name, kernel_size, 2)
    strides = kernel if stride is None or stride == () else along(name, stride, 2)
    pads = along(name, padding, 2)
    sizes = [(shape[i - 2] - 1) * strides[i] - 2 * pads[i] + kernel[i] for i in range(2)]
    if output_size:
        given = tuple(output_size)[-2:]
        if any(abs(size - own) >= step for size, own, step in zip(given, sizes, strides)):
            raise ValueError(f"{name}: output_size must be within a stride of {tuple(sizes)}, got {output_size}")
        sizes = list(given)
    planes = shape[0] if len(shape) == 3 else shape[0] * shape[1]
    return planes, (sizes[0], sizes[1])


def unfold(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    dilation: Numbers = 1,
    padding: Numbers = 0,
    stride: Numbers = 1,
) -> Tensor:
    """Returns the windows of each image as columns of shape (channels · window, number of windows)."""
    y = _make_unfold(kernel_size, dilation, padding, stride)(input.reshape(_batch_of(input.shape, 3)))
    return y.reshape(joined(input.shape, -3, _columns(y.shape)))


@once
def _batch_of(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Returns the shape of one image, or of one matrix of columns, as that of a batch of one."""
    if len(shape) not in (rank, rank + 1):
        raise ValueError(f"mint.nn.functional: input must have {rank} or {rank + 1} axes, got shape {shape}")
    return shape if len(shape) > rank else (1, *shape)


@once
def _columns_of(shape: tuple[int, ...], window: int) -> tuple[int, ...]:
    """Returns the shape of columns with an axis for the windows' elements."""
    batch = _batch_of(shape, 2)
    return (batch[0], batch[1] // window, window, batch[2])


@once
def _columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an image's columns, whose windows and channels stand on axes 1 and 2."""
    return shape[1] * shape[2], shape[3]


@once
def _make_unfold(kernel_size: Numbers, dilation: Numbers, padding: Numbers, stride: Numbers) -> Operator:
    settings = [along("mint.nn.functional.unfold", each, 2) for each in (kernel_size, stride, dilation, padding)]
    return operations.Im2Col(*settings)


def fold(
    input: Tensor,  # noqa: A002
    output_size: Numbers,
    kernel_size: Numbers,
    dilation: Numbers = 1,
    padding: Numbers = 0,
    stride: Numbers = 1,
) -> Tensor:
    """Adds columns, as `unfold` makes them, at the places of their windows."""
    operator, sizes, window = _make_fold(output_size, kernel_size, dilation, padding, stride)
    y = operator(input.reshape(_columns_of(input.shape, window)), sizes)
    return y.reshape(joined(input.shape, -2, rest(y.shape, 1)))


@once
def _make_fold(
    output_size: Numbers, kernel_size: Numbers, dilation: Numbers, padding: Numbers, stride: Numbers
) -> tuple[Operator, Tensor, int]:
    name = "mint.nn.functional.fold"
    kernel = along(name, kernel_size, 2)
    settings = [along(name, each, 2) for each in (dilation, padding, stride)]
    sizes = Tensor(along(name, output_size, 2), mindspore.int32)
    return operations.Col2Im(kernel, *settings), sizes, kernel[0] * kernel[1]
