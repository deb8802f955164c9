from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor, nn, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present, widened
from msops.core.library import of_package
from msops.core.spec import FLOATS, dtype_name
from msops.quantization import check_bits, check_group, quantize_weight

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "weight_quant_matmul"
_LIBRARY = of_package(_NAME)


def weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    bits: int = 8,
    group: int | None = None,
    transpose_weight: bool = True,
    codebook: Tensor | None = None,
) -> Tensor:
    r"""Multiplies rows by a matrix whose numbers are codes of 4 or 8 bits, with a scale for each group of neighbours.

    .. math::
        \text{out} = x W^T + \text{bias}, \qquad
        W_{m,j} = (\text{code}_{m,j} - \text{zero\_point}_{m,g})\, \text{scale}_{m,g}, \qquad
        g = \lfloor j / \text{group} \rfloor

    With a `codebook` , the first factor is ``codebook[code]`` instead, as for NF4. :func:`msops.quantize_weight` makes
    codes of a matrix, and :func:`msops.dequantize_weight` makes W of them.

    Two codes of 4 bits are a byte: that of column 2i is in the lower half of byte i, that of column 2i + 1 in the upper
    half. Where the number of columns is odd, the last upper half is not read. Codes in uint8 are 0 to
    :math:`2^{\text{bits}} - 1` , and those in int8 are two's complement.

    W is computed in float32 (float64 beside float64), and may be rounded to the dtype of x, as may the numbers of a
    codebook. Sums are in float32 (float64), and the bias is added before they are rounded once. Equal rows of a call
    have equal bits. On GPUs, an infinite number in a row of x may give NaN in all of its results. The inputs x and bias
    have gradients, of first order; the others get zeros.

    Args:
        x (Tensor): Shape (..., K); float16, float32 or float64.
        weight (Tensor): The codes: shape (M, K), or (M, ceil(K / 2)) for 4 bits; uint8, or int8 without a `codebook` .
            Without `transpose_weight` , shape (K, M) or (K, ceil(M / 2)): pairs are along M.
        scale (Tensor): Shape (M, G), where G is ceil(K / group): the last group may have fewer numbers. float32 or the
            dtype of x. Without `transpose_weight` , shape (G, M). Where `group` is None, also (M,).
        zero_point (Tensor): The code that stands for 0: the shape of `scale` , and the dtype of `weight` or `scale` .
            Default: ``None`` , all 0.
        bias (Tensor): Shape (M,); the dtype of x or float32. Default: ``None`` , no bias.
        bits (int): The size of a code: 4 or 8. Default: ``8`` .
        group (int): How many neighbours along K share a scale. Default: ``None`` , all: G is 1.
        transpose_weight (bool): Whether the rows of `weight` belong to outputs, which is the faster way for few rows of
            x. Default: ``True`` .
        codebook (Tensor): Shape (2^bits,): the number that each code stands for; float32. It excludes `zero_point` .
            Default: ``None`` .

    Returns:
        Tensor of shape (..., M) with the dtype of x.

    Raises:
        TypeError: If an argument has a wrong type, or the dtypes do not fit.
        ValueError: If an argument has a wrong shape or value, or both `zero_point` and `codebook` are given.

    Source:
        Frantar et al., "MARLIN: mixed-precision auto-regressive parallel inference on large language models", 2024, and
        Dettmers et al., "QLoRA: efficient finetuning of quantized LLMs", 2023, which has the codebook NF4.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> codes = mindspore.Tensor([[0x98, 0xBA]], mindspore.uint8)  # 8, 9, 10, 11
        >>> scale, zero_point = mindspore.Tensor([[0.5, 1.0]]), mindspore.Tensor([[8, 9]], mindspore.uint8)
        >>> print(msops.weight_quant_matmul(x, codes, scale, zero_point, bits=4, group=2))
        [[12.]]
    """
    if group is None:
        scale = _as_matrix(scale, transpose_weight)
        zero_point = None if zero_point is None else _as_matrix(zero_point, transpose_weight)
    multiply = operators.primitive(
        bits, group, transpose_weight, zero_point is not None, codebook is not None, bias is not None
    )
    return multiply(x, weight, scale, *present((zero_point, codebook, widened(bias, x))))


def _as_matrix(scale: Tensor, transpose_weight: bool) -> Tensor:
    """Gives a vector of scales the axis of their one group."""
    if isinstance(scale, Tensor) and len(scale.shape) == 1:
        return ops.reshape(scale, (-1, 1) if transpose_weight else (1, -1))
    return scale


def _fitting(scale: Tensor, x: Tensor) -> Tensor:
    """Casts scales or a bias to the dtype of x, unless they are of float32."""
    if not isinstance(x, Tensor) or scale.dtype in (x.dtype, mindspore.float32):
        return scale
    return ops.cast(scale, x.dtype)


class WeightQuantMatmul(nn.Cell):
    r"""A linear layer whose matrix is codes of 4 or 8 bits. See :func:`msops.weight_quant_matmul`.

    ``WeightQuantMatmul.from_weight(weight, bias=None, bits=4, group=128, symmetric=False)`` makes one of the matrix
    (M, K) of a linear layer, such as that of ``nn.Dense`` : it rounds to nearest, as :func:`msops.quantize_weight`
    does, and the scales have the matrix's dtype. A new layer has zeros, for a checkpoint to be loaded.

    The bias alone is trainable.

    Args:
        in_channels (int): K, the length of rows.
        out_channels (int): M, the length of the results' rows.
        bits (int): The size of a code: 4 or 8. Default: ``4`` .
        group (int): How many neighbours along K share a scale, or None for all. Default: ``128`` .
        has_zero_point (bool): Whether there are zero points, and so codes in uint8; else they are in int8. Default:
            ``True`` .
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        transpose_weight (bool): Whether the rows of `weight` belong to outputs. Default: ``True`` .
        dtype (mindspore.dtype): The dtype of scales and bias: float16, float32 or float64. They are cast to that of x
            unless it is float32. Default: ``mindspore.float16`` .

    Inputs:
        - **x** (Tensor) - Shape (..., K).

    Attributes:
        weight (Parameter): The codes: shape (M, K) or (M, ceil(K / 2)); transposed without `transpose_weight` .
        scale (Parameter): Shape (M, G), or (G, M) without `transpose_weight` .
        zero_point (Parameter): The shape of `scale` , or None.
        bias (Parameter): Shape (M,), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import nn, ops
        >>> dense = nn.Dense(256, 8)
        >>> net = msops.WeightQuantMatmul.from_weight(dense.weight, dense.bias)
        >>> print(net(ops.ones((3, 256))).shape, net.weight.shape, net.scale.shape)
        (3, 8) (8, 128) (8, 2)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        bits: int = 4,
        group: int | None = 128,
        has_zero_point: bool = True,
        has_bias: bool = False,
        transpose_weight: bool = True,
        dtype: mindspore.Type = mindspore.float16,
    ) -> None:
        name = "WeightQuantMatmul"
        super().__init__()
        self.in_channels = settings.positive(name, "in_channels", in_channels)
        self.out_channels = settings.positive(name, "out_channels", out_channels)
        self.bits, self.group = check_bits(name, bits), check_group(name, group)
        self.has_zero_point = settings.boolean(name, "has_zero_point", has_zero_point)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        self.transpose_weight = settings.boolean(name, "transpose_weight", transpose_weight)
        self.forward_op = operators.primitive(bits, group, transpose_weight, has_zero_point, False, has_bias)
        groups = 1 if group is None else -(-in_channels // group)
        rows, columns = (out_channels, in_channels) if transpose_weight else (in_channels, out_channels)
        scales = (out_channels, groups) if transpose_weight else (groups, out_channels)
        codes = (rows, columns if bits == 8 else -(-columns // 2))
        kind = mindspore.uint8 if has_zero_point else mindspore.int8
        self.weight = Parameter(ops.zeros(codes, kind), name="weight", requires_grad=False)
        self.scale = settings.parameter(name, "scale", "zeros", scales, dtype)
        self.scale.requires_grad = False
        self.zero_point = None
        if has_zero_point:
            self.zero_point = Parameter(ops.zeros(scales, kind), name="zero_point", requires_grad=False)
        self.bias = settings.parameter(name, "bias", "zeros", (out_channels,), dtype) if has_bias else None

    @classmethod  # level O1 evaluates what follows ->, in a module where this class has another name
    def from_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        bits: int = 4,
        group: int | None = 128,
        symmetric: bool = False,
    ) -> "WeightQuantMatmul":  # noqa: UP037
        """Makes a layer of a matrix (M, K), whose dtype the scales and the bias have."""
        name = "WeightQuantMatmul"
        if not isinstance(weight, Tensor):
            raise TypeError(f"{name}: weight must be a Tensor, got {type(weight).__name__}")
        if weight.dtype not in FLOATS:
            raise TypeError(f"{name}: weight must be float16, float32 or float64, got {dtype_name(weight.dtype)}")
        if len(weight.shape) != 2:
            raise ValueError(f"{name}: weight must have shape (M, K), got {weight.shape}")
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
            got = bias.shape if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"{name}: bias must be a Tensor of shape (M,) = {weight.shape[:1]}, got {got}")
        codes, scale, zero_point = quantize_weight(weight, bits, group, symmetric)
        net = cls(weight.shape[1], weight.shape[0], bits, group, not symmetric, bias is not None, dtype=weight.dtype)
        net.weight.set_data(codes)
        net.scale.set_data(scale.astype(weight.dtype))
        if net.zero_point is not None and zero_point is not None:
            net.zero_point.set_data(zero_point)
        if net.bias is not None and bias is not None:
            net.bias.set_data(Tensor(bias.asnumpy()).astype(weight.dtype))
        return net

    def construct(self, x: Tensor) -> Tensor:
        scale, zero_point, bias = _fitting(self.scale, x), self.zero_point, self.bias
        if bias is not None:
            bias = _fitting(bias, x)
        return self.forward_op(*present((x, self.weight, scale, zero_point, bias)))

    construct.__doc__ = weight_quant_matmul.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(
            self, "in_channels", "out_channels", "bits", "group", "has_zero_point", "has_bias", "transpose_weight"
        )


@Operators
def operators(
    bits: int, group: int | None, transpose_weight: bool, has_zero_point: bool, has_codebook: bool
) -> Operator:
    check_bits(_NAME, bits)
    check_group(_NAME, group)
    transposes = int(settings.boolean(_NAME, "transpose_weight", transpose_weight))
    if has_zero_point and has_codebook:
        raise ValueError(f"{_NAME}: zero_point and codebook exclude each other, got both")
    rows, columns = ("M", "K") if transposes else ("K", "M")
    groups = "1" if group is None else f"(K + {group - 1}) // {group}"
    sizes = f"M, {groups}" if transposes else f"{groups}, M"
    columns = columns if bits == 8 else f"({columns} + 1) // 2"
    inputs = [
        f"x(*S, K), weight({rows}, {columns}, dtype={'uint8' if has_codebook else 'uint8|int8'})",
        f"scale({sizes}, dtype=common|float32)",
        *[f"zero_point({sizes}, dtype=weight|scale)"] * has_zero_point,
        *[f"codebook({2**bits}, dtype=float32)"] * has_codebook,
        "bias(M, dtype=common|float32)?",
    ]
    attributes: dict[str, Any] = {
        "bits": int(bits),
        "group": 0 if group is None else int(group),
        "transpose_weight": transposes,
        "has_zero_point": int(has_zero_point),
        "has_codebook": int(has_codebook),
    }
    backward = custom_op(
        _LIBRARY.WeightQuantMatmulBackward,
        f"{', '.join(inputs)}, dout(*S, M) -> dx(*S, K), dbias(M, dtype=bias)?",
        **attributes,
    )
    return custom_op(
        _LIBRARY.WeightQuantMatmulForward, f"{', '.join(inputs)} -> out(*S, M)", gradient=backward, **attributes
    )
