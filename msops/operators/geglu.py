from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.operators.swiglu import half

if TYPE_CHECKING:
    from msops.core.operator import Operator

_library = of_package("geglu")


@Operators
def operators(approximate: str) -> Operator:
    tanh = settings.one_of("geglu", "approximate", approximate, ("none", "tanh"))
    backward_backward = custom_op(
        _library.GegluBackwardBackward,
        "gate(*S), up(*S), dout(*S), ddgate(*S), ddup(*S) -> dgate(*S), dup(*S), ddout(*S)",
        approximate=tanh,
    )
    backward = custom_op(
        _library.GegluBackward,
        "gate(*S), up(*S), dout(*S) -> dgate(*S), dup(*S)",
        gradient=backward_backward,
        approximate=tanh,
    )
    return custom_op(_library.GegluForward, "gate(*S), up(*S) -> out(*S)", gradient=backward, approximate=tanh)


@Operators
def packed_operators(approximate: str) -> Operator:
    tanh = settings.one_of("geglu", "approximate", approximate, ("none", "tanh"))
    backward_backward = custom_op(
        _library.GegluPackedBackwardBackward,
        "gate(*S, K), dout(*S, K // 2), ddgate(*S, K) -> dgate(*S, K), ddout(*S, K // 2)",
        approximate=tanh,
    )
    backward = custom_op(
        _library.GegluPackedBackward,
        "gate(*S, K), dout(*S, K // 2) -> dgate(*S, K)",
        gradient=backward_backward,
        approximate=tanh,
    )
    return custom_op(_library.GegluPackedForward, "gate -> out", infer=half, gradient=backward, approximate=tanh)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    r"""Multiplies one tensor by the Gaussian error linear unit of another, element by element.

    .. math::
        \text{out} = \text{up} \cdot \text{gate} \cdot \Phi(\text{gate}), \qquad
        \Phi(x) = \frac{1}{2} \left(1 + \operatorname{erf} \frac{x}{\sqrt{2}}\right) \quad\text{or}\quad
        \frac{1}{2} \left(1 + \tanh\left(\sqrt{2 / \pi}\, (x + 0.044715\, x^3)\right)\right)

    This is the gated activation of a feed-forward layer: `gate` and `up` are two linear maps of its input. Where one
    matrix computes both, its result is the only input, which is read where it is. Inputs have gradients, of second
    order, too. Small results for negative gates keep their digits.

    Args:
        gate (Tensor): Any shape; float16, float32 or float64. Without `up`, shape (..., 2 K): the first half of the
            last axis is the gate, the second half is what it multiplies.
        up (Tensor): The shape and dtype of `gate`. Default: ``None`` , the second half of `gate`.
        approximate (str): ``"none"`` for the error function, ``"tanh"`` for its approximation. Default: ``"tanh"`` .

    Returns:
        Tensor of the dtype of `gate` and of its shape or, without `up`, of shape (..., K).

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or `approximate` is not a str.
        ValueError: If the shapes differ, the last axis of `gate` has an odd length where there is no `up`, or
            `approximate` is another str.

    Source:
        Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016. Shazeer, "GLU variants improve transformer",
        2020.

    Examples:
        >>> import mindspore, msops
        >>> gate = mindspore.Tensor([-1.0, 0.0, 1.0], mindspore.float32)
        >>> up = mindspore.Tensor([2.0, 2.0, 2.0], mindspore.float32)
        >>> print(msops.geglu(gate, up, approximate="none").asnumpy().round(3))
        [-0.317  0.     1.683]
    """
    if up is None:
        return packed_operators.primitive(approximate)(gate)
    return operators.primitive(approximate)(gate, up)


class GeGLU(nn.Cell):
    """Multiplies one tensor by the Gaussian error linear unit of another. See :func:`msops.geglu`.

    Args:
        approximate (str): As in the function. Default: ``"tanh"`` .

    Raises:
        TypeError: If `approximate` is not a str.
        ValueError: If `approximate` is neither ``"none"`` nor ``"tanh"`` .
    """

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        self.forward_op, self.packed_op = operators.primitive(approximate), packed_operators.primitive(approximate)

    def construct(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            return self.packed_op(gate)
        return self.forward_op(gate, up)

    construct.__doc__ = geglu.__doc__  # for help()

    def extend_repr(self) -> str:
        return f"approximate={self.approximate}"
