"""Normalizes, by statistics of rows or of channels."""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.communication import GlobalComm
from mindspore.ops import operations

from msops.core.compiled import compiling, once
from msops.core.inputs import has_zero
from msops.operators.group_norm import group_norm as normalize_groups
from msops.operators.layer_norm import layer_norm as normalize

_own_group_norm: Any = getattr(ops, "group_norm", None)


def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if compiling():
        begin = _open_begin(input.shape, normalized_shape)
        if begin is not None:
            ones, zeros = ops.ones(normalized_shape, input.dtype), ops.zeros(normalized_shape, input.dtype)
            scale = ones if weight is None else ops.cast(weight, input.dtype)
            shift = zeros if bias is None else ops.cast(bias, input.dtype)
            return _make_layer_norm(begin, eps)(input, scale, shift)[0]
    rows = _rows_of(input.shape, normalized_shape)
    weight, bias = _as_parameter(weight, input), _as_parameter(bias, input)
    if rows is not None and weight is None:
        if has_zero(*rows) is None:  # a size is open
            weight = ops.ones(normalized_shape, mindspore.float32)
        else:
            bias = None if bias is None else bias.reshape(-1)
            return normalize(input.reshape(rows), None, bias, eps).reshape(input.shape)
    return normalize(input, weight, bias, eps)


@once
def _open_begin(shape: Any, normalized: Any) -> int | None:
    """Returns the first of the axes that MindSpore's own operator normalizes, if one of these is open, else None."""
    axes = 1 if isinstance(normalized, int) else len(normalized)
    if shape is None:
        if axes > 1:
            raise ValueError("layer_norm: the input's rank must be known when MindSpore compiles, for several axes")
        return -1
    return len(shape) - axes if None in shape[len(shape) - axes :] else None


@once
def _make_layer_norm(begin: int, eps: float) -> operations.LayerNorm:
    return operations.LayerNorm(begin, begin, eps)


def layer_norm_and_statistics(
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Also returns the mean and the reciprocal of the standard deviation, which have no gradient."""
    y = layer_norm(input, normalized_shape, weight, bias, eps)
    x = ops.cast(ops.stop_gradient(input), mindspore.float32)
    axes = tuple(range(-len(normalized_shape), 0))
    mean = ops.mean(x, axes, True)
    return y, mean, ops.rsqrt(ops.mean(ops.square(x - mean), axes, True) + eps)


def _as_parameter(x: Tensor | None, beside: Tensor) -> Tensor | None:
    """Returns a parameter of a dtype that msops' norms take beside an input."""
    if x is None or x.dtype in (mindspore.float32, beside.dtype):
        return x
    return ops.cast(x, beside.dtype)


@once
def _rows_of(shape: tuple[int, ...], normalized: Any) -> tuple[int, ...] | None:
    """Returns the shape of an input whose normalized axes are joined, None if it is one axis."""
    normalized = (normalized,) if isinstance(normalized, int) else tuple(normalized)
    if not normalized or shape[-len(normalized) :] != normalized:
        raise ValueError(f"layer_norm: normalized_shape must be the last axes of the input's {shape}, got {normalized}")
    return None if len(normalized) == 1 else (*shape[: -len(normalized)], math.prod(normalized))


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if compiling() and _lacks_channels(input.shape):
        return _own_group_norm(input, num_groups, weight, bias, eps)
    return normalize_groups(input, num_groups, _as_parameter(weight, input), _as_parameter(bias, input), eps)


@once
def _lacks_channels(shape: tuple[int | None, ...] | None) -> bool:
    return shape is None or len(shape) < 2 or shape[1] is None


def batch_norm(
    input: Tensor,  # noqa: A002
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    runnning_var: Tensor | None = None,  # MindSpore's spelling
    training: bool = False,
    momentum: float = 0.1,
    epsilon: float = 1e-5,
) -> tuple[Tensor, ...]:
    rank = _rank_of(input.shape, training)
    x, n = _as_planes(input, rank), input.shape[1]
    weight = ops.ones((n,), mindspore.float32) if weight is None else ops.cast(weight, mindspore.float32)
    bias = ops.zeros((n,), mindspore.float32) if bias is None else ops.cast(bias, mindspore.float32)
    if running_mean is None or runnning_var is None:
        if not training:
            raise ValueError("mint.nn.functional.batch_norm: running_mean and running_var must be given for evaluation")
        return (_as_before(_by_own_statistics(x, weight, bias, epsilon), input, rank),)
    out = _make_batch_norm(training, epsilon, momentum)(x, weight, bias, running_mean, runnning_var)
    return (_as_before(out[0], input, rank),)


def _as_planes(x: Tensor, rank: int) -> Tensor:
    """Returns an input with two axes after the channels. This does not need its sizes, which may be open."""
    if rank == 4:
        return x
    if rank > 4:
        return ops.flatten(x, start_dim=3)
    return x.expand_dims(2).expand_dims(3) if rank == 2 else x.expand_dims(3)


def _as_before(y: Tensor, x: Tensor, rank: int) -> Tensor:
    if rank == 4:
        return y
    if rank > 4:
        return y.reshape(x.shape)
    return y.squeeze((2, 3)) if rank == 2 else y.squeeze(3)


def _by_own_statistics(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = ops.cast(x, mindspore.float32)
    distances = wide - ops.mean(wide, (0, 2, 3), True)
    scale = ops.rsqrt(ops.mean(ops.square(distances), (0, 2, 3), True) + eps)
    return ops.cast(distances * scale * weight.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1), x.dtype)


@once
def _rank_of(shape: tuple[int | None, ...] | None, training: bool) -> int:
    name = "mint.nn.functional.batch_norm"
    if shape is None:
        raise ValueError(f"{name}: the input's rank must be known when MindSpore compiles")
    if len(shape) < 2:
        raise ValueError(f"{name}: input must have 2 axes at least, got shape {shape}")
    sizes = (shape[0], *shape[2:])
    if training and None not in sizes and math.prod(size or 0 for size in sizes) <= 1:
        raise ValueError(f"{name}: training needs several values a channel, got shape {shape}")
    return len(shape)


@once
def _make_batch_norm(training: bool, epsilon: float, momentum: float | None) -> operations.BatchNorm:
    if momentum is None:  # MindSpore's word for a number that is not known when it compiles
        raise NotImplementedError(
            "mint.nn.functional.batch_norm: momentum must be known when MindSpore compiles; "
            "a Cell with momentum=None, which counts the batches, needs PyNative mode"
        )
    return operations.BatchNorm(training, epsilon, momentum)


_SyncBatchNorm: Any = mint.nn.SyncBatchNorm


class SyncBatchNorm(_SyncBatchNorm):
    """Normalizes by its own batch where `mindspore.communication` is not in use, so that a program runs by itself."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: str | None = None,
        dtype: mindspore.Type | None = None,
    ) -> None:
        if GlobalComm.INITED:
            super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, dtype)
            return
        super(_SyncBatchNorm, self).__init__(num_features, eps, momentum, affine, track_running_stats, dtype)
        self.process_group, self.world_size, self.sync_batch_norm = process_group, 1, None
