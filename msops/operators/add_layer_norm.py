"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package

from .add import forward as add
from .layer_norm import backward_operators, infer

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "add_layer_norm"


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Returns layer_norm(x + residual, weight, bias, eps), where x and the residual have one shape and dtype, and their
    sum is rounded to it. It is one reading of both. The gradient adds them up again."""
    return operators.primitive(eps, weight is not None, bias is not None)(x, residual, *present((weight, bias)))


@Operators
def operators(eps: float) -> Operator:
    eps = settings.number(_NAME, "eps", eps, 0)
    backward = backward_operators(eps)
    of_weight, of_bias = backward.without("bias", "dbias"), backward.without("weight", "dweight")
    of_none = of_bias.without("bias", "dbias")

    def gradient(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor, dout: Tensor
    ) -> tuple[Tensor | None, ...]:
        s = add(x, residual)
        dweight = dbias = None
        if weight is None and bias is None:
            dx = of_none(s, dout)
        elif bias is None:
            dx, dweight = of_weight(s, weight, dout)
        elif weight is None:
            dx, dbias = of_bias(s, bias, dout)
        else:
            dx, dweight, dbias = backward(s, weight, bias, dout)
        return dx, dx, dweight, dbias

    return custom_op(
        of_package("layer_norm").AddLayerNormForward,
        "x(*S), residual(*S), weight(..., dtype=common|float32)?, bias(..., dtype=common|float32)? -> y",
        infer=_infer,
        gradient=gradient,
        name=_NAME,
        eps=eps,
    )


def _infer(x: Spec, residual: Spec, weight: Spec | None, bias: Spec | None, eps: float) -> Spec:
    return infer(x, weight, bias, eps)
