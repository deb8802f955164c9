from __future__ import annotations

from mindspore import Tensor, nn

from msops.core.factory import custom_op
from msops.core.library import of_package

_library = of_package("swiglu")
backward_backward = custom_op(
    _library.SwigluBackwardBackward,
    "gate(*S), up(*S), dout(*S), ddgate(*S), ddup(*S) -> dgate(*S), dup(*S), ddout(*S)",
)
backward = custom_op(
    _library.SwigluBackward, "gate(*S), up(*S), dout(*S) -> dgate(*S), dup(*S)", gradient=backward_backward
)
forward = custom_op(_library.SwigluForward, "gate(*S), up(*S) -> out(*S)", gradient=backward)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""Multiplies one tensor by the sigmoid linear unit of another, element by element.

    .. math:: \text{out} = \text{up} \cdot \text{gate} \cdot s, \qquad s = \frac{1}{1 + e^{-\text{gate}}}

    This is the gated activation of a feed-forward layer: `gate` and `up` are two linear maps of its input. Where one
    matrix computes both, split its result first. Both inputs have gradients, of second order, too.

    Args:
        gate (Tensor): Any shape; float16, float32 or float64.
        up (Tensor): The shape and dtype of `gate`.

    Returns:
        Tensor of the shape and dtype of `gate`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If the shapes differ.

    Source:
        Shazeer, "GLU variants improve transformer", 2020.

    Examples:
        >>> import mindspore, msops
        >>> gate = mindspore.Tensor([-1.0, 0.0, 1.0], mindspore.float32)
        >>> print(msops.swiglu(gate, mindspore.Tensor([2.0, 2.0, 2.0], mindspore.float32)))
        [-0.53788286  0.          1.4621172 ]
    """
    return forward(gate, up)


class SwiGLU(nn.Cell):
    """Multiplies one tensor by the sigmoid linear unit of another. See :func:`msops.swiglu`."""

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        return forward(gate, up)

    construct.__doc__ = swiglu.__doc__  # for help()
