"""Computes the parts of a batch normalization whose batch lies on several devices."""

from __future__ import annotations

import mindspore
from mindspore import Tensor, ops

from .in_place import store


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Returns each channel's mean and the reciprocal of its standard deviation."""
    x, axes = _wide(input), _axes_of_channels(input)
    mean = ops.mean(x, axes, True)
    variance = ops.mean(ops.square(x - mean), axes)
    return mean.reshape(-1), ops.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 1e-1,
    eps: float = 1e-5,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins the statistics of several devices, which have a row of mean and of invstd each, and moves the running
    statistics. Without counts all devices have as many numbers of a channel as this one's input."""
    means, deviations = _wide(mean), _wide(invstd)
    if counts is None:
        counts = ops.full((means.shape[0],), input.size // input.shape[1], dtype=means.dtype)
    shares = ops.cast(counts, means.dtype).reshape(-1, 1)
    total = shares.sum()
    mean = ops.sum(means * shares, 0) / total
    squares = ops.sum(shares * (1 / ops.square(deviations) - eps + ops.square(means - mean)), 0)
    if running_mean is not None:
        mean = ops.depend(mean, _move(running_mean, mean, momentum))
    if running_var is not None:
        squares = ops.depend(squares, _move(running_var, squares / (total - 1), momentum))
    return mean, ops.rsqrt(squares / total + eps)


def _move(running: Tensor, value: Tensor, momentum: float) -> Tensor:
    return store(running, ops.cast(running * (1 - momentum) + value * momentum, running.dtype))


def batch_norm_elemt(
    input: Tensor,  # noqa: A002
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    invstd: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalizes by given statistics, in which eps is already."""
    y = _wide(input)
    if mean is not None:
        y = y - _of_channels(mean, input)
    if invstd is not None:
        y = y * _of_channels(invstd, input)
    if weight is not None:
        y = y * _of_channels(weight, input)
    if bias is not None:
        y = y + _of_channels(bias, input)
    return ops.cast(y, input.dtype)


def batch_norm_reduce_grad(
    dout: Tensor,
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns each channel's sums of dout and of dout (x - mean), and the gradients of weight and bias."""
    axes, dy = _axes_of_channels(input), _wide(dout)
    total = ops.sum(dy, axes)
    weighted = ops.sum(dy * (_wide(input) - _of_channels(mean, input)), axes)
    return total, weighted, weighted * invstd, total


def batch_norm_elemt_grad(
    dout: Tensor,
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sumd_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Returns the gradient of the input from the sums of all devices."""
    total = _wide(count).sum()
    slope = sum_dy_xmu / total * ops.square(invstd)
    distances = _wide(input) - _of_channels(mean, input)
    dx = _wide(dout) - _of_channels(sumd_dy / total, input) - distances * _of_channels(slope, input)
    scale = invstd if weight is None else invstd * weight
    return ops.cast(dx * _of_channels(scale, input), input.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == mindspore.float64 else ops.cast(x, mindspore.float32)


def _axes_of_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _of_channels(x: Tensor, beside: Tensor) -> Tensor:
    """Returns numbers of the channels in a shape that broadcasts."""
    return _wide(x).reshape((1, -1) + (1,) * (beside.ndim - 2))
