from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import mindspore
from mindspore import Tensor, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "int8_matmul"
_LIBRARY = of_package(_NAME)


def int8_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    transpose_weight: bool = True,
    dtype: mindspore.Type = mindspore.float16,
) -> Tensor:
    r"""Multiplies rows of int8 by a matrix of int8, and the exact sums by scales.

    .. math::
        \text{out}_{n,m} = (\Sigma_{n,m} + \text{bias}_m)\, \text{scale}_m\, \text{x\_scale}_n, \qquad
        \Sigma = x\, \text{weight}^T

    A bias of float32 is added to the product with the scales instead. The sums, with a bias of int32, are exact; then
    the results are computed in float32, and rounded once. Both devices give the same bits.
    :func:`msops.quantize_rows` makes x and its scales. There is no gradient.

    Args:
        x (Tensor): Shape (..., K); int8. K is less than 131072.
        weight (Tensor): Shape (M, K), or (K, M) without `transpose_weight` ; int8.
        scale (Tensor): Shape (M,) or (1,): a factor for each output, or one for all; float32.
        x_scale (Tensor): The shape of x without its last axis: a factor for each row; float32. Default: ``None`` ,
            all 1.
        bias (Tensor): Shape (M,); int32 or float32. Default: ``None`` , no bias.
        transpose_weight (bool): Whether the rows of `weight` belong to outputs. Default: ``True`` .
        dtype (mindspore.dtype): The result's dtype: float16 or float32. Default: ``mindspore.float16`` .

    Returns:
        Tensor of shape (..., M) with this dtype.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an input has another shape, or a gradient is wanted.

    Source:
        Xiao et al., "SmoothQuant: accurate and efficient post-training quantization for large language models", 2023.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor, int8
        >>> x, weight = Tensor([[1, 2], [3, -4]], int8), Tensor([[100, 100], [-128, 127]], int8)
        >>> print(msops.int8_matmul(x, weight, Tensor([0.5]), Tensor([1.0, 2.0])))
        [[ 150.   63.]
         [-100. -892.]]
    """
    scale = _for_outputs(scale, weight, transpose_weight)
    multiply = operators.primitive(transpose_weight, dtype, x_scale is not None, bias is not None)
    return multiply(x, weight, scale, *present((x_scale, bias)))


def _for_outputs(scale: Tensor, weight: Tensor, transpose_weight: bool) -> Tensor:
    """Repeats a single scale for each output."""
    if isinstance(scale, Tensor) and isinstance(weight, Tensor) and scale.shape == (1,) and len(weight.shape) == 2:
        return ops.tile(scale, (weight.shape[0 if transpose_weight else 1],))
    return scale


def _no_gradient(*_: object) -> NoReturn:
    raise ValueError(f"{_NAME}: it is for inference and has no gradient")


@Operators
def operators(transpose_weight: bool, dtype: mindspore.Type) -> Operator:
    transposes = int(settings.boolean(_NAME, "transpose_weight", transpose_weight))
    if dtype not in (mindspore.float16, mindspore.float32):
        raise TypeError(f"{_NAME}: dtype must be float16 or float32, got {dtype}")
    weight = "weight(M, K, dtype=int8)" if transposes else "weight(K, M, dtype=int8)"
    return custom_op(
        _LIBRARY.Int8MatmulForward,
        f"x(*S, K, dtype=int8), {weight}, scale(M), x_scale(*S, dtype=float32)?, bias(M, dtype=int32|float32)? -> out",
        infer=_infer,
        gradient=_no_gradient,
        dtypes=(mindspore.float32,),
        transpose_weight=transposes,
        is_half=int(dtype == mindspore.float16),
    )


def _infer(
    x: Spec, weight: Spec, scale: Spec, x_scale: Spec | None, bias: Spec | None, transpose_weight: int, is_half: int
) -> Spec:
    if x.shape[-1] >= 131072:
        raise ValueError(f"K must be less than 131072, got {x.shape[-1]}")
    return Spec((*x.shape[:-1], scale.shape[0]), mindspore.float16 if is_half else mindspore.float32)
