"""Computes sums, statistics and orders along axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import compiling, is_on_gpu
from msops.core.inputs import has_zero

from .elementwise import WHOLE, exp, floating, log

_own_cummax: Any = getattr(getattr(ops, "auto_generate", None), "cummax", None)

if TYPE_CHECKING:
    Axes = int | tuple[int, ...] | None


def cumsum(input: Tensor, dim: int, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    if dtype is None:
        dtype = mindspore.int64 if input.dtype in WHOLE else input.dtype
    if input.ndim == 0 or has_zero(*input.shape):  # MindSpore's kernel fails where there is nothing to add
        return ops.cast(input, dtype)
    wide = mindspore.float32 if dtype == mindspore.float16 else dtype
    return ops.cast(ops.cumsum(ops.cast(input, wide), dim), dtype)


def cumprod(x: Tensor, dim: int) -> Tensor:
    """Multiplies each number by the one before it, then by the one two places before, and so on, since the gradient of
    MindSpore's own divides by the numbers, which may be 0."""
    n, dim = x.shape[dim] if x.ndim else 0, dim % max(x.ndim, 1)
    step = 1
    while step < n:
        ones = ops.ones((*x.shape[:dim], step, *x.shape[dim + 1 :]), x.dtype)
        x = x * ops.concat((ones, ops.narrow(x, dim, 0, n - step)), dim)
        step *= 2
    return x


def cummin(input: Tensor, dim: int) -> tuple[Tensor, Tensor]:  # noqa: A002
    return _taken(input, dim, ops.cummin(ops.stop_gradient(input), dim)[1])


def cummax(input: Tensor, axis: int) -> tuple[Tensor, Tensor]:  # noqa: A002
    return _taken(input, axis, _own_cummax(ops.stop_gradient(input), axis)[1])


def _taken(x: Tensor, dim: int, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers at indices, which have a gradient, and the indices."""
    return ops.gather_elements(x, dim, indices), ops.cast(indices, mindspore.int64)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    return _argmax(_comparable(input), dim, keepdim)


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    return _argmax(-_comparable(input), dim, keepdim)


def _argmax(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Returns where the greatest number is, or the first NaN, which MindSpore's kernel for the CPU does not see."""
    found = ops.argmax(x, dim, keepdim)
    if not is_on_gpu():
        is_nan = ops.cast(x != x, mindspore.float32)  # noqa: PLR0124 (NaN)
        most = ops.amax(is_nan, () if dim is None else dim, keepdim)
        found = ops.where(most > 0, ops.argmax(is_nan, dim, keepdim), found)
    return ops.cast(found, mindspore.int64)


def _comparable(x: Tensor) -> Tensor:
    """Returns numbers of a dtype for which there are kernels, in the same order."""
    return ops.cast(x, mindspore.float64) if x.dtype in WHOLE else x


def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:  # noqa: A002
    """NaN counts as the greatest number. MindSpore's kernel for the CPU compares NaN with others, and sorts float64 as
    float32; that of topk, which sorts where it takes all, does the latter right."""
    if is_on_gpu() or input.dtype in WHOLE or has_zero(*input.shape):
        values, indices = ops.sort(input, dim, descending)
        return values, ops.cast(indices, mindspore.int64)
    x = input.reshape(1) if input.ndim == 0 else input
    n, is_nan = x.shape[dim], x != x  # noqa: PLR0124 (NaN)
    indices = ops.topk(ops.where(is_nan, ops.full_like(x, math.inf), x), n, dim, descending)[1]
    # Equal numbers keep their order, so that this takes NaN behind infinity.
    is_last = ops.gather_elements(ops.cast(is_nan, mindspore.int32), dim, indices)
    indices = ops.gather_elements(indices, dim, ops.topk(is_last, n, dim, descending)[1])
    values = ops.gather_elements(x, dim, indices)
    return values.reshape(input.shape), ops.cast(indices, mindspore.int64).reshape(input.shape)


def argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:  # noqa: A002
    return sort(input, dim, descending)[1]


def topk(
    input: Tensor,  # noqa: A002
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> tuple[Tensor, Tensor]:
    if is_on_gpu() or input.dtype in WHOLE or has_zero(*input.shape):
        values, indices = ops.topk(input, k, dim, largest, sorted)
        return values, ops.cast(indices, mindspore.int64)
    values, indices = sort(input, dim, largest)
    return ops.narrow(values, dim, 0, k), ops.narrow(indices, dim, 0, k)


def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:  # noqa: A002
    values, indices = sort(input, dim)
    values, indices = ops.narrow(values, dim, k - 1, 1), ops.narrow(indices, dim, k - 1, 1)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median_along(input: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Returns the lower of the two middle numbers, and its index."""
    return kthvalue(input, (input.shape[dim] + 1) // 2, dim, keepdim)


def median(input: Tensor) -> Tensor:  # noqa: A002
    """Elements that equal the median share its gradient, as in PyTorch."""
    x = input.reshape(-1)
    found = ops.stop_gradient(median_along(x)[0])
    is_median = ops.logical_or(x == found, ops.logical_and(ops.isnan(x), ops.isnan(found)))
    share = ops.where(is_median, x - found, ops.zeros_like(x)).sum() / ops.cast(is_median, x.dtype).sum()
    return found + ops.where(ops.isfinite(found), share, ops.zeros_like(found))


def var(input: Tensor, dim: Axes = None, correction: int = 1, keepdim: bool = False) -> Tensor:  # noqa: A002
    return var_mean(input, dim, correction, keepdim)[0]


def std(input: Tensor, dim: Axes = None, correction: int = 1, keepdim: bool = False) -> Tensor:  # noqa: A002
    return ops.sqrt(var(input, dim, correction, keepdim))


def std_mean(
    input: Tensor,  # noqa: A002
    dim: Axes = None,
    correction: int = 1,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    variance, mean = var_mean(input, dim, correction, keepdim)
    return ops.sqrt(variance), mean


def var_mean(
    input: Tensor,  # noqa: A002
    dim: Axes = None,
    correction: int = 1,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    axes = _axes(input, dim)
    n = math.prod([input.shape[axis] for axis in axes])
    mean = ops.mean(input, axes, True)
    distances = input - mean
    variance = ops.sum(distances * distances, axes, keepdim) / max(n - correction, 0)
    return variance, mean if keepdim else mean.squeeze(axes)


def _axes(x: Tensor, dim: Axes) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def logsumexp(input: Tensor, dim: Axes, keepdim: bool = False) -> Tensor:  # noqa: A002
    x, axes = floating(input), _axes(input, dim)
    most = ops.stop_gradient(ops.amax(x, axes, True))
    most = ops.where(ops.isfinite(most), most, ops.zeros_like(most))
    total = log(ops.sum(exp(x - most), axes, True)) + most
    return total if keepdim else total.squeeze(axes)


def vector_norm(
    x: Tensor,
    ord: float = 2,  # noqa: A002
    dim: Axes = None,
    keepdim: bool = False,
    dtype: mindspore.Type | None = None,
) -> Tensor:
    x, axes = x if dtype is None else ops.cast(x, dtype), _axes(x, dim)
    if ord == 2:
        squares = ops.sum(x * x, axes, keepdim)
        is_zero = squares == 0  # where the root has no derivative, the gradient is 0
        root = ops.sqrt(ops.where(is_zero, ops.ones_like(squares), squares))
        return ops.where(is_zero, ops.zeros_like(squares), root)
    size = ops.abs(x)
    if ord == math.inf:
        return ops.amax(size, axes, keepdim)
    if ord == -math.inf:
        return ops.amin(size, axes, keepdim)
    if ord == 0:
        return ops.sum(ops.cast(x != 0, x.dtype), axes, keepdim)
    if ord == 1:
        return ops.sum(size, axes, keepdim)
    return ops.pow(ops.sum(ops.pow(size, ord), axes, keepdim), 1 / ord)


def p_norm(x: Tensor, p: float = 2, axis: Axes = None, keep_dims: bool = False, epsilon: float = 0.0) -> Tensor:
    return vector_norm(x, p, axis, keep_dims)


def count_nonzero(input: Tensor, dim: Axes = None) -> Tensor:  # noqa: A002
    return ops.cast(ops.sum(ops.cast(input != 0, mindspore.int32), _axes(input, dim)), mindspore.int64)


def nansum(input: Tensor, dim: Axes = None, keepdim: bool = False, *, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    x = ops.where(ops.isnan(input), ops.zeros_like(input), input)
    return ops.sum(x if dtype is None else ops.cast(x, dtype), _axes(input, dim), keepdim)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:  # noqa: A002
    if compiling():
        raise NotImplementedError("mint.bincount: the result's size depends on values, which graph mode cannot have")
    n = max(minlength, int(input.max()) + 1 if input.size else 0)
    hits = ops.cast(input.expand_dims(1), mindspore.int64) == ops.arange(n)
    if weights is None:
        return ops.cast(ops.sum(ops.cast(hits, mindspore.int32), 0), mindspore.int64)
    return ops.sum(ops.where(hits, weights.expand_dims(1), ops.zeros((), weights.dtype)), 0)


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    x = floating(input).reshape(-1)
    low, high = (x.min(), x.max()) if min == max == 0 else (min, max)
    width = (high - low) / bins
    place = ops.floor((x - low) / width)
    place = ops.where(x == high, ops.full_like(x, bins - 1), place)
    hits = place.expand_dims(1) == ops.cast(ops.arange(bins), x.dtype)
    return ops.cast(ops.sum(ops.cast(hits, mindspore.float32), 0), input.dtype)
