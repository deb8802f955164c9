from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present, widened
from msops.core.library import of_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msops.core.operator import Operator
    from msops.core.primitive import Primitive
    from msops.core.spec import Spec

_NAME = "layer_norm"
_LIBRARY = of_package(_NAME)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Scales each row to mean 0 and variance 1, then each column by its weight, and adds a bias.

    .. math::
        y_j = \frac{x_j - \mu}{\sqrt{\frac{1}{n} \sum_{i=1}^{n} (x_i - \mu)^2 + \text{eps}}}\, w_j + b_j, \qquad
        \mu = \frac{1}{n} \sum_{i=1}^{n} x_i

    A row holds the last axes of `x`, as many as `weight` has; without a weight it is the last axis. All is computed in
    float32, or float64 beside float64, and rounded once. The squares of float32 numbers beyond 1.8e19 are infinite: a
    row of such distances from its mean becomes 0, or NaN where the sum of its numbers is infinite, too.

    Args:
        x (Tensor): Any shape of at least one axis; float16, float32 or float64.
        weight (Tensor): The last axes of `x`; the dtype of `x`, or float32, or float16 beside float32. Default:
            ``None`` , a factor of 1.
        bias (Tensor): The shape of `weight`, or of the last axis if there is no weight; its dtypes are those of
            `weight`. Default: ``None`` , no bias.
        eps (float): At least 0; for float16 and float32 a number that float32 holds. Default: ``1e-5`` .

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or `eps` is not a number.
        ValueError: If an input has another shape, or `eps` is out of range.

    Source:
        Ba, Kiros and Hinton, "Layer normalization", 2016.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[1.0, 3.0], [0.0, 8.0]], mindspore.float32)
        >>> print(msops.layer_norm(x, mindspore.Tensor([1.0, 2.0], mindspore.float32), eps=0.0))
        [[-1.  2.]
         [-1.  2.]]
    """
    normalize = operators.primitive(eps, weight is not None, bias is not None)
    return normalize(x, *present((widened(weight, x), widened(bias, x))))


class LayerNorm(nn.Cell):
    r"""Layer normalization with its parameters. See :func:`msops.layer_norm`.

    It replaces ``nn.LayerNorm`` , takes its arguments, and loads its checkpoints.

    Args:
        normalized_shape (tuple[int], list[int]): The last axes of the input.
        begin_norm_axis (int): The first of these axes, as counted from the first axis of the input or, if it is
            negative, from the end. Default: ``-1`` .
        begin_params_axis (int): The same axis as `begin_norm_axis`, counted in either way. Default: ``-1`` .
        gamma_init (Tensor, str, Initializer, number): The initial weight. Default: ``"ones"`` .
        beta_init (Tensor, str, Initializer, number): The initial bias. Default: ``"zeros"`` .
        epsilon (float): What the function calls eps. Default: ``1e-7`` .
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Parameters of a dtype other than
            float32 are cast to the dtype of the input. Default: ``mindspore.float32`` .

    Attributes:
        gamma (Parameter): The weight.
        beta (Parameter): The bias.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or does not fit `normalized_shape` or the input.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.LayerNorm((16, 64), begin_norm_axis=1, begin_params_axis=1)
        >>> print(net(ops.ones((8, 16, 64))).shape)
        (8, 16, 64)
    """

    def __init__(
        self,
        normalized_shape: Sequence[int],
        begin_norm_axis: int = -1,
        begin_params_axis: int = -1,
        gamma_init: settings.Init = "ones",
        beta_init: settings.Init = "zeros",
        epsilon: float = 1e-7,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "LayerNorm"
        super().__init__()
        if not isinstance(normalized_shape, (tuple, list)):
            raise TypeError(f"{name}: normalized_shape must be a tuple or a list, got {normalized_shape!r}")
        if not normalized_shape:
            raise ValueError(f"{name}: normalized_shape must have at least one axis, got {normalized_shape!r}")
        shape = settings.numbers(name, "normalized_shape", normalized_shape, (len(normalized_shape),), 1)
        for what, axis in (("begin_norm_axis", begin_norm_axis), ("begin_params_axis", begin_params_axis)):
            if settings.integer(name, what, axis) < 0 and axis != -len(shape):
                raise ValueError(f"{name}: {what} must be {-len(shape)} for normalized_shape {shape}, got {axis}")
        if begin_norm_axis != begin_params_axis and min(begin_norm_axis, begin_params_axis) >= 0:
            raise ValueError(
                f"{name}: begin_params_axis must be begin_norm_axis, {begin_norm_axis}, got {begin_params_axis}"
            )
        self.normalized_shape, self.epsilon, self.dtype = shape, epsilon, dtype
        self.begin_norm_axis, self.begin_params_axis = begin_norm_axis, begin_params_axis
        self.forward_op = operators.primitive(epsilon, True, True)
        self.gamma = settings.parameter(name, "gamma", gamma_init, shape, dtype)
        self.beta = settings.parameter(name, "beta", beta_init, shape, dtype)

    def construct(self, x: Tensor) -> Tensor:
        normalize, gamma, beta = self.forward_op, self.gamma, self.beta
        if self.begin_norm_axis >= 0 or self.begin_params_axis >= 0:
            normalize = _checked(normalize, x.ndim, self.begin_norm_axis, self.begin_params_axis, self.normalized_shape)
        if self.dtype not in (mindspore.float32, x.dtype):
            return normalize(x, gamma.astype(x.dtype), beta.astype(x.dtype))
        return normalize(x, gamma, beta)

    construct.__doc__ = layer_norm.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "normalized_shape", "begin_norm_axis", "begin_params_axis", "epsilon")


@once
def _checked(normalize: Primitive, rank: int, begin: int, begin_params: int, shape: tuple[int, ...]) -> Primitive:
    """Requires the axes of an input, from each place on that is counted from the first axis, to be those of `shape`."""
    for name, axis in (("begin_norm_axis", begin), ("begin_params_axis", begin_params)):
        if axis >= 0 and rank - axis != len(shape):
            raise ValueError(
                f"LayerNorm: {name} must be {rank - len(shape)} for an input of {rank} axes and normalized_shape "
                f"{shape}, got {axis}"
            )
    return normalize


_PARAMETER = "(..., dtype=common|float32)?"


@Operators
def backward_operators(eps: float) -> Operator:
    backward_backward = custom_op(
        _LIBRARY.LayerNormBackwardBackward,
        f"x, weight{_PARAMETER}, dy, ddx, ddweight{_PARAMETER}, ddbias{_PARAMETER} -> dx, dweight?, ddy; partial",
        infer=_infer_backward_backward,
        eps=eps,
    )
    return custom_op(
        _LIBRARY.LayerNormBackward,
        f"x, weight{_PARAMETER}, bias{_PARAMETER}, dy -> dx, dweight?, dbias?; partial",
        infer=_infer_backward,
        gradient=backward_backward,
        eps=eps,
    )


@Operators
def operators(eps: float) -> Operator:
    eps = settings.number(_NAME, "eps", eps, 0)
    return custom_op(
        _LIBRARY.LayerNormForward,
        f"x, weight{_PARAMETER}, bias{_PARAMETER} -> y",
        infer=infer,
        gradient=backward_operators(eps),
        eps=eps,
    )


def infer(x: Spec, weight: Spec | None, bias: Spec | None, eps: float) -> Spec:
    if not x.shape:
        raise ValueError("x must have at least one axis, got shape ()")
    if weight is None:
        if bias is not None and bias.shape != x.shape[-1:]:
            raise ValueError(f"bias must have shape {x.shape[-1:]} without a weight, got {bias.shape}")
        return x
    if not weight.shape or weight.shape != x.shape[-len(weight.shape) :]:
        raise ValueError(f"weight must have the last axes of x, whose shape is {x.shape}, got {weight.shape}")
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"bias must have shape {weight.shape} as weight has, got {bias.shape}")
    return x


def _infer_backward(x: Spec, weight: Spec | None, bias: Spec | None, dy: Spec, eps: float) -> list[Spec]:
    infer(x, weight, bias, eps)
    _require_shape_of(x, dy=dy)
    return [x, weight or x, bias or x]


def _infer_backward_backward(
    x: Spec, weight: Spec | None, dy: Spec, ddx: Spec, ddweight: Spec | None, ddbias: Spec | None, eps: float
) -> list[Spec]:
    infer(x, weight, ddbias, eps)
    _require_shape_of(x, dy=dy, ddx=ddx)
    if weight is not None and ddweight != weight:
        raise ValueError(f"ddweight must be {weight.dtype} of shape {weight.shape} as weight is, got {ddweight}")
    return [x, weight or x, dy]


def _require_shape_of(x: Spec, **others: Spec) -> None:
    for name, other in others.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} must have shape {x.shape} as x has, got {other.shape}")
