"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator

_NAME = "layer_norm_of_samples"
_LIBRARY = of_package("layer_norm")


def layer_norm_of_samples(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Scales each row of x (B, ..., C) to mean 0 and variance 1, multiplies it by its sample's row of the weight, and
    adds that of the bias; both are (B, C), and all have the same dtype. There is no second order."""
    return operators.primitive(eps)(x, weight, bias)


@Operators
def operators(eps: float) -> Operator:
    eps = settings.number(_NAME, "eps", eps, 0)
    inputs = "x(B, *S, C), weight(B, C), bias(B, C)"
    backward = custom_op(
        _LIBRARY.LayerNormOfSamplesBackward,
        f"{inputs}, dy(B, *S, C) -> dx(B, *S, C), dweight(B, C), dbias(B, C); partial",
        name=_NAME,
        eps=eps,
    )
    return custom_op(
        _LIBRARY.LayerNormOfSamplesForward, f"{inputs} -> y(B, *S, C)", gradient=backward, name=_NAME, eps=eps
    )
