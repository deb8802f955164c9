"""Has the operators of linear_cross_entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.shared.cross_entropy import attributes_of

if TYPE_CHECKING:
    from msops.core.definition import Gradient
    from msops.core.operator import Operator

NAME = "linear_cross_entropy"
_LIBRARY = of_package(NAME)
# A chunk's gradient of the weight is a sum over its rows. In float16 it is made smaller by this factor, so that it only
# overflows where the sum is beyond 2^20.
SHRINK = 1 / 16


@Operators
def operators_of_all(
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float, chunk: int | None
) -> Operator:
    """Returns the operator that computes the loss, and the gradients of x and the weight. The loss is the sum of the
    rows' losses times the factor, which these gradients lack."""
    return custom_op(
        _LIBRARY.LinearCrossEntropyForward,
        "x(N, C), weight(V, C), labels(N, dtype=index) -> loss(dtype=accumulator), factor(dtype=accumulator), "
        "dx(N, C)?, dweight(V, C)?; logits(..., dtype=common), losses, stats, totals, partial",
        name=NAME,
        form=0,
        checks_labels=False,
        chunk=chunk or 0,
        shrink=SHRINK,
        **attributes_of(NAME, ignore_index, reduction, label_smoothing, z_loss, softcap),
    )


def make_result(ignore_index: int, gradient: Gradient) -> Operator:
    """Returns the operator that returns the loss, which has a gradient with respect to the first inputs.

    On the CPU it checks the labels. If an operator before it failed, the process might end: MindSpore gives the outputs
    of an operator that failed no memory, and runs the matmuls that are in its queue nevertheless.
    """
    return custom_op(
        _LIBRARY.LinearCrossEntropyResult,
        "x(N, C), weight(V, C), labels(N, dtype=index), bias(V)?, class_weight(V, dtype=accumulator)?, "
        "loss(*S, dtype=accumulator), dx(N, C, dtype=float16|common)?, dweight(V, C, dtype=float16|common)?, "
        "dbias(V, dtype=float16|common)?, factor(dtype=accumulator)? -> result(*S, dtype=accumulator)",
        gradient=gradient,
        name=NAME,
        ignore_index=ignore_index,
    )


scale = custom_op(_LIBRARY.LinearCrossEntropyScale, "x(*S), factor(dtype=accumulator) -> y(*S)", name=NAME)
