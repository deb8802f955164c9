from __future__ import annotations

from mindspore import Tensor, nn

from msops.core.factory import custom_op
from msops.core.library import of_package

_library = of_package("silu")
backward_backward = custom_op(_library.SiluBackwardBackward, "x(*S), dy(*S), ddx(*S) -> dx(*S), ddy(*S)")
backward = custom_op(_library.SiluBackward, "x(*S), dy(*S) -> dx(*S)", gradient=backward_backward)
forward = custom_op(_library.SiluForward, "x -> y", gradient=backward)


def silu(x: Tensor) -> Tensor:
    r"""Computes the sigmoid linear unit of each element, also called swish.

    .. math:: y = x s, \qquad \frac{dy}{dx} = s (1 + x (1 - s)), \qquad s = \frac{1}{1 + e^{-x}}

    Args:
        x (Tensor): Any shape; float16, float32 or float64.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If `x` is not a Tensor of one of these dtypes.

    Source:
        Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation in
        reinforcement learning", 2017.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.silu(mindspore.Tensor([-1.0, 0.0, 1.0], mindspore.float32)))
        [-0.26894143  0.          0.7310586 ]
    """
    return forward(x)


class SiLU(nn.Cell):
    """Computes the sigmoid linear unit of each element. See :func:`msops.silu`."""

    def construct(self, x: Tensor) -> Tensor:
        return forward(x)

    construct.__doc__ = silu.__doc__  # for help()
