from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import describe, spec_of
from msops.core.library import of_package

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Sizes
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
    return operators.primitive(*describe(x), axis)(x)


class Softmax(nn.Cell):
    """Computes the exponentials along an axis, divided by their sum. See :func:`msops.softmax`.

    Args:
        axis (int): As in the function. Default: ``-1`` .

    Raises:
        TypeError: If `axis` is not an int.
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = settings.integer(_NAME, "axis", axis)

    def construct(self, x: Tensor) -> Tensor:
        return operators.primitive(*describe(x), self.axis)(x)

    construct.__doc__ = softmax.__doc__  # for help()

    def extend_repr(self) -> str:
        return f"axis={self.axis}"


@Operators
def operators(shape: Sizes | None, dtype: Any, axis: int) -> Operator:
    spec = spec_of((shape, dtype))
    if isinstance(spec, str):
        raise TypeError(f"{_NAME}: x must be a Tensor, got {spec}")
    axis, rank = settings.integer(_NAME, "axis", axis), len(spec.shape)
    if not -rank <= axis < rank:
        raise ValueError(f"{_NAME}: axis must be at least {-rank} and less than {rank}, got {axis}")
    return operators_along(rank - 1 - axis % rank)


@Operators
def operators_along(from_end: int) -> Operator:
    """Returns the operator along the axis that has so many axes after it."""
    backward_backward = second_gradients(from_end)

    def gradient_of_backward(y: Tensor, dy: Tensor, dx: Tensor, ddx: Tensor) -> tuple[Tensor, ...]:
        return backward_backward(y, dy, ddx)

    backward = custom_op(
        _library.SoftmaxBackward, "y(*S), dy(*S) -> dx(*S)", gradient=gradient_of_backward, from_end=from_end
    )
    return custom_op(_library.SoftmaxForward, "x -> y", infer=_infer, gradient=backward, from_end=from_end)


@Operators
def second_gradients(from_end: int) -> Operator:
    return custom_op(
        _library.SoftmaxBackwardBackward,
        "y(*S), dy(*S), ddx(*S) -> gradient_y(*S), gradient_dy(*S)",
        from_end=from_end,
    )


def _infer(x: Spec, from_end: int) -> Spec:
    if from_end >= len(x.shape):
        raise ValueError(f"x must have at least {from_end + 1} axes, got shape {x.shape}")
    return x
