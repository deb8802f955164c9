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

_NAME = "gguf_dequantize"
_LIBRARY = of_package(_NAME)


def gguf_dequantize(blocks: Tensor, kind: str, dtype: mindspore.Type = mindspore.float32) -> Tensor:
    r"""Returns the numbers of a weight whose rows are blocks as they lie in a GGUF file.

    .. math::
        W = \text{scale} \cdot \text{code} + \text{offset}

    as ggml defines it for each kind, in float32, rounded to `dtype`. A block has so many bytes and numbers:

    ====  =====  =======  ==============================================================================
    kind  bytes  numbers  what they are
    ====  =====  =======  ==============================================================================
    Q4_0  18     32       codes of 4 bits, from -8 to 7, with a scale
    Q4_1  20     32       codes of 4 bits with a scale and a minimum
    Q8_0  34     32       codes of 8 bits with a scale
    Q4_K  144    256      codes of 4 bits; each 32 have a scale and a minimum of 6 bits
    Q5_K  176    256      codes of 5 bits, likewise
    Q6_K  210    256      codes of 6 bits, from -32 to 31; each 16 have a scale of 8 bits
    ====  =====  =======  ==============================================================================

    Args:
        blocks (Tensor): Shape (..., R): R bytes of a row, which are whole blocks; uint8.
        kind (str): ``"Q4_0"`` , ``"Q4_1"`` , ``"Q8_0"`` , ``"Q4_K"`` , ``"Q5_K"`` or ``"Q6_K"`` .
        dtype (mindspore.dtype): float16, float32 or float64. Default: ``mindspore.float32`` .

    Returns:
        Tensor of shape (..., K), where K is the number of blocks in a row times their numbers. It has no gradient.

    Raises:
        TypeError: If `blocks` is not a Tensor of uint8, or another argument has a wrong type.
        ValueError: If rows are not whole blocks, or `kind` is another str.

    Source:
        GGUF and ggml, https://github.com/ggml-org/ggml.

    Examples:
        >>> import mindspore, msops, numpy as np
        >>> scale = np.array([0.5], np.float16).view(np.uint8)
        >>> block = np.concatenate([scale, np.arange(32, dtype=np.uint8)])
        >>> print(msops.gguf_dequantize(mindspore.Tensor(block), "Q8_0")[:4])
        [0.  0.5 1.  1.5]
    """
    return operators.primitive(kind, dtype)(blocks)


def _no_gradient(blocks: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
    return (ops.zeros_like(blocks),)


@Operators
def operators(kind: str, dtype: mindspore.Type = mindspore.float32) -> Operator:
    return custom_op(
        _LIBRARY.GgufDequantizeForward,
        "blocks(*B, R, dtype=uint8) -> out",
        infer=_infer,
        gradient=_no_gradient,
        kind=kind_of(_NAME, kind),
        dtype=dtype_of(_NAME, dtype),
    )


def _infer(blocks: Spec, kind: int, dtype: int) -> Spec:
    return Spec((*blocks.shape[:-1], columns_of(blocks, kind)), FLOATS[dtype])
