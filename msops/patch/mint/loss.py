"""Computes losses."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import compiling, is_on_gpu, once
from msops.core.inputs import has_zero, lacks_rank
from msops.core.spec import FLOATS
from msops.operators.cross_entropy import cross_entropy as cross_entropy_of_rows
from msops.patch.replacement import Replacement

from .activation import softplus
from .elementwise import rsqrt

_log_softmax = operations.LogSoftmax(-1)
_own_log_softmax: Any = getattr(ops, "LogSoftmaxExt", tuple)()


def log_softmax(input: Tensor, dim: int | None = None, *, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
    x = input if dtype is None else ops.cast(input, dtype)
    if compiling() and lacks_rank(x.shape):
        return _own_log_softmax(x, dim)
    if dim is None:
        dim = 0 if input.ndim in (0, 1, 3) else 1
    if x.ndim == 0:
        return ops.zeros_like(x)
    if dim in (-1, x.ndim - 1):
        return _of_last_axis(x)
    # On a GPU, MindSpore takes the gradient's kernel of one axis for another axis, if the shapes are equal.
    return ops.swapaxes(_of_last_axis(ops.swapaxes(x, dim, -1)), dim, -1)


def _of_last_axis(x: Tensor) -> Tensor:
    """Subtracts the logarithms of sums: MindSpore's kernels for the CPU lose digits of the gradient."""
    if is_on_gpu() or x.dtype not in FLOATS or has_zero(*x.shape) is not False:
        return _log_softmax(x)
    wide = ops.cast(x, mindspore.float32) if x.dtype == mindspore.float16 else x
    below = wide - ops.stop_gradient(ops.amax(wide, -1, True))
    rows = below.reshape(-1, x.shape[-1])
    _, lse = cross_entropy_of_rows(rows, _zeros(rows.shape[0]), reduction="none", return_lse=True)
    return ops.cast(below - ops.cast(lse, wide.dtype).reshape((*x.shape[:-1], 1)), x.dtype)


@once
def _zeros(n: int) -> Tensor:
    return ops.zeros((n,), mindspore.int32)


class LogSoftmaxExt(Replacement):
    """Calls log_softmax."""

    def __call__(self, input: Tensor, dim: int | None = None, dtype: mindspore.Type | None = None) -> Tensor:  # noqa: A002
        return log_softmax(input, dim, dtype=dtype)


def cross_entropy_ext(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    shape = _check_cross_entropy(input.shape, target.shape, target.dtype in _FLOATING, reduction, label_smoothing)
    axis = 0 if input.ndim == 1 else 1
    if target.dtype in _FLOATING:
        return _of_probabilities(input, target, weight, reduction, label_smoothing, axis)
    logits = input if input.ndim <= 2 else ops.moveaxis(input, 1, -1)
    if input.ndim != 2:
        logits = logits.reshape(-1, input.shape[axis])
    if target.dtype not in (mindspore.int32, mindspore.int64):
        target = ops.cast(target, mindspore.int64)
    if weight is not None:
        weight = ops.cast(weight, input.dtype)
    loss = cross_entropy_of_rows(logits, target.reshape(-1), weight, ignore_index, reduction, label_smoothing)
    return ops.cast(loss.reshape(shape) if reduction == "none" else loss, input.dtype)


def _of_probabilities(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float, axis: int
) -> Tensor:
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[axis]
    terms = log_softmax(x, axis) * target
    if weight is not None:
        terms = terms * weight.reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    loss = -ops.sum(terms, axis)
    if reduction == "mean":
        return loss.mean()
    return loss if reduction == "none" else loss.sum()


_FLOATING = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)


def shape_of_labels(x: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the labels beside logits of this shape, whose classes are along axis 1, or the only one."""
    return x[:1] + x[2:] if len(x) > 1 else ()


@once
def _check_cross_entropy(
    x: tuple[int, ...], target: tuple[int, ...], of_probabilities: bool, reduction: str, label_smoothing: float
) -> tuple[int, ...]:
    name = "mint.nn.functional.cross_entropy"
    if not x or x[0] == 0:
        raise ValueError(f"{name}: input must have an axis, and the first one must not be empty, got shape {x}")
    want = x if of_probabilities else shape_of_labels(x)
    if target != want:
        raise ValueError(f"{name}: target must have shape {want} beside an input of shape {x}, got {target}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{name}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    return want


def nll_loss(
    logits: Tensor, labels: Tensor, weight: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Returns the loss of an input of shape (N, V) or (V,), and the sum of the labels' weights."""
    x = logits if logits.ndim > 1 else logits.expand_dims(0)
    loss, total = nll_loss_2d(x, labels.reshape(-1), weight, reduction, ignore_index)
    return loss.reshape(labels.shape) if reduction == "none" else loss, total


def nll_loss_2d(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of an input of shape (N, V, ...), and the sum of the labels' weights."""
    counts = target != ignore_index
    labels = ops.where(counts, target, ops.zeros_like(target))
    weights = ops.where(counts, ops.gather(weight, labels, 0), ops.zeros((), weight.dtype))
    losses = -ops.gather_elements(input, 1, labels.expand_dims(1)).squeeze(1)
    losses = ops.where(counts, losses, ops.zeros((), losses.dtype)) * weights
    total = weights.sum()
    if reduction == "none":
        return losses, total
    return losses.sum() / total if reduction == "mean" else losses.sum(), total


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses if reduction == "none" else losses.sum()


def mse_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:  # noqa: A002
    return _reduced(ops.square(input - target), reduction)


def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:  # noqa: A002
    return _reduced(ops.abs(input - target), reduction)


def kl_div(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:  # noqa: A002
    if log_target:
        return _reduced(ops.exp(target) * (target - input), reduction)
    positive = target > 0
    logarithms = ops.log(ops.where(positive, target, ops.ones_like(target)))
    return _reduced(ops.where(positive, target * (logarithms - input), ops.zeros_like(target)), reduction)


def soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:  # noqa: A002
    return _reduced(softplus(-target * input), reduction)


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    axis = -1 if input1.ndim == 1 or input2.ndim == 1 else 1
    products = ops.sum(input1 * input2, axis)
    sizes = (ops.sum(ops.square(input1), axis) + 1e-12) * (ops.sum(ops.square(input2), axis) + 1e-12)
    cosine = products * rsqrt(sizes)
    apart = ops.where(target == -1, ops.relu(cosine - margin), ops.zeros_like(cosine))
    return _reduced(ops.where(target == 1, 1 - cosine, apart), reduction)
