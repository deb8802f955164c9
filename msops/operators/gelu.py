from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_library = of_package("gelu")


@Operators
def operators(approximate: str) -> Operator:
    place = settings.one_of("gelu", "approximate", approximate, ("none", "tanh", "sigmoid"))
    second = "x(*S), dy(*S), ddx(*S) -> dx(*S), ddy(*S)"
    backward_backward = custom_op(_library.GeluBackwardBackward, second, approximate=place)
    backward = custom_op(
        _library.GeluBackward, "x(*S), dy(*S) -> dx(*S)", gradient=backward_backward, approximate=place
    )
    return custom_op(_library.GeluForward, "x -> y", gradient=backward, approximate=place)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    r"""Computes the Gaussian error linear unit of each element.

    .. math::
        y = x\, \Phi(x), \qquad
        \Phi(x) = \frac{1}{2} \left(1 + \operatorname{erf} \frac{x}{\sqrt{2}}\right) \quad\text{or}\quad
        \frac{1}{2} \left(1 + \tanh\left(\sqrt{2 / \pi}\, (x + 0.044715\, x^3)\right)\right) \quad\text{or}\quad
        \frac{1}{1 + e^{-1.702\, x}}

    Small results for negative `x` keep their digits: :math:`1 + \operatorname{erf}` is not computed as a sum.

    Args:
        x (Tensor): Any shape; float16, float32 or float64.
        approximate (str): ``"none"`` for the error function, ``"tanh"`` or ``"sigmoid"`` for one of its
            approximations. The last one is known as "quick gelu". Default: ``"none"`` .

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        TypeError: If `x` is not a Tensor of one of these dtypes, or `approximate` is not a str.
        ValueError: If `approximate` is another str.

    Source:
        Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.gelu(mindspore.Tensor([-1.0, 0.0, 1.0], mindspore.float32)).asnumpy().round(3))
        [-0.159  0.     0.841]
    """
    return operators.primitive(approximate)(x)


class GELU(nn.Cell):
    """Computes the Gaussian error linear unit of each element. See :func:`msops.gelu`.

    Args:
        approximate (str): As in the function. Default: ``"none"`` .

    Raises:
        TypeError: If `approximate` is not a str.
        ValueError: If `approximate` is none of ``"none"`` , ``"tanh"`` and ``"sigmoid"`` .
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.forward_op = operators.primitive(approximate)

    def construct(self, x: Tensor) -> Tensor:
        return self.forward_op(x)

    construct.__doc__ = gelu.__doc__  # for help()

    def extend_repr(self) -> str:
        return f"approximate={self.approximate}"
