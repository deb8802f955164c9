from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops

from msops.core.factory import custom_op
from msops.core.library import of_package
from msops.shared.broadcast import broadcast_of

if TYPE_CHECKING:
    from msops.core.spec import Spec


def add(x: Tensor, y: Tensor) -> Tensor:
    r"""Adds two tensors, with NumPy's broadcasting.

    .. math:: \text{out}_i = x_i + y_i

    The gradient of each input is the output's gradient, summed over the axes along which the input was broadcast.

    Args:
        x (Tensor): Any shape of at most 16 axes; float16, float32 or float64.
        y (Tensor): Any shape that broadcasts with the shape of `x`; the same dtype as `x`.

    Returns:
        Tensor of the broadcast shape, with the dtype of `x`.

    Raises:
        TypeError: If `x` or `y` is not a Tensor of one of these dtypes, or their dtypes differ.
        ValueError: If the shapes do not broadcast, or have more than 16 axes.

    Examples:
        >>> import mindspore, msops
        >>> column = mindspore.Tensor([[1.0], [2.0]], mindspore.float32)
        >>> print(msops.add(column, mindspore.Tensor([10.0, 20.0], mindspore.float32)))
        [[11. 21.]
         [12. 22.]]
    """
    return forward(x, y)


class Add(nn.Cell):
    """Adds two tensors. See :func:`msops.add`."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return forward(x, y)

    construct.__doc__ = add.__doc__  # for help()


def _infer(x: Spec, y: Spec) -> Spec:
    return broadcast_of(x=x, y=y)


def _gradient(x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    return sum_to(dout, x), sum_to(dout, y)


def sum_to(dout: Tensor, x: Tensor) -> Tensor:
    if x.shape == dout.shape:
        return dout
    return backward(dout, x)


def _gradient_of_backward(dout: Tensor, x: Tensor, dx: Tensor, ddx: Tensor) -> tuple[Tensor, ...]:
    return forward(ddx, ops.zeros_like(dout)), ops.zeros_like(x)


_library = of_package("add")
backward = custom_op(_library.AddBackward, "dout, x(*S) -> dx(*S); partial", gradient=_gradient_of_backward)
forward = custom_op(_library.AddForward, "x, y -> out", infer=_infer, gradient=_gradient)
