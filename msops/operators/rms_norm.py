from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.compiled import Operators
from msops.core.factory import custom_op
from msops.core.inputs import widened
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "rms_norm"
_LIBRARY = of_package(_NAME)
CASTINGS = ("llama", "gemma", "none")  # in the order of Casting in aot_kernels/shared/norm/rms_norm.h


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    r"""Scales each row to a root mean square of 1, then each column by its weight.

    .. math::
        y_j = \hat{x}_j\, (w_j + \text{offset}), \qquad \hat{x}_j = x_j r, \qquad
        r = \frac{1}{\sqrt{\frac{1}{C} \sum_{i=1}^{C} x_i^2 + \text{eps}}}

    Rows run along the last axis. Statistics are in float32, or float64 beside float64; `casting` says what else is
    rounded to the dtype of `x`. Gradients are computed in float32 or float64 in any case, and rounded once.

    Args:
        x (Tensor): Shape (..., C); float16, float32 or float64.
        weight (Tensor): Shape (C,); the dtype of `x`, or float32, or float16 beside float32. Default: ``None`` ,
            :math:`y = \hat{x}` .
        eps (float): At least 0; for float16 and float32 a number that float32 holds. Default: ``1e-6`` .
        offset (float): What is added to the weight, likewise. Default: ``0.0`` .
        casting (str): For float16, ``"llama"`` : :math:`\hat{x}` is rounded, and multiplied in float16 by the rounded
            :math:`w + \text{offset}` . ``"gemma"`` : all products are in float32, and y is rounded. ``"none"`` : as
            ``"llama"`` , and the mean, its sum with eps, and r are rounded, too; only the sum of squares is in float32.
            Default: ``"llama"`` .

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If `x` or `weight` is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If `x` has no axes, `weight` has another shape, or another argument is out of range.

    Source:
        Zhang and Sennrich, "Root mean square layer normalization", 2019.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[3.0, 4.0], [0.0, 5.0]], mindspore.float32)
        >>> print(msops.rms_norm(x, mindspore.Tensor([1.0, 2.0], mindspore.float32)).asnumpy().round(3))
        [[0.849 2.263]
         [0.    2.828]]
    """
    normalize = operators.primitive(eps, offset, casting, weight is not None)
    if weight is None:
        return normalize(x)
    return normalize(x, widened(weight, x))


class RMSNorm(nn.Cell):
    r"""RMSNorm with its weight. See :func:`msops.rms_norm`.

    Args:
        hidden_size (int): C, the length of the last axis.
        eps (float): As in the function. Default: ``1e-6`` .
        offset (float): As in the function. The weight begins as 1 - offset. Default: ``0.0`` .
        casting (str): As in the function. Default: ``"llama"`` .
        has_weight (bool): Whether there is a weight. Default: ``True`` .
        dtype (mindspore.dtype): The weight's dtype: float16, float32 or float64. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (C,), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.RMSNorm(64)
        >>> print(net(ops.ones((8, 16, 64), mindspore.float16)).dtype)
        Float16
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting: str = "llama",
        has_weight: bool = True,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "RMSNorm"
        super().__init__()
        self.hidden_size = settings.positive(name, "hidden_size", hidden_size)
        self.eps, self.offset, self.casting = eps, offset, casting
        self.has_weight = settings.boolean(name, "has_weight", has_weight)
        self.forward_op = operators.primitive(eps, offset, casting, self.has_weight)
        self.weight = None
        if self.has_weight:
            self.weight = settings.parameter(name, "weight", 1 - offset, (self.hidden_size,), dtype)

    def construct(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return self.forward_op(x)
        return self.forward_op(x, widened(self.weight, x))

    construct.__doc__ = rms_norm.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "eps", "offset", "casting", "has_weight")


@Operators
def operators(eps: float, offset: float, casting: str) -> Operator:
    eps, offset = settings.number(_NAME, "eps", eps, 0), settings.number(_NAME, "offset", offset)
    backward = custom_op(
        _LIBRARY.RmsNormBackward,
        "x(*S, C), weight(C, dtype=common|float32)?, dy(*S, C) -> dx, dweight(C, dtype=weight)?; partial",
        gradient=second_gradient(eps, offset),
        eps=eps,
        offset=offset,
    )
    return custom_op(
        _LIBRARY.RmsNormForward,
        "x(*S, C), weight(C, dtype=common|float32)? -> y",
        gradient=backward,
        eps=eps,
        offset=offset,
        casting=settings.one_of(_NAME, "casting", casting, CASTINGS),
    )


def second_gradient(eps: float, offset: float) -> Operator:
    """Returns the operator of the gradient of the gradient."""
    return custom_op(
        _LIBRARY.RmsNormBackwardBackward,
        "x(*S, C), weight(C, dtype=common|float32)?, dy(*S, C), ddx(*S, C), ddweight(C, dtype=weight)? -> "
        "dx, dweight(C, dtype=weight)?, ddy; partial",
        eps=eps,
        offset=offset,
    )
