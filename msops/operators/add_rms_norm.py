from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.compiled import Operators
from msops.core.factory import custom_op
from msops.core.inputs import cast_as, widened
from msops.core.library import of_package
from msops.operators.rms_norm import CASTINGS, second_gradient

if TYPE_CHECKING:
    from msops.core.operator import Operator

    Pair = tuple[Tensor, Tensor]

_NAME = "add_rms_norm"
_LIBRARY = of_package(_NAME)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual, then scales each row to a root mean square of 1 and each column by its weight.

    .. math:: s = x + \text{residual}, \qquad y = \text{rms\_norm}(s, w)

    The sum is rounded to the dtype of `x` first: that is what :func:`msops.rms_norm` reads.

    Args:
        x (Tensor): Shape (..., C); float16, float32 or float64.
        residual (Tensor): The shape of `x`; the dtype of `x`, or float32, or float16 beside float32. Its gradient is
            that of `x`, in its own dtype.
        weight (Tensor): Shape (C,); the dtype of `x`, or float32, or float16 beside float32. Default: ``None`` , a
            factor of 1.
        eps (float): As in `rms_norm`. Default: ``1e-6`` .
        offset (float): As in `rms_norm`. Default: ``0.0`` .
        casting (str): As in `rms_norm`. Default: ``"llama"`` .

    Returns:
        tuple[Tensor, Tensor], y and s, each of the shape and dtype of `x`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If an input has another shape, or another argument is out of range.

    Source:
        Zhang and Sennrich, "Root mean square layer normalization", 2019.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[1.0, 5.0]], mindspore.float32)
        >>> y, s = msops.add_rms_norm(x, mindspore.Tensor([[2.0, -1.0]], mindspore.float32))
        >>> print(y.asnumpy().round(3), s)
        [[0.849 1.131]] [[3. 4.]]
    """
    normalize = operators.primitive(eps, offset, casting, weight is not None)
    if weight is None:
        return normalize(x, widened(residual, x))
    return normalize(x, widened(residual, x), widened(weight, x))


class AddRMSNorm(nn.Cell):
    r"""The sum with a residual, and its RMSNorm with a weight. See :func:`msops.add_rms_norm`.

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
        >>> net, x = msops.AddRMSNorm(64), ops.ones((8, 16, 64))
        >>> y, s = net(x, 2 * x)
        >>> print(s[0, 0, 0])
        3.0
    """

    # It does not inherit from RMSNorm: for level O1, MindSpore would give both classes one name in its copy.
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting: str = "llama",
        has_weight: bool = True,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "AddRMSNorm"
        super().__init__()
        self.hidden_size = settings.positive(name, "hidden_size", hidden_size)
        self.eps, self.offset, self.casting = eps, offset, casting
        self.has_weight = settings.boolean(name, "has_weight", has_weight)
        self.forward_op = operators.primitive(eps, offset, casting, self.has_weight)
        self.weight = None
        if self.has_weight:
            self.weight = settings.parameter(name, "weight", 1 - offset, (self.hidden_size,), dtype)

    def construct(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is None:
            return self.forward_op(x, widened(residual, x))
        return self.forward_op(x, widened(residual, x), widened(self.weight, x))

    construct.__doc__ = add_rms_norm.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "eps", "offset", "casting", "has_weight")


@Operators
def backward_operators(eps: float, offset: float) -> Operator:
    second = second_gradient(eps, offset)
    second_without_weight = second.without("weight", "dweight", "ddweight")

    def gradient_of_backward(
        s: Tensor, weight: Tensor | None, dy: Tensor, ds: Tensor, out: tuple[Tensor, ...], douts: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradient is that of rms_norm plus ds, in which it is linear."""
        ddx, ddweight = douts
        if weight is None:
            of_s, ddy = second_without_weight(s, dy, ddx)
            return of_s, None, ddy, ddx
        of_s, dweight, ddy = second(s, weight, dy, ddx, ddweight)
        return of_s, dweight, ddy, ddx

    return custom_op(
        _LIBRARY.AddRmsNormBackward,
        "s(*S, C), weight(C, dtype=common|float32)?, dy(*S, C), ds(*S, C) -> dx, dweight(C, dtype=weight)?; partial",
        gradient=gradient_of_backward,
        eps=eps,
        offset=offset,
    )


@Operators
def operators(eps: float, offset: float, casting: str) -> Operator:
    eps, offset = settings.number(_NAME, "eps", eps, 0), settings.number(_NAME, "offset", offset)
    backward = backward_operators(eps, offset)
    backward_without_weight = backward.without("weight", "dweight")

    def gradient(
        x: Tensor, residual: Tensor, weight: Tensor | None, out: Pair, douts: Pair
    ) -> tuple[Tensor | None, ...]:
        """Gives x and the residual one gradient."""
        (_, s), (dy, ds) = out, douts
        if weight is None:
            dx = backward_without_weight(s, dy, ds)
            return dx, cast_as(dx, residual), None
        dx, dweight = backward(s, weight, dy, ds)
        return dx, cast_as(dx, residual), dweight

    return custom_op(
        _LIBRARY.AddRmsNormForward,
        "x(*S, C), residual(*S, C, dtype=common|float32), weight(C, dtype=common|float32)? -> y(*S, C), s(*S, C)",
        gradient=gradient,
        eps=eps,
        offset=offset,
        casting=settings.one_of(_NAME, "casting", casting, CASTINGS),
    )
