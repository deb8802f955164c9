from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops

from msops.core.factory import custom_op
from msops.core.library import of_package

_AXES = tuple(Tensor(row) for row in np.eye(3, dtype=np.float32))


def _gradient_of_backward(
    feats: Tensor, points: Tensor, dout: Tensor, out: tuple[Tensor, ...], douts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Takes half the difference between far and near side as the derivative: the function is linear along each axis."""
    ddfeats, ddpoints = douts
    ddout = forward(ddfeats, points)
    dfeats, dpoints = ops.zeros_like(feats), backward(ddfeats, points, dout)[1]
    for d in range(3):
        axis = ops.cast(_AXES[d], points.dtype)
        far, near = points * (1 - axis) + axis, points * (1 - axis) - axis
        half = ddpoints[:, d : d + 1] / 2
        ddout = ddout + half * (forward(feats, far) - forward(feats, near))
        of_far, of_near = backward(feats, far, dout), backward(feats, near, dout)
        dfeats = dfeats + ops.expand_dims(half, 2) * (of_far[0] - of_near[0])
        dpoints = dpoints + half * (of_far[1] - of_near[1])
    return dfeats, dpoints, ddout


_library = of_package("trilinear_interpolation")
backward = custom_op(
    _library.TrilinearInterpolationBackward,
    "feats(N, 8, F), points(N, 3), dout(N, F) -> dfeats(N, 8, F), dpoints(N, 3)",
    gradient=_gradient_of_backward,
)
forward = custom_op(
    _library.TrilinearInterpolationForward, "feats(N, 8, F), points(N, 3) -> out(N, F)", gradient=backward
)


def trilinear_interpolation(feats: Tensor, points: Tensor) -> Tensor:
    r"""Interpolates features that are given at the eight corners of a cube.

    .. math::
        \text{out}_n = \sum_{i_u, i_v, i_w} u^{i_u} (1 - u)^{1 - i_u}\, v^{i_v} (1 - v)^{1 - i_v}\,
        w^{i_w} (1 - w)^{1 - i_w}\, \text{feats}_{n,\, 4 i_u + 2 i_v + i_w}

    Here :math:`(u, v, w) = (\text{points}_n + 1) / 2` is the point's place in the unit cube, and corner
    :math:`4 i_u + 2 i_v + i_w` is at :math:`(i_u, i_v, i_w) \in \{0, 1\}^3`. Both inputs have gradients.

    Args:
        feats (Tensor): Shape (N, 8, F), one row for each corner; float16, float32 or float64.
        points (Tensor): Shape (N, 3); the same dtype as `feats`. In the cube, coordinates are in [-1, 1]; outside, the
            formula extrapolates.

    Returns:
        Tensor of shape (N, F), with the dtype of `feats`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Examples:
        >>> import mindspore, msops
        >>> corners = mindspore.Tensor([[[c] for c in range(8)]], mindspore.float32)
        >>> for point in ([0, 0, 0], [1, 1, 1]):
        ...     print(msops.trilinear_interpolation(corners, mindspore.Tensor([point], mindspore.float32)))
        [[3.5]]
        [[7.]]
    """
    return forward(feats, points)


class TrilinearInterpolation(nn.Cell):
    """Interpolates features in a cube. See :func:`msops.trilinear_interpolation`."""

    def construct(self, feats: Tensor, points: Tensor) -> Tensor:
        return forward(feats, points)

    construct.__doc__ = trilinear_interpolation.__doc__  # for help()
