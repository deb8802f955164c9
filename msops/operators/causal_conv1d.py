from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn
from mindspore.common.initializer import Uniform

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import describe, present, spec_of, widened
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.inputs import Description
    from msops.core.operator import Operator

_NAME = "causal_conv1d"
_LIBRARY = of_package(_NAME)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Convolves each channel of a sequence with its own weights, which see the step itself and those before it.

    .. math::
        \text{out}_{b,d,t} = a\left(\text{bias}_d + \sum_{w=0}^{W-1} \text{weight}_{d,w}\, x_{b,d,\,t-W+1+w}\right)

    This is the short convolution of Mamba and other recurrent layers. Before the first step, `x` is `initial_state`,
    whose last element is the step before the first; without it, zeros. The activation `a` is :func:`msops.silu`, or
    does nothing. The final state is the last W - 1 steps of `initial_state` and `x`: a sequence may be cut anywhere,
    and the second call takes the final state of the first. Sums are in float32, or in float64 beside float64, and
    rounded once. All inputs have gradients, of first order, also through the final state; results do not vary from run
    to run.

    Args:
        x (Tensor): Shape (B, D, L): B sequences of L steps with D channels, any L; float16, float32 or float64.
        weight (Tensor): Shape (D, W), any W from 1 on; the dtype of `x`, or float32, or float16 beside float32.
        bias (Tensor): Shape (D,); its dtypes are those of `weight`. Default: ``None`` , no bias.
        initial_state (Tensor): Shape (B, D, W - 1), the dtype of `x`. Default: ``None`` , zeros.
        activation (str): ``"silu"`` or ``None`` . Default: ``None`` .
        return_final_state (bool): Whether to return the final state, too. Default: ``False`` .

    Returns:
        Tensor of the shape and dtype of `x`; or, with `return_final_state`, a tuple of it and the final state, a Tensor
        of shape (B, D, W - 1) and the dtype of `x`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or `return_final_state` is not a bool.
        ValueError: If an input has another shape, or `activation` is something else.

    Source:
        Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces", 2023.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[[1.0, 2.0, 3.0]]], mindspore.float32)
        >>> weight = mindspore.Tensor([[100.0, 10.0, 1.0]], mindspore.float32)
        >>> print(msops.causal_conv1d(x, weight))
        [[[  1.  12. 123.]]]
        >>> out, state = msops.causal_conv1d(x, weight, return_final_state=True)
        >>> print(state)
        [[[2. 3.]]]
        >>> print(msops.causal_conv1d(x + 3, weight, initial_state=state))
        [[[234. 345. 456.]]]
    """
    settings.boolean(_NAME, "return_final_state", return_final_state)
    _check_width(describe(weight))
    convolve = operators.primitive(activation, bias is not None, initial_state is not None)
    return _chosen(convolve(x, *present((widened(weight, x), widened(bias, x), initial_state))), return_final_state)


class CausalConv1d(nn.Cell):
    r"""A causal convolution with its parameters. See :func:`msops.causal_conv1d`.

    Args:
        channels (int): D, the channels of the input.
        width (int): W, the number of steps that a result sees, at least 1.
        has_bias (bool): Whether there is a bias. Default: ``True`` .
        activation (str): As in the function. Default: ``None`` .
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``None`` , uniform in
            :math:`\pm 1 / \sqrt{W}` .
        bias_init (Tensor, str, Initializer, number): The initial bias. Default: ``None`` , likewise.
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Default: ``mindspore.float32`` .
        return_final_state (bool): As in the function. Default: ``False`` .

    Inputs:
        - **x** (Tensor) - Shape (B, D, L).
        - **initial_state** (Tensor) - Shape (B, D, W - 1). Default: ``None`` .

    Attributes:
        weight (Parameter): Shape (D, W).
        bias (Parameter): Shape (D,), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.CausalConv1d(16, 4, activation="silu", return_final_state=True)
        >>> out, state = net(ops.ones((2, 16, 100)))
        >>> print(out.shape, state.shape)
        (2, 16, 100) (2, 16, 3)
    """

    def __init__(
        self,
        channels: int,
        width: int,
        has_bias: bool = True,
        activation: str | None = None,
        weight_init: settings.Init | None = None,
        bias_init: settings.Init | None = None,
        dtype: mindspore.Type = mindspore.float32,
        return_final_state: bool = False,
    ) -> None:
        name = "CausalConv1d"
        super().__init__()
        self.channels, self.width = (
            settings.positive(name, key, value) for key, value in (("channels", channels), ("width", width))
        )
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        self.activation = activation
        self.return_final_state = settings.boolean(name, "return_final_state", return_final_state)
        self.first_op, self.next_op = (operators.primitive(activation, self.has_bias, given) for given in (False, True))
        spread = Uniform(1 / math.sqrt(width))
        weight_init = spread if weight_init is None else weight_init
        self.weight = settings.parameter(name, "weight", weight_init, (channels, width), dtype)
        self.bias = None
        if has_bias:
            bias_init = spread if bias_init is None else bias_init
            self.bias = settings.parameter(name, "bias", bias_init, (channels,), dtype)

    def construct(self, x: Tensor, initial_state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight, bias = widened(self.weight, x), widened(self.bias, x)
        if initial_state is None:
            return _chosen(self.first_op(x, *present((weight, bias))), self.return_final_state)
        return _chosen(self.next_op(x, *present((weight, bias, initial_state))), self.return_final_state)

    construct.__doc__ = causal_conv1d.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "channels", "width", "has_bias", "activation", "return_final_state")


@once
def _check_width(weight: Description) -> None:
    """Requires a tap. All else is the operator's own check."""
    spec = spec_of(weight)
    if isinstance(spec, Spec) and len(spec.shape) == 2 and spec.shape[1] == 0:
        raise ValueError(f"{_NAME}: weight must have shape (D, W) with W of at least 1, got {spec.shape}")


def _chosen(results: tuple[Tensor, Tensor], both: bool) -> Tensor | tuple[Tensor, Tensor]:
    if both:
        return results[0], results[1]
    return results[0]


@Operators
def operators(activation: str | None) -> Operator:
    if activation not in (None, "silu"):
        raise ValueError(f"{_NAME}: activation must be None or 'silu', got {activation!r}")
    silu = int(activation == "silu")
    inputs = (
        "x(B, D, L), weight(D, W, dtype=common|float32), bias(D, dtype=common|float32)?, initial_state(B, D, W - 1)?"
    )
    backward = custom_op(
        _LIBRARY.CausalConv1dBackward,
        f"{inputs}, dout(B, D, L), dfinal_state(B, D, W - 1) -> "
        "dx(B, D, L), dweight(D, W, dtype=weight), dbias(D, dtype=bias)?, dinitial_state(B, D, W - 1)?; "
        "gradients, partial",
        silu=silu,
    )
    return custom_op(
        _LIBRARY.CausalConv1dForward,
        f"{inputs} -> out(B, D, L), final_state(B, D, W - 1)",
        gradient=backward,
        silu=silu,
    )
