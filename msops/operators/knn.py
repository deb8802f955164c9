from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import Spec
from msops.shared.point_cloud import call_with_lengths

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "knn"
_LIBRARY = of_package(_NAME)


def knn(
    k: int,
    xyz: Tensor,
    new_xyz: Tensor,
    return_distances: bool = False,
    lengths: Tensor | None = None,
    new_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Finds the k points of a cloud that are nearest to each query.

    .. math::
        \text{dist}_{mi} = \lVert x_{\text{idx}_{mi}} - q_m \rVert, \qquad \text{dist}_{m1} \le \dots \le
        \text{dist}_{mk} \le \lVert x_j - q_m \rVert \text{ for all other } j

    Equally near points are in the order of their indices. Squared distances are computed in float32 (float64 for
    float64), by the same roundings on the CPU and on a GPU, so that both find the same points. A squared distance that
    is NaN counts as infinite: its point comes after all others. If a cloud has fewer points than k, the neighbours that
    are missing have index -1 and distance 0.

    Large clouds are sorted into cells, by the first three coordinates if there are more, and a query visits the cells
    around it until no other can have a nearer point.

    The distances have gradients of first order with respect to both inputs, :math:`(x - q) / \text{dist}` and its
    negative, and 0 where a distance is 0 or infinite, or a neighbour is missing.

    Args:
        k (int): How many points to find, at least 1.
        xyz (Tensor): Clouds x, shape (B, N, D) with D from 1 to 8; float16, float32 or float64.
        new_xyz (Tensor): Queries q, shape (B, M, D), of the dtype of `xyz`.
        return_distances (bool): Whether to return the distances, too. Default: ``False`` .
        lengths (Tensor): How many points of each cloud there are, shape (B,), int32 or int64: the points from there on
            are never found. A length outside [0, N] is an error on the CPU; on a GPU the nearest of 0 and N stands for
            it. Default: ``None`` , all have N.
        new_lengths (Tensor): How many queries of each cloud there are, likewise, in [0, M]. The others find nothing:
            their rows are -1, and their distances 0. Default: ``None`` , all have M.

    Returns:
        Tensor of shape (B, M, k), int32. With `return_distances`, also the distances, of this shape and the inputs'
        dtype.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or a setting has a wrong type.
        ValueError: If an input has another shape, or `k` is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> xyz = mindspore.Tensor([[[0, 0, 0], [5, 0, 0], [1, 0, 0], [2, 0, 0]]], mindspore.float32)
        >>> idx, dist = msops.knn(2, xyz, xyz, return_distances=True)
        >>> print(idx[0].asnumpy().tolist(), dist[0].asnumpy().tolist())
        [[0, 2], [1, 3], [2, 0], [3, 2]] [[0.0, 1.0], [0.0, 3.0], [0.0, 1.0], [0.0, 1.0]]
    """
    operator = operators.primitive(k, return_distances, lengths is not None, new_lengths is not None)
    found = call_with_lengths(operator, xyz, new_xyz, lengths, new_lengths)
    if return_distances:
        return found[0], found[1]
    return found[0]


class KNN(nn.Cell):
    """Finds the nearest points of clouds. See :func:`msops.knn`.

    Args:
        k (int): As in the function.
        return_distances (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If `k` is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> xyz = ops.zeros((2, 100, 3), mindspore.float32)
        >>> print(msops.KNN(8)(xyz, xyz[:, :10]).shape)
        (2, 10, 8)
    """

    def __init__(self, k: int, return_distances: bool = False) -> None:
        super().__init__()
        operators(k, return_distances)  # checks them
        self.k, self.return_distances = k, return_distances

    def construct(
        self, xyz: Tensor, new_xyz: Tensor, lengths: Tensor | None = None, new_lengths: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        operator = operators.primitive(self.k, self.return_distances, lengths is not None, new_lengths is not None)
        found = call_with_lengths(operator, xyz, new_xyz, lengths, new_lengths)
        if self.return_distances:
            return found[0], found[1]
        return found[0]

    construct.__doc__ = knn.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "k", "return_distances")


_backward = custom_op(
    _LIBRARY.KnnBackward,
    "xyz(B, N, D), new_xyz(B, M, D), idx(B, M, K, dtype=int32), ddist(B, M, K) -> dxyz(B, N, D), dnew_xyz(B, M, D); "
    "sources(..., dtype=int32)",
)


@Operators
def operators(k: int, return_distances: bool = False) -> Operator:
    """Returns the operator that gives the indices and, in any case, the distances."""
    settings.boolean(_NAME, "return_distances", return_distances)
    return custom_op(
        _LIBRARY.KnnForward,
        "xyz(B, N, D), new_xyz(B, M, D), lengths(B, dtype=int32)?, new_lengths(B, dtype=int32)? -> "
        "idx(..., dtype=int32), dist; points, lattices, ends(..., dtype=int32), order(..., dtype=int32)",
        infer=_infer,
        gradient=_backward,
        k=settings.positive(_NAME, "k", k),
    )


def _infer(xyz: Spec, new_xyz: Spec, lengths: Spec | None, new_lengths: Spec | None, k: int) -> list[Spec]:
    if not 1 <= xyz.shape[2] <= 8:
        raise ValueError(f"xyz must have 1 to 8 coordinates, got {xyz.shape[2]}")
    shape = (*new_xyz.shape[:2], k)
    return [Spec(shape, mindspore.int32), Spec(shape, xyz.dtype)]
