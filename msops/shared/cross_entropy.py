"""Has the operators of the cross-entropy of rows whose labels are classes, and the checks of the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

    LossSettings = tuple[int, str, float, float, float]  # ignore_index, reduction, label_smoothing, z_loss, softcap

NAME = "cross_entropy"
LIBRARY = of_package(NAME)
KEPT = "stats(N, 2, dtype=accumulator), totals(3, dtype=accumulator)"  # what the gradient needs
_REDUCTIONS = ("none", "sum", "mean")  # in the order of Reduction in aot_kernels/cross_entropy/loss.h


@Operators
def operators(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    is_constant: bool = False,
    is_general: bool = False,
) -> Operator:
    """Returns the operator that gives the loss, lse if it `is_general`, and what the gradient needs.

    If it `is_general`, weights have the dtype of sums.

    If `is_constant`, no gradient reaches the logits: nothing uses the gradient of the gradient. A label out of range
    then gives NaN on the CPU, too, as on a GPU.
    """
    attributes = attributes_of(NAME, ignore_index, reduction, label_smoothing, z_loss, softcap)
    attributes.update(checks_labels=not is_constant, form=int(is_general))
    inputs = f"logits(N, V), labels(N, dtype=index), weight(V{', dtype=accumulator' * is_general})?"
    lse = "lse(N, dtype=accumulator), " * is_general
    loss = f"loss({'N, ' * (reduction == 'none')}dtype=accumulator)"
    backward = custom_op(
        LIBRARY.CrossEntropyBackward,
        f"{inputs}, {KEPT}, d{loss}{', dlse(N, dtype=accumulator)' * is_general} -> dlogits(N, V)",
        gives=1,
        gradient=None if not is_constant else _unused_general if is_general else _unused,
        **attributes,
    )
    return custom_op(
        LIBRARY.CrossEntropyForward,
        f"{inputs} -> {loss}, {lse}{KEPT}; losses, partial",
        gradient=backward,
        **attributes,
    )


def _unused(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    totals: Tensor,
    dloss: Tensor,
    dlogits: Tensor,
    ddlogits: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns tensors of the inputs' shapes. Graph mode makes this gradient also where nothing uses it."""
    return logits, labels, weight, stats, totals, dloss


def _unused_general(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    totals: Tensor,
    dloss: Tensor,
    dlse: Tensor,
    dlogits: Tensor,
    ddlogits: Tensor,
) -> tuple[Tensor | None, ...]:
    return logits, labels, weight, stats, totals, dloss, dlse


def attributes_of(
    name: str, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float
) -> dict[str, Any]:
    """Checks the settings. Errors begin with `name`, since `linear_cross_entropy` has them, too."""
    smoothing = settings.number(name, "label_smoothing", label_smoothing, 0)
    if smoothing > 1:
        raise ValueError(f"{name}: label_smoothing must be at most 1, got {label_smoothing}")
    return dict(
        ignore_index=settings.integer(name, "ignore_index", ignore_index),
        reduction=settings.one_of(name, "reduction", reduction, _REDUCTIONS),
        label_smoothing=smoothing,
        z_loss=settings.number(name, "z_loss", z_loss, 0),
        softcap=settings.number(name, "softcap", softcap, 0),
    )


def check_weights(name: str, what: str, weight: Tensor | None) -> None:
    """Requires weights of classes that a Cell gets to be a Tensor."""
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(f"{name}: {what} must be a Tensor, got {type(weight).__name__}")


def as_accumulator(weight: Any, logits: Tensor) -> Any:
    """Casts weights of the dtype of the logits or float32 to the dtype of sums. A later check reports others."""
    if not isinstance(weight, Tensor):
        return weight
    if logits.dtype == mindspore.float64:
        return cast_as(weight, logits) if weight.dtype == mindspore.float32 else weight
    if weight.dtype == mindspore.float16 and logits.dtype == mindspore.float16:
        return ops.cast(weight, mindspore.float32)
    return weight
