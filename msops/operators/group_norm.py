from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "group_norm"
_LIBRARY = of_package(_NAME)
_LAYOUTS = ("NCHW", "NHWC")


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    layout: str = "NCHW",
) -> Tensor:
    r"""Scales groups of channels to mean 0 and variance 1, then each channel by its weight, and adds a bias.

    .. math::
        y_i = a\left(\frac{x_i - \mu}{\sqrt{\frac{1}{n} \sum_{j=1}^{n} (x_j - \mu)^2 + \text{eps}}}\, w_c + b_c\right),
        \qquad \mu = \frac{1}{n} \sum_{j=1}^{n} x_j

    The sums are over a group: the elements of a sample in :math:`C / \text{num\_groups}` neighbouring channels. The
    activation `a` is :func:`msops.silu`, as in diffusion models, or does nothing. All is computed in float32, or
    float64 beside float64, and rounded once. For float32 numbers beyond 1.8e19 the same holds as in
    :func:`msops.layer_norm` .

    Args:
        x (Tensor): Shape (N, C, ...), or (N, ..., C) for layout ``"NHWC"`` , of any rank from 2 on; float16, float32 or
            float64.
        num_groups (int): A divisor of C.
        weight (Tensor): Shape (C,); the dtype of `x`, or float32. Default: ``None`` , a factor of 1.
        bias (Tensor): Shape (C,); the dtype of `x`, or float32. Default: ``None`` , no bias.
        eps (float): At least 0; for float16 and float32 a number that float32 holds. Default: ``1e-5`` .
        activation (str): ``"silu"`` or ``None`` . Default: ``None`` .
        layout (str): ``"NCHW"`` for channels in axis 1, ``"NHWC"`` for channels in the last axis.
            Default: ``"NCHW"`` .

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If an input has another shape, `num_groups` does not divide C, or a setting is out of range.

    Source:
        Wu and He, "Group normalization", 2018.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[[1.0, 3.0], [1.0, 3.0], [0.0, 8.0], [8.0, 0.0]]], mindspore.float32)
        >>> print(msops.group_norm(x, 2, eps=0.0))
        [[[-1.  1.]
          [-1.  1.]
          [-1.  1.]
          [ 1. -1.]]]
    """
    normalize = operators.primitive(num_groups, eps, activation, layout, weight is not None, bias is not None)
    return normalize(x, *present((weight, bias)))[0]


class GroupNorm(nn.Cell):
    r"""Group normalization with its parameters. See :func:`msops.group_norm`.

    It loads the checkpoints of ``nn.GroupNorm`` .

    Args:
        num_groups (int): A divisor of `num_channels`.
        num_channels (int): The channels of the input.
        eps (float): As in the function. Default: ``1e-5`` .
        affine (bool): Whether the parameters are trained. Default: ``True`` .
        activation (str): As in the function. Default: ``None`` .
        layout (str): As in the function. Default: ``"NCHW"`` .
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Parameters of a dtype other than
            float32 are cast to the dtype of the input. Default: ``mindspore.float32`` .

    Attributes:
        gamma (Parameter): The weight.
        beta (Parameter): The bias.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or `num_groups` does not divide `num_channels`.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.GroupNorm(8, 64, activation="silu")
        >>> print(net(ops.ones((2, 64, 16, 16))).shape)
        (2, 64, 16, 16)
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = None,
        layout: str = "NCHW",
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "GroupNorm"
        super().__init__()
        self.num_groups = settings.positive(name, "num_groups", num_groups)
        self.num_channels = settings.positive(name, "num_channels", num_channels)
        if num_channels % num_groups:
            raise ValueError(f"{name}: num_groups must divide num_channels, {num_channels}, got {num_groups}")
        self.eps, self.affine = eps, settings.boolean(name, "affine", affine)
        self.activation, self.layout, self.dtype = activation, layout, dtype
        self.forward_op = operators.primitive(num_groups, eps, activation, layout, True, True)
        self.gamma = settings.parameter(name, "gamma", "ones", (num_channels,), dtype)
        self.beta = settings.parameter(name, "beta", "zeros", (num_channels,), dtype)
        self.gamma.requires_grad = self.beta.requires_grad = self.affine

    def construct(self, x: Tensor) -> Tensor:
        normalize, gamma, beta = self.forward_op, self.gamma, self.beta
        if self.dtype not in (mindspore.float32, x.dtype):
            return normalize(x, gamma.astype(x.dtype), beta.astype(x.dtype))[0]
        return normalize(x, gamma, beta)[0]

    construct.__doc__ = group_norm.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "num_groups", "num_channels", "eps", "affine", "activation", "layout")


@Operators
def operators(num_groups: int, eps: float, activation: str | None, layout: str) -> Operator:
    if activation not in (None, "silu"):
        raise ValueError(f"{_NAME}: activation must be None or 'silu', got {activation!r}")
    of_parameter = "(..., dtype=common|float32)?"
    attributes: dict[str, Any] = dict(
        num_groups=settings.positive(_NAME, "num_groups", num_groups),
        eps=settings.number(_NAME, "eps", eps, 0),
        silu=int(activation == "silu"),
        channels_last=settings.one_of(_NAME, "layout", layout, _LAYOUTS),
    )
    backward = custom_op(
        _LIBRARY.GroupNormBackward,
        f"x, weight{of_parameter}, bias{of_parameter}, dy -> dx, dweight?, dbias?; partial",
        infer=_infer_backward,
        **attributes,
    )
    return custom_op(
        _LIBRARY.GroupNormForward,
        f"x, weight{of_parameter}, bias{of_parameter} -> y; partial",
        infer=_infer,
        gradient=backward,
        **attributes,
    )


def _infer(x: Spec, weight: Spec | None, bias: Spec | None, num_groups: int, channels_last: int, **_: float) -> Spec:
    _require(x, weight, bias, num_groups, channels_last)
    return x


def _infer_backward(
    x: Spec, weight: Spec | None, bias: Spec | None, dy: Spec, num_groups: int, channels_last: int, **_: float
) -> list[Spec]:
    _require(x, weight, bias, num_groups, channels_last)
    if dy.shape != x.shape:
        raise ValueError(f"dy must have shape {x.shape} as x has, got {dy.shape}")
    return [x, weight or x, bias or x]


def _require(x: Spec, weight: Spec | None, bias: Spec | None, num_groups: int, channels_last: int) -> None:
    if len(x.shape) < 2:
        raise ValueError(f"x must have at least two axes, got shape {x.shape}")
    channels = x.shape[-1 if channels_last else 1]
    if channels % num_groups:
        raise ValueError(f"num_groups must divide the {channels} channels of x, got {num_groups}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != (channels,):
            raise ValueError(f"{name} must have shape {(channels,)}, one for each channel of x, got {parameter.shape}")
