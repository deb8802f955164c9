"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "reciprocal_rms"
_LIBRARY = of_package(_NAME)


def reciprocal_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Computes the reciprocal of the root mean square of each row, in float32 or, for float64, in float64.

    .. math:: r = \frac{1}{\sqrt{\frac{1}{C} \sum_{i=1}^{C} x_i^2 + \text{eps}}}

    MindSpore's `rms_norm` returns this number beside its result. It has no gradient, there or here.
    """
    return ops.stop_gradient(operators.primitive(eps)(ops.stop_gradient(x)))


@Operators
def operators(eps: float) -> Operator:
    eps = settings.number(_NAME, "eps", eps, 0)
    return custom_op(_LIBRARY.ReciprocalRmsForward, "x(*S, C) -> r(*S, dtype=accumulator)", eps=eps)
