from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import Zero, initializer

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present, widened
from msops.core.library import of_package
from msops.shared.gguf import KINDS, bytes_of, columns_of, kind_of

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "gguf_matmul"
_LIBRARY = of_package(_NAME)


def gguf_matmul(x: Tensor, blocks: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    r"""Multiplies by a weight whose rows are blocks as they lie in a GGUF file. The weight is never unpacked in memory.

    .. math::
        \text{out} = x\, W^T + \text{bias}

    where :math:`W` is :func:`msops.gguf_dequantize` of `blocks` . Beside float16, kernels for many rows of x round it
    to float16. x is multiplied as it is, and not rounded to 8 bits. Sums are in float32, or in float64 beside float64;
    the bias is added before they are rounded once. Equal rows of x give equal bits. On GPUs, an infinite number in a
    row of x may give NaN in all of its results. The inputs x and `bias` have gradients, of first order; the weight is
    not trained.

    Args:
        x (Tensor): Shape (..., K); float16, float32 or float64.
        blocks (Tensor): Shape (M, R): R bytes of each row, which are whole blocks of K numbers; uint8.
        kind (str): ``"Q4_0"`` , ``"Q4_1"`` , ``"Q8_0"`` , ``"Q4_K"`` , ``"Q5_K"`` or ``"Q6_K"`` , as in
            :func:`msops.gguf_dequantize` .
        bias (Tensor): Shape (M,), the dtype of x or float32. Default: ``None`` , no bias.

    Returns:
        Tensor of shape (..., M) with the dtype of x.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or `kind` is not a str.
        ValueError: If an input has another shape, rows are not whole blocks, or `kind` is another str.

    Source:
        GGUF and ggml, https://github.com/ggml-org/ggml.

    Examples:
        >>> import mindspore, msops, numpy as np
        >>> from mindspore import ops
        >>> scales = np.array([[0.5], [2]], np.float16).view(np.uint8)
        >>> blocks = np.concatenate([scales, np.arange(64, dtype=np.uint8).reshape(2, 32)], 1)
        >>> print(msops.gguf_matmul(ops.ones((1, 32)), mindspore.Tensor(blocks), "Q8_0"))
        [[ 248. 3040.]]
    """
    multiply = operators.primitive(kind, bias is not None)
    return multiply(x, blocks, *present((widened(bias, x),)))


class GGUFMatmul(nn.Cell):
    r"""A layer whose weight is blocks as they lie in a GGUF file. See :func:`msops.gguf_matmul`.

    Args:
        in_channels (int): K, the length of rows of x: a multiple of the numbers in a block.
        out_channels (int): M, the length of the results' rows.
        kind (str): ``"Q4_0"`` , ``"Q4_1"`` , ``"Q8_0"`` , ``"Q4_K"`` , ``"Q5_K"`` or ``"Q6_K"`` .
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        dtype (mindspore.dtype): The dtype of the bias: float16, float32 or float64. Default: ``mindspore.float16`` .

    Inputs:
        - **x** (Tensor) - Shape (..., K).

    Attributes:
        blocks (Parameter): Shape (M, bytes of a row), uint8, which begins as zeros and is not trained. Set it by
            ``blocks.set_data(mindspore.Tensor(bytes_of_the_file))`` .
        bias (Parameter): Shape (M,), zeros, or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.GGUFMatmul(512, 16, "Q6_K")
        >>> print(net.blocks.shape, net(ops.ones((3, 512), mindspore.float16)).shape)
        (16, 420) (3, 16)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kind: str,
        has_bias: bool = False,
        dtype: mindspore.Type = mindspore.float16,
    ) -> None:
        name = "GGUFMatmul"
        super().__init__()
        kind_of(name, kind)
        row = bytes_of(name, "in_channels", in_channels, kind)
        self.in_channels, self.kind = int(in_channels), kind
        self.out_channels = settings.positive(name, "out_channels", out_channels)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        self.forward_op = operators.primitive(kind, self.has_bias)
        zeros = initializer(Zero(), (self.out_channels, row), mindspore.uint8)
        self.blocks = Parameter(zeros, name="blocks", requires_grad=False)
        bias = settings.parameter(name, "bias", "zeros", (self.out_channels,), dtype)
        self.bias = bias if self.has_bias else None

    def construct(self, x: Tensor) -> Tensor:
        return self.forward_op(x, self.blocks, *present((widened(self.bias, x),)))

    construct.__doc__ = gguf_matmul.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "in_channels", "out_channels", "kind", "has_bias")


@Operators
def operators(kind: str) -> Operator:
    attribute = kind_of(_NAME, kind)
    size, numbers = KINDS[kind]
    tensors = "blocks(M, R, dtype=uint8), bias(M, dtype=common|float32)?"
    backward = custom_op(
        _LIBRARY.GgufMatmulBackward,
        f"dout(*B, M), {tensors} -> dx(*B, R // {size} * {numbers}), dbias(M, dtype=bias)?",
        kind=attribute,
    )
    return custom_op(
        _LIBRARY.GgufMatmulForward, f"x(*B, K), {tensors} -> out", infer=_infer, gradient=backward, kind=attribute
    )


def _infer(x: Spec, blocks: Spec, bias: Spec | None, kind: int) -> Spec:
    columns = columns_of(blocks, kind)
    if x.shape[-1] != columns:
        raise ValueError(
            f"x must have rows of {columns} numbers, as many as the {blocks.shape[1]} bytes of blocks' rows have, "
            f"got {x.shape[-1]}"
        )
    return x._replace(shape=(*x.shape[:-1], blocks.shape[0]))
