from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import FLOATS, Spec
from msops.shared.gguf import columns_of, dtype_of, kind_of

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "gguf_embedding"
_LIBRARY = of_package(_NAME)


def gguf_embedding(ids: Tensor, blocks: Tensor, kind: str, dtype: mindspore.Type = mindspore.float16) -> Tensor:
    r"""Takes rows of a table whose rows are blocks as they lie in a GGUF file, such as the vectors of tokens.

    .. math::
        \text{out}_{\ldots, k} = W_{\text{ids}_{\ldots},\, k}

    where :math:`W` is :func:`msops.gguf_dequantize` of `blocks` , of which only these rows are computed.

    Args:
        ids (Tensor): The rows to take, any shape; int32 or int64, from 0 to N - 1. On the CPU, another index is an
            error; on a GPU it gives 0.
        blocks (Tensor): Shape (N, R): R bytes of each row, which are whole blocks; uint8.
        kind (str): ``"Q4_0"`` , ``"Q4_1"`` , ``"Q8_0"`` , ``"Q4_K"`` , ``"Q5_K"`` or ``"Q6_K"`` .
        dtype (mindspore.dtype): float16, float32 or float64. Default: ``mindspore.float16`` .

    Returns:
        Tensor of shape (..., K), where `ids` has the shape (...), and K is the number of blocks in a row times their
        numbers. It has no gradient: the table is not trained.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or another argument has a wrong type.
        ValueError: If rows are not whole blocks, `blocks` has another shape, or `kind` is another str.

    Examples:
        >>> import mindspore, msops, numpy as np
        >>> scales = np.array([[0.5], [2]], np.float16).view(np.uint8)
        >>> blocks = np.concatenate([scales, np.arange(64, dtype=np.uint8).reshape(2, 32)], 1)
        >>> rows = msops.gguf_embedding(mindspore.Tensor([1, 0]), mindspore.Tensor(blocks), "Q8_0")
        >>> print(rows[:, :4])
        [[64.  66.  68.  70. ]
         [ 0.   0.5  1.   1.5]]
    """
    return operators.primitive(kind, dtype)(ids, blocks)


def _no_gradient(ids: Tensor, blocks: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    return ops.zeros_like(ids), ops.zeros_like(blocks)


@Operators
def operators(kind: str, dtype: mindspore.Type = mindspore.float16) -> Operator:
    return custom_op(
        _LIBRARY.GgufEmbeddingForward,
        "ids(*B, dtype=index), blocks(N, R, dtype=uint8) -> out",
        infer=_infer,
        gradient=_no_gradient,
        kind=kind_of(_NAME, kind),
        dtype=dtype_of(_NAME, dtype),
    )


def _infer(ids: Spec, blocks: Spec, kind: int, dtype: int) -> Spec:
    return Spec((*ids.shape, columns_of(blocks, kind)), FLOATS[dtype])
