from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import arguments
from msops.core.factory import custom_op
from msops.core.inputs import describe, open_once, spec_of
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.inputs import Description
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "softmax"
_library = of_package(_NAME)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    r"""Computes the exponentials of numbers along an axis, divided by their sum.

    .. math::
        y_j = \frac{e^{x_j}}{\sum_i e^{x_i}}, \qquad
        \text{dx}_j = y_j \left(\text{dy}_j - \sum_i y_i \text{dy}_i\right)

    The largest number is subtracted from all first, so that nothing overflows. As in PyTorch, the result is NaN all
    along the axis where a number is NaN or infinity, or where all are -infinity; other numbers -infinity give 0. There
    are gradients of both orders.

    Args:
        x (Tensor): Any shape of at least one axis; float16, float32 or float64.
        axis (int): The axis, counted from the end if it is negative. Default: ``-1`` .

    Returns:
        Tensor of the shape and dtype of `x`. It is computed in float32, or in float64 if `x` is float64, and rounded
        once.

    Raises:
        TypeError: If `x` is not a Tensor of one of these dtypes, or `axis` is not an int.
        ValueError: If `x` has no such axis.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[0.0, 0.0], [1.0, 3.0]], mindspore.float32)
        >>> print(msops.softmax(x).asnumpy().round(3))
        [[0.5   0.5  ]
         [0.119 0.881]]
        >>> print(msops.softmax(x, axis=0).asnumpy().round(3))
        [[0.269 0.047]
         [0.731 0.953]]
    """
    return make_forward(_NAME, describe(x), axis)(x)


class Softmax(nn.Cell):
    """Computes the exponentials along an axis, divided by their sum. See :func:`msops.softmax`.

    Args:
        axis (int): As in the function. Default: ``-1`` .

    Raises:
        TypeError: If `axis` is not an int.
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        if not arguments.whole(axis):
            raise TypeError(f"Softmax: axis must be an int, got {type(axis).__name__}")
        self.axis = int(axis)

    def construct(self, x: Tensor) -> Tensor:
        return make_forward("Softmax", describe(x), self.axis)(x)

    construct.__doc__ = softmax.__doc__  # for help()

    def extend_repr(self) -> str:
        return f"axis={self.axis}"


@open_once
def make_forward(name: str, x: Description, axis: int) -> Operator:
    """Returns the operator for this axis of `x`. Errors about the arguments begin with `name`."""
    spec = spec_of(x)
    if isinstance(spec, str):
        raise TypeError(f"{name}: x must be a Tensor, got {spec}")
    if not arguments.whole(axis):
        raise TypeError(f"{name}: axis must be an int, got {type(axis).__name__}")
    rank = len(spec.shape)
    if not -rank <= axis < rank:
        raise ValueError(f"{name}: axis must be at least {-rank} and less than {rank}, got {axis}")
    return make_operators(rank - 1 - int(axis) if axis >= 0 else -1 - int(axis))[0]


@functools.cache
def make_operators(from_end: int) -> tuple[Operator, Operator, Operator]:
    """Returns the operator along the axis that has so many axes after it, its gradient and the gradient's gradient."""

    def gradient_of_backward(y: Tensor, dy: Tensor, dx: Tensor, ddx: Tensor) -> tuple[Tensor, ...]:
        return backward_backward(y, dy, ddx)

    backward_backward = custom_op(
        _library.SoftmaxBackwardBackward,
        "y(*S), dy(*S), ddx(*S) -> gradient_y(*S), gradient_dy(*S)",
        from_end=from_end,
    )
    backward = custom_op(
        _library.SoftmaxBackward, "y(*S), dy(*S) -> dx(*S)", gradient=gradient_of_backward, from_end=from_end
    )
    forward = custom_op(_library.SoftmaxForward, "x -> y", infer=_infer, gradient=backward, from_end=from_end)
    return forward, backward, backward_backward


def _infer(x: Spec, from_end: int) -> Spec:
    if from_end >= len(x.shape):
        raise ValueError(f"x must have at least {from_end + 1} axes, got shape {x.shape}")
    return x
