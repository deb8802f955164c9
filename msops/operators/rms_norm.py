from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present, widened
from msops.shared.rms_norm import (
    CASTINGS,
    GRADIENTS,
    LIBRARY,
    PARAMETERS,
    check_heads,
    second_gradient,
    set_up,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "rms_norm"


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    bias: Tensor | None = None,
) -> Tensor:
    r"""Scales each row to a root mean square of 1, then each column by its weight, and adds a bias.

    .. math::
        y_j = \hat{x}_j\, (w_j + \text{offset}) + b_j, \qquad \hat{x}_j = x_j r, \qquad
        r = \frac{1}{\sqrt{\frac{1}{C} \sum_{i=1}^{C} x_i^2 + \text{eps}}}

    Rows run along the last axis. Statistics are in float32, or float64 beside float64; `casting` says what else is
    rounded to the dtype of `x`. Gradients are computed in float32 or float64 in any case, and rounded once. The squares
    of float32 numbers beyond 1.8e19 are infinite: such a row becomes 0.

    Args:
        x (Tensor): Shape (..., C); float16, float32 or float64.
        weight (Tensor): Shape (C,) or, for each head of `x` (..., H, C), shape (H, C); the dtype of `x`, or float32, or
            float16 beside float32. Default: ``None`` , a factor of 1.
        eps (float): At least 0; for float16 and float32 a number that float32 holds. Default: ``1e-6`` .
        offset (float): What is added to the weight, likewise. Default: ``0.0`` .
        casting (str): For float16, ``"llama"`` : :math:`\hat{x}` is rounded, and multiplied in float16 by the rounded
            :math:`w + \text{offset}` ; the rounded product is added to the rounded bias. ``"gemma"`` : all is in
            float32, and y is rounded. ``"none"`` : as ``"llama"`` , and the mean, its sum with eps, and r are rounded,
            too; only the sum of squares is in float32. Default: ``"llama"`` .
        bias (Tensor): The shape of `weight`, or, without a weight, (C,) or (H, C); its dtypes are those of `weight`.
            Default: ``None`` , no bias.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If `x` has no axes, `weight` or `bias` has another shape, or another argument is out of range.

    Source:
        Zhang and Sennrich, "Root mean square layer normalization", 2019.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[3.0, 4.0], [0.0, 5.0]], mindspore.float32)
        >>> print(msops.rms_norm(x, mindspore.Tensor([1.0, 2.0], mindspore.float32)).asnumpy().round(3))
        [[0.849 2.263]
         [0.    2.828]]
    """
    normalize = operators.primitive(eps, offset, casting, weight is not None, bias is not None)
    return normalize(x, *present((widened(weight, x), widened(bias, x))))


class RMSNorm(nn.Cell):
    r"""RMSNorm with its parameters. See :func:`msops.rms_norm`.

    Args:
        hidden_size (int, tuple[int]): The shape of the parameters: C, the length of the last axis, or (H, C).
        eps (float): As in the function. Default: ``1e-6`` .
        offset (float): As in the function. The weight begins as 1 - offset. Default: ``0.0`` .
        casting (str): As in the function. Default: ``"llama"`` .
        has_weight (bool): Whether there is a weight. Default: ``True`` .
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Default: ``mindspore.float32`` .
        has_bias (bool): Whether there is a bias, which begins as 0. Default: ``False`` .

    Attributes:
        weight (Parameter): Shape (C,) or (H, C), or None.
        bias (Parameter): The shape of the weight, or None.

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
        hidden_size: int | Sequence[int],
        eps: float = 1e-6,
        offset: float = 0.0,
        casting: str = "llama",
        has_weight: bool = True,
        dtype: mindspore.Type = mindspore.float32,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        set_up(self, "RMSNorm", operators, hidden_size, (eps, offset, casting), has_weight, has_bias, dtype)

    def construct(self, x: Tensor) -> Tensor:
        return self.forward_op(x, *present((widened(self.weight, x), widened(self.bias, x))))

    construct.__doc__ = rms_norm.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "eps", "offset", "casting", "has_weight", "has_bias")


@Operators
def operators(eps: float, offset: float, casting: str) -> Operator:
    eps, offset = settings.number(_NAME, "eps", eps, 0), settings.number(_NAME, "offset", offset)
    backward = custom_op(
        LIBRARY.RmsNormBackward,
        f"x(*S, C), {PARAMETERS}, dy(*S, C) -> dx, {GRADIENTS}; partial",
        gradient=second_gradient(eps, offset),
        eps=eps,
        offset=offset,
    )
    return custom_op(
        LIBRARY.RmsNormForward,
        f"x(*S, C), {PARAMETERS} -> y",
        infer=_infer,
        gradient=backward,
        eps=eps,
        offset=offset,
        casting=settings.one_of(_NAME, "casting", casting, CASTINGS),
    )


def _infer(x: Spec, weight: Spec | None, bias: Spec | None, **attributes: float) -> Spec:
    check_heads(x, weight, bias)
    return x
