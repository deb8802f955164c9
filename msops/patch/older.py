"""Composes primitives of `mindspore.ops` that MindSpore has for GPUs alone, or for no device."""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import compiling, constant, is_on_gpu, once
from msops.core.inputs import has_zero, lacks_rank
from msops.operators.group_norm import group_norm

from .mint import einsum, loss, reduction
from .mint.in_place import store
from .replacement import Choice, Replacement

_OwnFloatStatus, _OwnInstanceNorm = operations.FloatStatus, operations.InstanceNorm
_own_dot: Any = getattr(ops, "dot", None)
_own_dropout: Any = ops.dropout
_own_cross_entropy: Any = ops.cross_entropy


def dot(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 (MindSpore's name)
    """Calls MindSpore's, which takes no vectors: their product is that of mint.dot."""
    if input.ndim == 1 and other.ndim == 1:
        return (input * other).sum()
    return _own_dot(input, other)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, seed: int | None = None) -> Tensor:  # noqa: A002
    """Calls mint's dropout on a GPU in PyNative mode, and MindSpore's own otherwise. MindSpore's own keeps the state of
    its random numbers on the host, so that no CUDA graph can record it."""
    if is_on_gpu() and not compiling() and training and seed is None:
        return mindspore.mint.nn.functional.dropout(input, p)
    return _own_dropout(input, p, training, seed)


def dropout_of_cell(self: Any, x: Tensor) -> Tensor:
    """Replaces the construct of nn.Dropout: it calls mint's dropout where `dropout` does."""
    if not self.training or self.keep_prob == 1 or self.p == 0:
        return x
    if is_on_gpu() and not compiling():
        return mindspore.mint.nn.functional.dropout(x, 1 - self.keep_prob if self.p is None else self.p)
    out, _ = self.dropout(x)
    return out


def cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Calls mint's for labels of float16, and MindSpore's own otherwise. MindSpore's own adds the logarithms of all
    classes, also where nothing smooths the labels. From some 6,000 classes on, the sum is infinite in float16, and the
    loss NaN. The mean of no labels is NaN, as in MindSpore's own."""
    if weight is None and label_smoothing == 0 and _has_labels_of_float16(input, target, reduction):
        found = loss.cross_entropy_ext(input, target, None, ignore_index, reduction)
        if reduction != "mean":
            return found
        return ops.where((target != ignore_index).any(), found, constant(math.nan, mindspore.float16))
    return _own_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)


def _has_labels_of_float16(x: Tensor, target: Tensor, reduction: str) -> bool:
    if x.dtype != mindspore.float16 or target.dtype not in (mindspore.int32, mindspore.int64):
        return False
    if lacks_rank(x.shape) or lacks_rank(target.shape) or -1 in x.shape or x.ndim == 0:
        return False
    is_beside = target.shape == loss.shape_of_labels(x.shape)
    return is_beside and has_zero(*x.shape) is False and reduction in ("none", "mean", "sum")


class Einsum(Replacement):
    """Computes Einstein's sum of a tuple of tensors. A result without axes has shape (1,), as MindSpore documents."""

    def __init__(self, equation: str) -> None:
        self.equation = equation

    def __call__(self, x: tuple[Tensor, ...]) -> Tensor:
        y = einsum.einsum(self.equation, tuple(x))
        return y if y.ndim else y.reshape(1)


class FloatStatus(Choice):
    """Returns [1] if a number is infinite or NaN, else [0], without a gradient."""

    def __init__(self) -> None:
        self.own = _OwnFloatStatus()

    def __call__(self, x: Tensor) -> Tensor:
        if is_on_gpu():
            return self.own(x)
        is_finite = ops.isfinite(ops.stop_gradient(x)).all()
        return ops.cast(ops.logical_not(is_finite), mindspore.float32).reshape(1)


class Fmin(Replacement):
    """Returns the lesser number of each pair, or the other one beside NaN. Of equal ones the first has the gradient."""

    def __call__(self, x1: Any, x2: Any) -> Tensor:
        first = x1 if isinstance(x1, Tensor) else ops.full_like(x2, x1)
        second = x2 if isinstance(x2, Tensor) else ops.full_like(x1, x2)
        is_first = ops.logical_or(first <= second, second != second)  # noqa: PLR0124 (NaN)
        return ops.where(is_first, first, second)


class InstanceNorm(Choice):
    """Normalizes each channel of each sample. The running statistics, which nothing reads, move as MindSpore's."""

    def __init__(self, epsilon: float = 1e-5, momentum: float = 0.1) -> None:
        self.epsilon, self.momentum = epsilon, momentum
        self.own = _OwnInstanceNorm(epsilon, momentum)

    def __call__(
        self, input_x: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_on_gpu():
            return self.own(input_x, gamma, beta, mean, variance)
        n, channels = input_x.shape[:2]
        x = ops.cast(ops.stop_gradient(input_x), mindspore.float32).reshape(n, channels, -1)
        own_mean = ops.mean(x, -1, True)
        own_variance = ops.mean(ops.square(x - own_mean), -1)
        for kept, new in ((mean, own_mean.squeeze(-1)), (variance, own_variance)):
            store(kept, kept * self.momentum + ops.mean(new, 0) * (1 - self.momentum))
        y = group_norm(input_x, channels, gamma, beta, self.epsilon)
        return y, own_mean.reshape(-1), own_variance.reshape(-1)


class Quantile(Replacement):
    """Returns quantiles, linear between two numbers. NaN if one of the numbers is, unless NaN is left out."""

    def __init__(self, dim: int | None = None, keep_dims: bool = False, ignore_nan: bool = False) -> None:
        self.name = "nanquantile" if ignore_nan else "quantile"
        self.axis, self.keeps, self.ignores = dim, keep_dims, ignore_nan

    def __call__(self, input: Tensor, q: Any) -> Tensor:  # noqa: A002
        of_q = q.shape if isinstance(q, Tensor) else ()
        number = None if isinstance(q, Tensor) else q
        shape = _shape_of_quantiles(self.name, input.shape, input.dtype, of_q, number, self.axis, self.keeps)
        x = input.reshape(-1) if self.axis is None or input.ndim == 0 else ops.moveaxis(input, self.axis, -1)
        rows = x.reshape(-1, x.shape[-1])
        levels = ops.cast(q, x.dtype).reshape(1, -1) if isinstance(q, Tensor) else constant(q, x.dtype, (1, 1))
        return _quantiles(rows, levels, self.ignores).reshape(shape)


def _quantiles(rows: Tensor, levels: Tensor, ignores: bool) -> Tensor:
    """Returns the quantiles (m, n) of n rows at m levels (1, m). A level that is not from 0 to 1 gives NaN."""
    values = reduction.sort(rows)[0]  # NaN comes last
    nan = constant(float("nan"), rows.dtype)
    if ignores:
        last = ops.cast(ops.logical_not(ops.isnan(rows)), rows.dtype).sum(1, keepdims=True) - 1
        last = ops.maximum(last, ops.zeros_like(last))
    else:
        last = ops.full_like(rows[:, :1], rows.shape[1] - 1)
    place = ops.stop_gradient(levels * last)
    below = ops.minimum(ops.maximum(ops.floor(place), ops.zeros_like(place)), ops.broadcast_to(last, place.shape))
    above = ops.minimum(below + 1, last)
    share = place - below
    low = ops.gather_elements(values, 1, ops.cast(below, mindspore.int32))
    high = ops.gather_elements(values, 1, ops.cast(above, mindspore.int32))
    between = ops.where(share == 0, low, low + (high - low) * share)
    valid = ops.logical_and(levels >= 0, levels <= 1)
    if not ignores:
        valid = ops.logical_and(valid, ops.logical_not(ops.isnan(values[:, -1:])))
    return ops.where(valid, between, nan).swapaxes(0, 1)


@once
def _shape_of_quantiles(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    of_q: tuple[int, ...],
    q: Any,
    axis: int | None,
    keeps: bool,
) -> tuple[int, ...]:
    if dtype not in (mindspore.float32, mindspore.float64):
        raise TypeError(f"{name}: input must be float32 or float64, got {dtype}")
    if q is not None and not (isinstance(q, (int, float)) and 0 <= q <= 1):
        raise ValueError(f"{name}: q must be a Tensor, or a number from 0 to 1, got {q!r}")
    if len(of_q) > 1:
        raise ValueError(f"{name}: q must have one axis at most, got shape {of_q}")
    if axis is not None and not -max(len(shape), 1) <= axis < max(len(shape), 1):
        raise ValueError(f"{name}: axis must be one of the input's, of shape {shape}, got {axis}")
    if axis is None or not shape:
        rest = (1,) * len(shape) if keeps else ()
    else:
        axis %= len(shape)
        rest = (*shape[:axis], *((1,) if keeps else ()), *shape[axis + 1 :])
    return (*of_q, *rest)
