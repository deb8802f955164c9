"""Has what RMSNorm has in common with and without the sum of a residual: signatures, checks and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msops.core import settings
from msops.core.factory import custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mindspore
    from mindspore import nn

    from msops.core.factory import Operators
    from msops.core.operator import Operator
    from msops.core.spec import Spec

LIBRARY = of_package("rms_norm")
CASTINGS = ("llama", "gemma", "none")  # in the order of Casting in aot_kernels/shared/norm/rms_norm.h
_WEIGHT, _DWEIGHT = "weight(*H, C, dtype=common|float32)?", "dweight(*H, C, dtype=weight)?"
PARAMETERS = f"{_WEIGHT}, bias(*H, C, dtype=common|float32)?"  # *H stands for no axis or one
GRADIENTS = f"{_DWEIGHT}, dbias(*H, C, dtype=bias)?"


def check_heads(x: Spec, weight: Spec | None, bias: Spec | None) -> None:
    """Requires parameters to have the last axis of x, as the signature says, or the last two."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter and parameter.shape not in (x.shape[-1:], x.shape[-2:]):
            raise ValueError(
                f"{name} must have the last axis of x, whose shape is {x.shape}, or the last two, got {parameter.shape}"
            )


def second_gradient(eps: float, offset: float) -> Operator:
    """Returns the operator of the gradient of the gradient."""
    return custom_op(
        LIBRARY.RmsNormBackwardBackward,
        f"x(*S, C), {_WEIGHT}, dy(*S, C), ddx(*S, C), ddweight(*H, C, dtype=weight)?, "
        f"ddbias(*H, C, dtype=common|float32)? -> dx, {_DWEIGHT}, ddy; partial",
        eps=eps,
        offset=offset,
    )


def set_up(
    cell: nn.Cell,
    name: str,
    operators: Operators,
    hidden_size: int | Sequence[int],
    of_settings: tuple[float, float, str],
    has_weight: bool,
    has_bias: bool,
    dtype: mindspore.Type,
) -> None:
    """Gives a Cell its arguments, its operator and its Parameters; `of_settings` are eps, offset and casting."""
    shape = settings.numbers(name, "hidden_size", hidden_size, (1, 2), 1)
    cell.hidden_size, (cell.eps, cell.offset, cell.casting) = hidden_size, of_settings
    cell.has_weight = settings.boolean(name, "has_weight", has_weight)
    cell.has_bias = settings.boolean(name, "has_bias", has_bias)
    cell.forward_op = operators.primitive(*of_settings, cell.has_weight, cell.has_bias)
    cell.weight = settings.parameter(name, "weight", 1 - cell.offset, shape, dtype) if has_weight else None
    cell.bias = settings.parameter(name, "bias", 0, shape, dtype) if has_bias else None
