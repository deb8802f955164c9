"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.shared.broadcast import broadcast_of

from .add import sum_to

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator
    from msops.core.spec import Spec

_LIBRARY = of_package("addcmul")


def addcmul(x: Tensor, y: Tensor, z: Tensor, value: float = 1.0) -> Tensor:
    """Returns x + value y z, with NumPy's broadcasting of all three, rounded once. They are float16, float32 or
    float64, and have one dtype. There are gradients of all orders."""
    return operators.primitive(value)(x, y, z)


@Operators
def operators(value: float) -> Operator:
    attribute = settings.number("addcmul", "value", value)

    def gradient(x: Tensor, y: Tensor, z: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        scaled = dout if value == 1 else ops.mul(dout, value)
        return sum_to(dout, x), sum_to(ops.mul(scaled, z), y), sum_to(ops.mul(scaled, y), z)

    return custom_op(_LIBRARY.AddcmulForward, "x, y, z -> out", infer=_infer, gradient=gradient, value=attribute)


def _infer(x: Spec, y: Spec, z: Spec, value: float) -> Spec:
    return broadcast_of(x=x, y=y, z=z)
