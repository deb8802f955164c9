from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "spherical_harmonics"
_library = of_package(_NAME)


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    r"""Computes the real spherical harmonics of directions, with which networks of view-dependent colour begin.

    .. math::
        \text{out}_{l^2 + l + m} = (-1)^m K_{lm}\, \frac{\mathrm{d}^{|m|} P_l}{\mathrm{d} z^{|m|}}(z)\;
        \begin{cases} \operatorname{Re} (x + i y)^m & m \ge 0 \\ \operatorname{Im} (x + i y)^{|m|} & m < 0 \end{cases}
        \qquad 0 \le l < \text{degree}, \quad -l \le m \le l

    :math:`P_l` are the Legendre polynomials, and :math:`K_{lm}` makes the functions orthonormal on the sphere:
    :math:`K^2 = \frac{2 l + 1}{4 \pi} \frac{(l - |m|)!}{(l + |m|)!}` , twice that for m other than 0. Order and signs
    are those of instant-ngp's encoding. The functions are taken as these polynomials of x, y and z also where a vector
    has another length than 1, and so are their gradients, of first and second order: project a gradient on the sphere
    if the length must stay. Arithmetic is in float32 (float64 for float64).

    Args:
        directions (Tensor): Unit vectors (x, y, z), shape (N, 3); float16, float32 or float64.
        degree (int): How many degrees l to compute, from 1 to 8.

    Returns:
        Tensor of shape (N, degree * degree), with the dtype of `directions`.

    Raises:
        TypeError: If `directions` is not a Tensor of one of these dtypes, or `degree` is not an int.
        ValueError: If `directions` has another shape, or `degree` is not in [1, 8].

    Source:
        Mueller et al., "Instant neural graphics primitives with a multiresolution hash encoding", 2022. Sloan, "Stupid
        spherical harmonics tricks", 2008.

    Examples:
        >>> import mindspore, msops
        >>> up = mindspore.Tensor([[0, 0, 1], [1, 0, 0]], mindspore.float32)
        >>> print(msops.spherical_harmonics(up, 2).asnumpy().round(4) + 0.0)
        [[ 0.2821  0.      0.4886  0.    ]
         [ 0.2821  0.      0.     -0.4886]]
    """
    return operators.primitive(degree)(directions)


class SphericalHarmonics(nn.Cell):
    """Computes the real spherical harmonics of directions. See :func:`msops.spherical_harmonics`.

    Args:
        degree (int): As in the function.

    Raises:
        TypeError: If `degree` is not an int.
        ValueError: If `degree` is not in [1, 8].
    """

    def __init__(self, degree: int) -> None:
        super().__init__()
        operators(degree)  # checks it
        self.degree = degree

    def construct(self, directions: Tensor) -> Tensor:
        return operators.primitive(self.degree)(directions)

    construct.__doc__ = spherical_harmonics.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "degree")


@Operators
def operators(degree: int) -> Operator:
    if not 1 <= settings.integer(_NAME, "degree", degree) <= 8:
        raise ValueError(f"{_NAME}: degree must be from 1 to 8, got {degree}")
    vectors, row = "directions(N, 3)", "dout(N, degree * degree)"
    second = custom_op(
        _library.SphericalHarmonicsSecondBackward,
        f"{vectors}, {row}, dddirections(N, 3) -> ddirections(N, 3), ddout(N, degree * degree)",
        degree=int(degree),
    )
    backward = custom_op(
        _library.SphericalHarmonicsBackward,
        f"{vectors}, {row} -> ddirections(N, 3)",
        gradient=second,
        degree=int(degree),
    )
    return custom_op(
        _library.SphericalHarmonicsForward,
        f"{vectors} -> out(N, degree * degree)",
        gradient=backward,
        degree=int(degree),
    )
