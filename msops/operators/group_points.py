from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import cast_as, check_inputs, describe, spec_of
from msops.core.library import of_package
from msops.core.signature import Signature
from msops.operators.ball_query import BallQuery
from msops.shared.gather import gather_operators

if TYPE_CHECKING:
    from msops.core.inputs import Description

_library = of_package("gather_points")
forward, backward = gather_operators("group_points", _library.GroupPointsForward, _library.GroupPointsBackward, "M, S")


def group_points(features: Tensor, idx: Tensor) -> Tensor:
    r"""Takes the features of groups of points, such as the neighbours of each of M centers.

    .. math::
        \text{out}_{b, c, m, s} = \text{features}_{b,\, c,\, \text{idx}_{b, m, s}}

    The gradient with respect to `features` adds up, for each point, what the groups that took it have, in a fixed
    order. It has gradients of any order.

    Args:
        features (Tensor): Shape (B, C, N): C features of N points in each of B clouds; float16, float32 or float64.
            Coordinates are features, too, with C = 3.
        idx (Tensor): Shape (B, M, S), int32 or int64, from 0 to N - 1, such as `ball_query` and `knn` return. On the
            CPU, another index is an error; on a GPU it gives 0, and no gradient.

    Returns:
        Tensor of shape (B, C, M, S), with the dtype of `features`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes.
        ValueError: If an input has another shape.

    Source:
        Qi et al., "PointNet++: deep hierarchical feature learning on point sets in a metric space", 2017.

    Examples:
        >>> import mindspore, msops
        >>> features = mindspore.Tensor([[[10.0, 11.0, 12.0]]], mindspore.float32)
        >>> print(msops.group_points(features, mindspore.Tensor([[[0, 1], [2, 2]]])))
        [[[[10. 11.]
           [12. 12.]]]]
    """
    return forward(features, idx)


class GroupPoints(nn.Cell):
    """Takes the features of groups of points. See :func:`msops.group_points`."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_op = forward.primitive

    def construct(self, features: Tensor, idx: Tensor) -> Tensor:
        return self.forward_op(features, idx)[0]

    construct.__doc__ = group_points.__doc__  # for help()


@once
def _check_points(name: str, xyz: Description | None, features: Description | None, use_xyz: bool) -> None:
    """Requires that there is something to group, and that the points, unless they are None, and the features fit."""
    if features is None and not use_xyz:
        raise ValueError(f"{name}: features must be given if use_xyz is False")
    given = [("xyz(B, N, 3)", xyz), ("features(B, C, N, dtype=float16|float32|float64)", features)]
    signature = Signature(f"{', '.join(tensor for tensor, x in given if x is not None)} -> groups")
    check_inputs(signature, name, [spec_of(x) for _, x in given if x is not None])


class QueryAndGroup(nn.Cell):
    r"""Groups the points in a ball around each center, as PointNet++ does. A `BallQuery` finds them, and `group_points`
    takes their coordinates, relative to the center, and their features.

    Args:
        radius (float): The ball's radius, as in :func:`msops.ball_query`.
        nsample (int): How many points a group has, as in :func:`msops.ball_query`: the first one fills what is left of
            a group, and point 0 a group without points.
        use_xyz (bool): Whether a group has coordinates. Default: ``True`` .

    Inputs:
        - **xyz** (Tensor) - The points, shape (B, N, 3); float16, float32 or float64.
        - **new_xyz** (Tensor) - The centers, shape (B, M, 3), of the dtype of `xyz`.
        - **features** (Tensor) - The points' features, shape (B, C, N); float16, float32 or float64. It may be None or
          left out if `use_xyz` is True. Default: ``None`` .
        - **lengths**, **new_lengths** (Tensor) - How many points and centers of each cloud there are, as in
          :func:`msops.ball_query`: the groups of the other centers have point 0 alone. Default: ``None`` , all.

    Outputs:
        Tensor of shape (B, 3 + C, M, nsample): the relative coordinates, then the features. Without `use_xyz` it has no
        coordinates, and without `features` it has no features. It has the dtype of `features`, to which relative
        coordinates are cast, or of `xyz` without these.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong shape or is out of range, or there is nothing to group.

    Source:
        Qi et al., "PointNet++: deep hierarchical feature learning on point sets in a metric space", 2017; the Cell
        computes what QueryAndGroup of Pointnet2_PyTorch does.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> xyz, features = ops.rand(2, 100, 3), ops.rand(2, 8, 100)
        >>> group = msops.QueryAndGroup(0.2, 16)
        >>> print(group(xyz, xyz[:, :10], features).shape, group(xyz, xyz[:, :10]).shape)
        (2, 11, 10, 16) (2, 3, 10, 16)
    """

    def __init__(self, radius: float, nsample: int, use_xyz: bool = True) -> None:
        super().__init__()
        name = type(self).__name__
        settings.number(name, "radius", radius, 0)
        settings.positive(name, "nsample", nsample)
        self.radius, self.nsample, self.use_xyz = radius, nsample, settings.boolean(name, "use_xyz", use_xyz)
        self.query, self.group = BallQuery(radius, nsample), GroupPoints()

    def construct(
        self,
        xyz: Tensor,
        new_xyz: Tensor,
        features: Tensor | None = None,
        lengths: Tensor | None = None,
        new_lengths: Tensor | None = None,
    ) -> Tensor:
        described = None if features is None else describe(features)
        _check_points("QueryAndGroup", describe(xyz), described, self.use_xyz)
        idx = self.query(xyz, new_xyz, lengths, new_lengths)
        if not self.use_xyz:
            return self.group(features, idx)
        centers = ops.expand_dims(ops.transpose(new_xyz, (0, 2, 1)), 3)
        relative = self.group(ops.transpose(xyz, (0, 2, 1)), idx) - centers
        if features is None:
            return relative
        return ops.concat((cast_as(relative, features), self.group(features, idx)), 1)

    def extend_repr(self) -> str:
        return settings.shown(self, "radius", "nsample", "use_xyz")


class GroupAll(nn.Cell):
    r"""Makes one group of all points, as the last level of PointNet++ does.

    Args:
        use_xyz (bool): Whether the group has coordinates. Default: ``True`` .

    Inputs:
        - **xyz** (Tensor) - The points, shape (B, N, 3). Without `use_xyz` it is not used.
        - **new_xyz** (Tensor) - It is not used: a `GroupAll` is called as a `QueryAndGroup` is. Default: ``None`` .
        - **features** (Tensor) - The points' features, shape (B, C, N). It may be None or left out if `use_xyz` is
          True. Default: ``None`` .

    Outputs:
        Tensor of shape (B, 3 + C, 1, N): the coordinates, then the features. Without `use_xyz` it has no coordinates,
        and without `features` it has no features. It has the dtype of `features`, to which coordinates are cast, or of
        `xyz` without these.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an input has a wrong shape, or there is nothing to group.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> print(msops.GroupAll()(ops.rand(2, 100, 3), None, ops.rand(2, 8, 100)).shape)
        (2, 11, 1, 100)
    """

    def __init__(self, use_xyz: bool = True) -> None:
        super().__init__()
        self.use_xyz = settings.boolean("GroupAll", "use_xyz", use_xyz)

    def construct(self, xyz: Tensor, new_xyz: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        points = describe(xyz) if self.use_xyz else None
        _check_points("GroupAll", points, None if features is None else describe(features), self.use_xyz)
        if not self.use_xyz:
            return ops.expand_dims(features, 2)
        coordinates = ops.expand_dims(ops.transpose(xyz, (0, 2, 1)), 2)
        if features is None:
            return coordinates
        return ops.concat((cast_as(coordinates, features), ops.expand_dims(features, 2)), 1)

    def extend_repr(self) -> str:
        return f"use_xyz={self.use_xyz}"
