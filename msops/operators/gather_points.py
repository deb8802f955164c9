from __future__ import annotations

from mindspore import Tensor, nn

from msops.core.library import of_package
from msops.shared.gather import gather_operators

_library = of_package("gather_points")
forward, backward = gather_operators("gather_points", _library.GatherPointsForward, _library.GatherPointsBackward, "M")


def gather_points(features: Tensor, idx: Tensor) -> Tensor:
    r"""Takes the features of the points at given indices.

    .. math::
        \text{out}_{b, c, m} = \text{features}_{b,\, c,\, \text{idx}_{b, m}}

    The gradient with respect to `features` adds up, for each point, what the places that took it have, in a fixed
    order. It has gradients of any order.

    Args:
        features (Tensor): Shape (B, C, N): C features of N points in each of B clouds; float16, float32 or float64.
            Coordinates are features, too, with C = 3.
        idx (Tensor): Shape (B, M), int32 or int64, from 0 to N - 1. On the CPU, another index is an error; on a GPU it
            gives 0, and no gradient.

    Returns:
        Tensor of shape (B, C, M), with the dtype of `features`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes.
        ValueError: If an input has another shape.

    Source:
        Qi et al., "PointNet++: deep hierarchical feature learning on point sets in a metric space", 2017.

    Examples:
        >>> import mindspore, msops
        >>> features = mindspore.Tensor([[[10.0, 11.0, 12.0]]], mindspore.float32)
        >>> print(msops.gather_points(features, mindspore.Tensor([[2, 0, 2, 1]])))
        [[[12. 10. 12. 11.]]]
    """
    return forward(features, idx)


class GatherPoints(nn.Cell):
    """Takes the features of the points at given indices. See :func:`msops.gather_points`."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_op = forward.primitive

    def construct(self, features: Tensor, idx: Tensor) -> Tensor:
        return self.forward_op(features, idx)[0]

    construct.__doc__ = gather_points.__doc__  # for help()
