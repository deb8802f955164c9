from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator

_NAME = "quantize_rows"
_LIBRARY = of_package(_NAME)


def quantize_rows(x: Tensor, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Rounds each row to codes of int8 with a scale, such as the tokens that :func:`msops.int8_matmul` takes.

    .. math::
        y = x \cdot \text{smooth}, \qquad
        \text{scale} = \frac{\max |y|}{127}, \qquad
        \text{code} = \operatorname{round}\!\left(\frac{y}{\text{scale}}\right)

    All is computed in float32 (float64 beside float64), and halves are rounded to even. A row of zeros has the scale 0
    and codes of 0; so has a row whose scale is too small for float32. A row with NaN or infinity has the scale NaN or
    infinity, and codes of 0. Both devices give the same codes. There is no gradient.

    Args:
        x (Tensor): Shape (..., C); float16, float32 or float64.
        smooth (Tensor): Shape (C,): factors of the columns; the dtype of x or float32. Default: ``None`` , all 1.

    Returns:
        tuple of the codes, int8 of the shape of x, and the scales, float32 of that shape without its last axis.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes.
        ValueError: If an input has another shape, or a gradient is wanted.

    Source:
        Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at scale", 2022, and Xiao et al.,
        "SmoothQuant: accurate and efficient post-training quantization for large language models", 2023.

    Examples:
        >>> import mindspore, msops
        >>> codes, scale = msops.quantize_rows(mindspore.Tensor([[63.5, -20.0], [0.0, 0.0]]))
        >>> print(codes, scale)
        [[127 -40]
         [  0   0]] [0.5 0. ]
    """
    return operators.primitive(smooth is not None)(x, *present((smooth,)))


def _no_gradient(*_: object) -> NoReturn:
    raise ValueError(f"{_NAME}: it is for inference and has no gradient")


@Operators
def operators() -> Operator:
    return custom_op(
        _LIBRARY.QuantizeRowsForward,
        "x(*S, C), smooth(C, dtype=common|float32)? -> codes(*S, C, dtype=int8), scale(*S, dtype=float32)",
        gradient=_no_gradient,
    )
