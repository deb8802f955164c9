from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as, present, widened
from msops.core.library import of_package
from msops.shared.rms_norm import CASTINGS, GRADIENTS, PARAMETERS, check_heads, second_gradient, set_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msops.core.operator import Operator
    from msops.core.spec import Spec

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
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual, then scales each row to a root mean square of 1 and each column by its weight, and adds a bias.

    .. math:: s = x + \text{residual}, \qquad y = \text{rms\_norm}(s, w, b)

    The sum is rounded to the dtype of `x` first: that is what :func:`msops.rms_norm` reads, with its range.

    Args:
        x (Tensor): Shape (..., C); float16, float32 or float64.
        residual (Tensor): The shape of `x`; the dtype of `x`, or float32, or float16 beside float32. Its gradient is
            that of `x`, in its own dtype.
        weight (Tensor): As in `rms_norm`, of shape (C,) or (H, C). Default: ``None`` , a factor of 1.
        eps (float): As in `rms_norm`. Default: ``1e-6`` .
        offset (float): As in `rms_norm`. Default: ``0.0`` .
        casting (str): As in `rms_norm`. Default: ``"llama"`` .
        bias (Tensor): As in `rms_norm`. Default: ``None`` , no bias.

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
    normalize = operators.primitive(eps, offset, casting, weight is not None, bias is not None)
    return normalize(x, widened(residual, x), *present((widened(weight, x), widened(bias, x))))


class AddRMSNorm(nn.Cell):
    r"""The sum with a residual, and its RMSNorm with its parameters. See :func:`msops.add_rms_norm`.

    Arguments, attributes and errors are those of :class:`msops.RMSNorm`.

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
        hidden_size: int | Sequence[int],
        eps: float = 1e-6,
        offset: float = 0.0,
        casting: str = "llama",
        has_weight: bool = True,
        dtype: mindspore.Type = mindspore.float32,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        set_up(self, "AddRMSNorm", operators, hidden_size, (eps, offset, casting), has_weight, has_bias, dtype)

    def construct(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        parameters = present((widened(self.weight, x), widened(self.bias, x)))
        return self.forward_op(x, widened(residual, x), *parameters)

    construct.__doc__ = add_rms_norm.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "eps", "offset", "casting", "has_weight", "has_bias")


@Operators
def backward_operators(eps: float, offset: float) -> Operator:
    second = second_gradient(eps, offset)
    second_without_weight = second.without("weight", "dweight", "ddweight")

    def gradient_of_backward(
        s: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dy: Tensor,
        ds: Tensor,
        out: tuple[Tensor, ...],
        douts: tuple[Tensor, ...],
    ) -> tuple[Tensor | None, ...]:
        """The gradient is that of rms_norm plus ds, in which it is linear."""
        ddx, ddweight, ddbias = douts
        dbias = None if bias is None else ops.zeros_like(bias)
        if weight is None:
            of_s, ddy = second_without_weight(s, dy, ddx, ddbias)
            return of_s, None, dbias, ddy, ddx
        of_s, dweight, ddy = second(s, weight, dy, ddx, ddweight, ddbias)
        return of_s, dweight, dbias, ddy, ddx

    return custom_op(
        _LIBRARY.AddRmsNormBackward,
        f"s(*S, C), {PARAMETERS}, dy(*S, C), ds(*S, C) -> dx, {GRADIENTS}; partial",
        gradient=gradient_of_backward,
        eps=eps,
        offset=offset,
    )


@Operators
def operators(eps: float, offset: float, casting: str) -> Operator:
    eps, offset = settings.number(_NAME, "eps", eps, 0), settings.number(_NAME, "offset", offset)
    backward = backward_operators(eps, offset)
    of_weight, of_bias = backward.without("bias", "dbias"), backward.without("weight", "dweight")
    of_none = of_bias.without("bias", "dbias")

    def gradient(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, out: Pair, douts: Pair
    ) -> tuple[Tensor | None, ...]:
        """Gives x and the residual one gradient."""
        (_, s), (dy, ds) = out, douts
        dweight = dbias = None
        if weight is None and bias is None:
            dx = of_none(s, dy, ds)
        elif bias is None:
            dx, dweight = of_weight(s, weight, dy, ds)
        elif weight is None:
            dx, dbias = of_bias(s, bias, dy, ds)
        else:
            dx, dweight, dbias = backward(s, weight, bias, dy, ds)
        return dx, cast_as(dx, residual), dweight, dbias

    return custom_op(
        _LIBRARY.AddRmsNormForward,
        f"x(*S, C), residual(*S, C, dtype=common|float32), {PARAMETERS} -> y, s",
        infer=_infer,
        gradient=gradient,
        eps=eps,
        offset=offset,
        casting=settings.one_of(_NAME, "casting", casting, CASTINGS),
    )


def _infer(x: Spec, residual: Spec, weight: Spec | None, bias: Spec | None, **attributes: float) -> list[Spec]:
    check_heads(x, weight, bias)
    return [x, x]
