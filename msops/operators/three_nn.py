from __future__ import annotations

import mindspore
from mindspore import Tensor, nn

from msops.core.factory import custom_op
from msops.core.library import of_package
from msops.core.spec import Spec

_library = of_package("three_nn")


def three_nn(unknown: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    r"""Finds the three known points that are nearest to each unknown one.

    .. math::
        \text{dist}_{ni} = \lVert y_{\text{idx}_{ni}} - x_n \rVert, \qquad \text{dist}_{n1} \le \text{dist}_{n2} \le
        \text{dist}_{n3} \le \lVert y_j - x_n \rVert \text{ for all other } j

    It is :func:`msops.knn` with k = 3, which says how ties and NaN are, and gives what :func:`msops.three_interpolate`
    takes. Unlike those of other packages that only call them so, the distances are not squared. They have gradients of
    first order, as those of knn have.

    Args:
        unknown (Tensor): Points x, shape (B, N, 3); float16, float32 or float64.
        known (Tensor): Points y, shape (B, M, 3) with M of at least 3, of the dtype of `unknown`.

    Returns:
        tuple of two Tensors of shape (B, N, 3): the distances, of the inputs' dtype, and the indices, int32.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes.
        ValueError: If an input has another shape.

    Source:
        Qi et al., "PointNet++: Deep hierarchical feature learning on point sets in a metric space", 2017.

    Examples:
        >>> import mindspore, msops
        >>> known = mindspore.Tensor([[[0, 0, 0], [5, 0, 0], [1, 0, 0], [2, 0, 0]]], mindspore.float32)
        >>> dist, idx = msops.three_nn(known[:, 1:2], known)
        >>> print(dist, idx)
        [[[0. 3. 4.]]] [[[1 3 2]]]
    """
    return forward(unknown, known)


class ThreeNN(nn.Cell):
    """Finds the three nearest known points. See :func:`msops.three_nn`.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> dist, idx = msops.ThreeNN()(ops.zeros((2, 100, 3)), ops.ones((2, 10, 3)))
        >>> print(dist.shape, idx.shape)
        (2, 100, 3) (2, 100, 3)
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward_op = forward.primitive

    def construct(self, unknown: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        found = self.forward_op(unknown, known)
        return found[0], found[1]

    construct.__doc__ = three_nn.__doc__  # for help()


def _infer(unknown: Spec, known: Spec) -> list[Spec]:
    if known.shape[1] < 3:
        raise ValueError(f"known must have at least 3 points, got {known.shape[1]}")
    return [unknown, Spec(unknown.shape, mindspore.int32)]


_backward = custom_op(
    _library.ThreeNnBackward,
    "unknown(B, N, 3), known(B, M, 3), idx(B, N, 3, dtype=int32), ddist(B, N, 3) -> dunknown(B, N, 3), "
    "dknown(B, M, 3); sources(..., dtype=int32)",
)
forward = custom_op(
    _library.ThreeNnForward,
    "unknown(B, N, 3), known(B, M, 3) -> dist, idx(..., dtype=int32); "
    "points, lattices, ends(..., dtype=int32), order(..., dtype=int32)",
    infer=_infer,
    gradient=_backward,
)
