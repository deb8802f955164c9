from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import as_int32
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "furthest_point_sample"
_LIBRARY = of_package(_NAME)


def furthest_point_sample(xyz: Tensor, npoint: int, lengths: Tensor | None = None, start: int | Tensor = 0) -> Tensor:
    r"""Samples points of each cloud so that they cover it: each one is the furthest from those before it.

    .. math::
        i_0 = \text{start}, \qquad i_s = \operatorname{argmax}_j \min_{r < s} \lVert x_j - x_{i_r} \rVert^2

    Among equally far points, the one with the lowest index is taken; index 0 repeats once all points are taken. Squared
    distances are computed in float32 (float64 for float64), by the same roundings on the CPU and on a GPU, so that both
    take the same points.
    A point with a coordinate that is NaN or infinite is never taken, except as :math:`i_0`, and is far from all others.

    Args:
        xyz (Tensor): Clouds of points, shape (B, N, 3); float16, float32 or float64. No gradient.
        npoint (int): How many points to take, at most N.
        lengths (Tensor): How many points of each cloud there are, shape (B,), int32 or int64: the points from there on
            are never taken. An empty cloud gives indices 0. A length outside [0, N] is an error on the CPU; on a GPU
            the nearest of 0 and N stands for it. Default: ``None`` , all have N.
        start (int, Tensor): The first point to take: one index for all clouds, or one for each, shape (B,), int32 or
            int64. An index that is no point of its cloud is an error; a Tensor's, or one beyond a cloud's length, is so
            on the CPU alone, and on a GPU the nearest point stands for it. Empty clouds need none. Default: ``0`` .

    Returns:
        Tensor of shape (B, npoint), int32.

    Raises:
        TypeError: If `xyz`, `lengths` or `start` is not a Tensor of one of these dtypes, or `npoint` or a `start` that
            is no Tensor is not an int.
        ValueError: If a shape is wrong, `npoint` is less than 1 or more than N, or an int `start` is outside [0, N).

    Source:
        Eldar et al., "The farthest point strategy for progressive image sampling", 1997. Qi et al., "PointNet++: Deep
        hierarchical feature learning on point sets in a metric space", 2017.

    Examples:
        >>> import mindspore, msops
        >>> xyz = mindspore.Tensor([[[0, 0, 0], [1, 0, 0], [5, 0, 0], [3, 0, 0]]], mindspore.float32)
        >>> print(msops.furthest_point_sample(xyz, 3))
        [[0 2 3]]
        >>> print(msops.furthest_point_sample(xyz, 3, start=2))
        [[2 0 3]]
    """
    if isinstance(start, Tensor):
        operator = operators.primitive(npoint, 0, lengths is not None, True)
        if lengths is None:
            return operator(xyz, as_int32(start))[0]
        return operator(xyz, as_int32(lengths), as_int32(start))[0]
    operator = operators.primitive(npoint, start, lengths is not None, False)
    if lengths is None:
        return operator(xyz)[0]
    return operator(xyz, as_int32(lengths))[0]


class FurthestPointSample(nn.Cell):
    """Samples the points of clouds. See :func:`msops.furthest_point_sample`.

    Args:
        npoint (int): How many points to take.

    Raises:
        TypeError: If `npoint` is not an int.
        ValueError: If `npoint` is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> print(msops.FurthestPointSample(16)(ops.zeros((2, 100, 3), mindspore.float32)).shape)
        (2, 16)
    """

    def __init__(self, npoint: int) -> None:
        super().__init__()
        self.npoint = settings.positive(_NAME, "npoint", npoint)

    def construct(self, xyz: Tensor, lengths: Tensor | None = None, start: int | Tensor = 0) -> Tensor:
        return furthest_point_sample(xyz, self.npoint, lengths, start)

    construct.__doc__ = furthest_point_sample.__doc__  # for help()

    def extend_repr(self) -> str:
        return f"npoint={self.npoint}"


@Operators
def operators(npoint: int, start: int = 0) -> Operator:
    if settings.integer(_NAME, "start", start) < 0:
        raise ValueError(f"{_NAME}: start must be at least 0, got {start}")
    return custom_op(
        _LIBRARY.FurthestPointSampleForward,
        "xyz(B, N, 3), lengths(B, dtype=int32)?, start(B, dtype=int32)? -> idx(..., dtype=int32); points, distances, "
        "lattices, bounds, ends(..., dtype=int32), order(..., dtype=int32), furthest(..., dtype=int32), "
        "exchange(..., dtype=int32)",
        infer=_infer,
        npoint=settings.positive(_NAME, "npoint", npoint),
        first=int(start),
    )


def _infer(xyz: Spec, lengths: Spec | None, start: Spec | None, npoint: int, first: int) -> Spec:
    clouds, size = xyz.shape[:2]
    if npoint > size:
        raise ValueError(f"npoint must be at most N = {size}, got {npoint}")
    if first >= size:
        raise ValueError(f"start must be less than N = {size}, got {first}")
    return Spec((clouds, npoint), mindspore.int32)
