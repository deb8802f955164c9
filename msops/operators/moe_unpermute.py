from __future__ import annotations

from mindspore import Tensor, nn

from msops.core.factory import custom_op
from msops.core.library import of_package
from msops.core.spec import Spec

_NAME = "moe_unpermute"
_LIBRARY = of_package(_NAME)


def moe_unpermute(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Adds up, for each token, the rows of its slots: what its experts computed.

    .. math::
        \text{out}_n = \sum_j \text{weights}_{nj}\, \text{rows}_{\text{positions}_{nj}}

    It is the way back from :func:`msops.moe_permute`, which gives the positions. A slot whose position is -1 adds
    nothing, and rows that no slot names are never read. Without `weights` it is a plain sum. It adds in the order of j,
    in float32, or in float64 beside float64, and rounds once.

    There are gradients of first order with respect to `rows`, 0 for those that no slot names, and to `weights`, 0 where
    the position is -1. If several slots name one row, the result is right, but the row's gradient is that of one of
    them.

    Args:
        rows (Tensor): Shape (R, C), or (E, c, C), whose first two axes count as one; float16, float32 or float64.
        positions (Tensor): The row of each slot, shape (N, k) or (N,); int32 or int64, from 0 to R - 1, or -1. On the
            CPU, another number is an error; on a GPU it counts as -1.
        weights (Tensor): Shape of `positions`, with the dtype of `rows` or float32. Default: ``None`` , all are 1.

    Returns:
        Tensor of shape (N, C), with the dtype of `rows`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes.
        ValueError: If an input has another shape.

    Source:
        Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", 2017.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[1.0], [2.0], [3.0]])
        >>> experts = mindspore.Tensor([[2, 0], [0, 1], [2, -1]])
        >>> rows, positions, _ = msops.moe_permute(x, experts, 3)
        >>> weights = mindspore.Tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
        >>> print(msops.moe_unpermute(10 * rows, positions, weights))
        [[10.]
         [20.]
         [30.]]
    """
    if weights is None:
        return _without_weights(rows, positions)
    return _with_weights(rows, positions, weights)


class MoEUnpermute(nn.Cell):
    """Adds up the rows of each token's slots. See :func:`msops.moe_unpermute`.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> positions = mindspore.Tensor([[0, 2], [3, -1]])
        >>> print(msops.MoEUnpermute()(ops.ones((4, 3)), positions))
        [[2. 2. 2.]
         [1. 1. 1.]]
    """

    def construct(self, rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
        return moe_unpermute(rows, positions, weights)

    construct.__doc__ = moe_unpermute.__doc__  # for help()


def _infer(rows: Spec, positions: Spec, weights: Spec | None) -> Spec:
    if len(rows.shape) not in (2, 3):
        raise ValueError(f"rows must have shape (R, C) or (E, c, C), got {rows.shape}")
    if len(positions.shape) > 2:
        raise ValueError(f"positions must have shape (N, k) or (N,), got {positions.shape}")
    return Spec((positions.shape[0], rows.shape[-1]), rows.dtype)


_backward = custom_op(
    _LIBRARY.MoeUnpermuteBackward,
    "rows(*R, C), positions(N, *K, dtype=index), weights(N, *K, dtype=common|float32)?, dout(N, C) -> "
    "drows(*R, C), dweights(N, *K, dtype=weights)?; owners(..., dtype=int32)",
)
forward = custom_op(
    _LIBRARY.MoeUnpermuteForward,
    "rows(*R, C), positions(N, *K, dtype=index), weights(N, *K, dtype=common|float32)? -> out",
    infer=_infer,
    gradient=_backward,
)
_with_weights, _without_weights = forward.primitive, forward.without("weights").primitive
