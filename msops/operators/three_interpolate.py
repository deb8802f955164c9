from __future__ import annotations

from mindspore import Tensor, nn, ops

from msops.core.factory import custom_op
from msops.core.library import of_package


def _gradient_of_backward(
    features: Tensor,
    idx: Tensor,
    weight: Tensor,
    dout: Tensor,
    gradients: tuple[Tensor, ...],
    dgradients: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Calls both operators again: interpolation is linear in the features, and in the weights."""
    ddfeatures, ddweight = dgradients
    dfeatures, dweight = backward(ddfeatures, idx, ddweight, dout)
    ddout = forward(ddfeatures, idx, weight) + forward(features, idx, ddweight)
    return dfeatures, ops.zeros_like(idx), dweight, ddout


_library = of_package("three_interpolate")
backward = custom_op(
    _library.ThreeInterpolateBackward,
    "features(B, C, M), idx(B, N, 3, dtype=index), weight(B, N, 3), dout(B, C, N) -> "
    "dfeatures(B, C, M), dweight(B, N, 3); scratch(..., dtype=int32), partial",
    gradient=_gradient_of_backward,
)
forward = custom_op(
    _library.ThreeInterpolateForward,
    "features(B, C, M), idx(B, N, 3, dtype=index), weight(B, N, 3) -> out(B, C, N); packs(..., dtype=common)",
    gradient=backward,
)


def three_interpolate(features: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    r"""Interpolates features between three points each.

    .. math::
        \text{out}_{b, c, n} = \sum_{k=0}^{2} \text{weight}_{b, n, k}\, \text{features}_{b,\, c,\, \text{idx}_{b, n, k}}

    PointNet++ brings features from few points back to many by this, with the three nearest points of `three_nn` and
    weights in proportion to 1 / distance. The inputs `features` and `weight` have gradients, of both orders; their
    sums have a fixed order.

    Args:
        features (Tensor): Shape (B, C, M): C features of M points in each of B clouds; float16, float32 or float64.
        idx (Tensor): Shape (B, N, 3), int32 or int64, from 0 to M - 1. On the CPU, another index is an error; on a GPU
            its term is 0, and so are its gradients.
        weight (Tensor): Shape (B, N, 3), with the dtype of `features`.

    Returns:
        Tensor of shape (B, C, N), with the dtype of `features`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Source:
        Qi et al., "PointNet++: deep hierarchical feature learning on point sets in a metric space", 2017.

    Examples:
        >>> import mindspore, msops
        >>> features = mindspore.Tensor([[[10.0, 20.0, 30.0, 40.0]]], mindspore.float32)
        >>> idx = mindspore.Tensor([[[0, 1, 2], [3, 3, 0]]])
        >>> weight = mindspore.Tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]], mindspore.float32)
        >>> print(msops.three_interpolate(features, idx, weight))
        [[[17.5 40. ]]]
    """
    return forward(features, idx, weight)


class ThreeInterpolate(nn.Cell):
    """Interpolates features between three points each. See :func:`msops.three_interpolate`."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_op = forward.primitive

    def construct(self, features: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
        return self.forward_op(features, idx, weight)[0]

    construct.__doc__ = three_interpolate.__doc__  # for help()
