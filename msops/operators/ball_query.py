from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.shared.point_cloud import call_with_lengths

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "ball_query"
_LIBRARY = of_package(_NAME)


def ball_query(
    radius: float,
    nsample: int,
    xyz: Tensor,
    new_xyz: Tensor,
    min_radius: float = 0.0,
    return_counts: bool = False,
    lengths: Tensor | None = None,
    new_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Finds the first points of a cloud that are in a ball around each query.

    .. math::
        \text{idx}_m = \text{the first nsample of } \{j : \text{min\_radius}^2 \le \lVert x_j - q_m \rVert^2 <
        \text{radius}^2\}

    in the order of j. If there are fewer, the first one fills what is left; if there is none, 0 does, and the count
    tells that. Squared distances are computed in float32 (float64 for float64), by the same roundings on the CPU and on
    a GPU, and compared with the squares of the radii, rounded once. A point with a coordinate that is NaN is in no
    ball.

    Large clouds are sorted into cells, and a query visits the cells around its ball only.

    Args:
        radius (float): At least 0.
        nsample (int): How many points to find for each query.
        xyz (Tensor): Clouds x, shape (B, N, 3); float16, float32 or float64. No gradient.
        new_xyz (Tensor): Queries q, shape (B, M, 3), of the dtype of `xyz`. No gradient.
        min_radius (float): At least 0. Default: ``0.0`` .
        return_counts (bool): Whether to return the counts, too. Default: ``False`` .
        lengths (Tensor): How many points of each cloud there are, shape (B,), int32 or int64: the points from there on
            are never found. A length outside [0, N] is an error on the CPU; on a GPU the nearest of 0 and N stands for
            it. Default: ``None`` , all have N.
        new_lengths (Tensor): How many queries of each cloud there are, likewise, in [0, M]. The others find nothing:
            their rows and counts are 0. Default: ``None`` , all have M.

    Returns:
        Tensor of shape (B, M, nsample), int32. With `return_counts`, also how many points were found for each query, at
        most nsample, of shape (B, M), int32.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or a setting has a wrong type.
        ValueError: If an input has another shape, or a setting is out of range.

    Source:
        Qi et al., "PointNet++: Deep hierarchical feature learning on point sets in a metric space", 2017.

    Examples:
        >>> import mindspore, msops
        >>> xyz = mindspore.Tensor([[[0, 0, 0], [5, 0, 0], [1, 0, 0], [2, 0, 0]]], mindspore.float32)
        >>> idx, counts = msops.ball_query(2.0, 3, xyz, xyz, return_counts=True)
        >>> print(idx[0].asnumpy().tolist(), counts[0])
        [[0, 2, 0], [1, 1, 1], [0, 2, 3], [2, 3, 2]] [2 1 3 2]
    """
    given = lengths is not None, new_lengths is not None
    operator = operators.primitive(radius, nsample, min_radius, return_counts, *given)
    found = call_with_lengths(operator, xyz, new_xyz, lengths, new_lengths)
    if return_counts:
        return found[0], found[1]
    return found[0]


class BallQuery(nn.Cell):
    """Finds the points of clouds that are in balls. See :func:`msops.ball_query`.

    Args:
        radius (float): As in the function.
        nsample (int): As in the function.
        min_radius (float): As in the function. Default: ``0.0`` .
        return_counts (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> xyz = ops.zeros((2, 100, 3), mindspore.float32)
        >>> print(msops.BallQuery(0.2, 16)(xyz, xyz[:, :10]).shape)
        (2, 10, 16)
    """

    def __init__(self, radius: float, nsample: int, min_radius: float = 0.0, return_counts: bool = False) -> None:
        super().__init__()
        operators(radius, nsample, min_radius, return_counts)  # checks them
        self.radius, self.nsample, self.min_radius, self.return_counts = radius, nsample, min_radius, return_counts

    def construct(
        self, xyz: Tensor, new_xyz: Tensor, lengths: Tensor | None = None, new_lengths: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        given = lengths is not None, new_lengths is not None
        operator = operators.primitive(self.radius, self.nsample, self.min_radius, self.return_counts, *given)
        found = call_with_lengths(operator, xyz, new_xyz, lengths, new_lengths)
        if self.return_counts:
            return found[0], found[1]
        return found[0]

    construct.__doc__ = ball_query.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "radius", "nsample", "min_radius", "return_counts")


@Operators
def operators(radius: float, nsample: int, min_radius: float = 0.0, return_counts: bool = False) -> Operator:
    """Returns the operator that gives the indices and, in any case, the counts."""
    settings.boolean(_NAME, "return_counts", return_counts)
    return custom_op(
        _LIBRARY.BallQueryForward,
        "xyz(B, N, 3), new_xyz(B, M, 3), lengths(B, dtype=int32)?, new_lengths(B, dtype=int32)? -> "
        "idx(B, M, nsample, dtype=int32), counts(B, M, dtype=int32); "
        "points, lattices, ends(..., dtype=int32), order(..., dtype=int32)",
        # The squares of the radii are rounded, and may be 0 or infinity.
        radius=float(settings.number(_NAME, "radius", radius, 0)),
        nsample=settings.positive(_NAME, "nsample", nsample),
        min_radius=float(settings.number(_NAME, "min_radius", min_radius, 0)),
    )
