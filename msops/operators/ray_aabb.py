from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.shared.rays import box

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.shared.rays import Corner

_NAME = "ray_aabb"
_library = of_package(_NAME)


def ray_aabb(origins: Tensor, directions: Tensor, low: Corner, high: Corner) -> tuple[Tensor, Tensor]:
    r"""Finds where rays enter and leave a box whose sides are along the axes.

    .. math::
        \text{near} &= \max\big(0, \max_a \min(t^{\text{low}}_a, t^{\text{high}}_a)\big), \qquad
        \text{far} = \min_a \max(t^{\text{low}}_a, t^{\text{high}}_a) \\
        t^{\text{low}}_a &= \frac{\text{low}_a - o_a}{d_a}, \qquad t^{\text{high}}_a = \frac{\text{high}_a - o_a}{d_a}

    A ray is o + t d with t of at least 0, so that `near` is 0 where it starts in the box. A ray that misses the box,
    since `near` would be more than `far`, has near = far = -1, as has one with a NaN. Its faces belong to the box. The
    direction need not have length 1; where it is 0 on all axes, `far` is infinite for an origin in the box. It is
    computed in float32 (float64 for float64). There are no gradients: those of the inputs are zeros.

    Args:
        origins (Tensor): o, shape (R, 3); float16, float32 or float64.
        directions (Tensor): d, with the shape and dtype of `origins`.
        low (float, tuple): The least coordinates of the box, one for each axis or one for all.
        high (float, tuple): The greatest coordinates, each more than that of `low`.

    Returns:
        tuple of two Tensors of shape (R,) and the dtype of the rays, near and far.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or a corner is not a number or
            three of them.
        ValueError: If an input has another shape, or a corner's coordinate is not finite, or `high` is not more than
            `low`.

    Source:
        Williams et al., "An efficient and robust ray-box intersection algorithm", 2005.

    Examples:
        >>> import mindspore, msops
        >>> origins = mindspore.Tensor([[-2, 0, 0], [0, 0, 0], [-2, 5, 0]], mindspore.float32)
        >>> directions = mindspore.Tensor([[1, 0, 0], [0, 0, 2], [1, 0, 0]], mindspore.float32)
        >>> near, far = msops.ray_aabb(origins, directions, -1, 1)
        >>> print(near, far)
        [ 1.  0. -1.] [ 3.   0.5 -1. ]
    """
    return operators.primitive(low, high)(origins, directions)


class RayAABB(nn.Cell):
    """Finds where rays enter and leave a box. See :func:`msops.ray_aabb`.

    Args:
        low (float, tuple): As in the function.
        high (float, tuple): As in the function.

    Raises:
        TypeError: If a corner is not a number or three of them.
        ValueError: If a coordinate is not finite, or `high` is not more than `low`.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> near, far = msops.RayAABB((-1, -1, 0), 1)(ops.zeros((5, 3), mindspore.float32), ops.ones((5, 3)))
        >>> print(far)
        [1. 1. 1. 1. 1.]
    """

    def __init__(self, low: Corner, high: Corner) -> None:
        super().__init__()
        box(_NAME, low, high)
        self.low, self.high = low, high

    def construct(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        return operators.primitive(self.low, self.high)(origins, directions)

    construct.__doc__ = ray_aabb.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "low", "high")


def _no_gradient(
    origins: Tensor, directions: Tensor, out: tuple[Tensor, ...], dout: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return ops.zeros_like(origins), ops.zeros_like(directions)


@Operators
def operators(low: Corner, high: Corner) -> Operator:
    return custom_op(
        _library.RayAABBForward,
        "origins(R, 3), directions(R, 3) -> near(R), far(R)",
        gradient=_no_gradient,
        **box(_NAME, low, high),
    )
