from mindspore import nn

from . import check
from .custom import Operator, load, shared

_NAME = "trilinear_interpolation"
_LIBRARY = load(_NAME)


def trilinear_interpolation(feats, points):
    r"""Interpolates features given at the eight corners of a cube.

    With :math:`(u, v, w) = (\text{points}_n + 1) / 2` and the corner :math:`4 i_u + 2 i_v + i_w` at
    :math:`(i_u, i_v, i_w) \in \{0, 1\}^3`,

    .. math::
        \text{out}_n = \sum_{i_u, i_v, i_w} u^{i_u} (1 - u)^{1 - i_u}\, v^{i_v} (1 - v)^{1 - i_v}\,
        w^{i_w} (1 - w)^{1 - i_w}\, \text{feats}_{n,\, 4 i_u + 2 i_v + i_w}

    Both inputs have gradients.

    Args:
        feats (Tensor): Shape (N, 8, F); float16, float32 or float64.
        points (Tensor): Shape (N, 3), the dtype of `feats`. Within the cube they are in [-1, 1]; outside, the same
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
    return _trilinear_interpolation()(feats, points)


class TrilinearInterpolation(nn.Cell):
    """See :func:`msops.trilinear_interpolation`."""

    def __init__(self):
        super().__init__()
        self.forward_op = Operator(_LIBRARY, "TrilinearInterpolationForward", _infer, bprop=self.backward)
        self.backward_op = Operator(_LIBRARY, "TrilinearInterpolationBackward", _infer_backward)

    def construct(self, feats, points):
        return self.forward_op(feats, points)

    def backward(self, feats, points, out, dout):
        return self.backward_op(feats, points, dout)


@shared
def _trilinear_interpolation():
    return TrilinearInterpolation().forward_op


def _infer(feats, points):
    check.tensors(_NAME, feats=feats, points=points)
    check.shape(_NAME, "feats", feats, "N", 8, "F")
    n, _, features = feats.shape
    check.shape(_NAME, "points", points, n, 3)
    return feats._replace(shape=(n, features))


def _infer_backward(feats, points, dout):
    return [feats, points]
