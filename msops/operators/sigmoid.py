from __future__ import annotations

from mindspore import Tensor, nn

from msops.core.factory import custom_op
from msops.core.library import of_package


def _gradient_of_backward(y: Tensor, dy: Tensor, dx: Tensor, ddx: Tensor) -> tuple[Tensor, ...]:
    return backward_backward(y, dy, ddx)


_library = of_package("sigmoid")
backward_backward = custom_op(
    _library.SigmoidBackwardBackward, "y(*S), dy(*S), ddx(*S) -> gradient_y(*S), gradient_dy(*S)"
)
backward = custom_op(_library.SigmoidBackward, "y(*S), dy(*S) -> dx(*S)", gradient=_gradient_of_backward)
forward = custom_op(_library.SigmoidForward, "x -> y", gradient=backward)


def sigmoid(x: Tensor) -> Tensor:
    r"""Computes the logistic sigmoid of each element.

    .. math:: y = \frac{1}{1 + e^{-x}}, \qquad \frac{dy}{dx} = y (1 - y)

    The result is accurate for large :math:`|x|`: it saturates at exactly 0 or 1. It is NaN only where `x` is NaN.

    Args:
        x (Tensor): Any shape; float16, float32 or float64.

    Returns:
        Tensor of the shape and dtype of `x`, with values in [0, 1].

    Raises:
        TypeError: If `x` is not a Tensor of one of these dtypes.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.sigmoid(mindspore.Tensor([-1000.0, 0.0, 1000.0], mindspore.float32)))
        [0.  0.5 1. ]
    """
    return forward(x)


class Sigmoid(nn.Cell):
    """Computes the logistic sigmoid of each element. See :func:`msops.sigmoid`."""

    def construct(self, x: Tensor) -> Tensor:
        return forward(x)

    construct.__doc__ = sigmoid.__doc__  # for help()
