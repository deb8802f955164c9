"""Holds what `patch_mindspore` puts in place of MindSpore's operators of codes, which run on Ascend alone.

MindSpore documents the arguments and outputs, as in `help(mindspore.ops.auto_generate.WeightQuantBatchMatmul)`. Ascend
adds its offset to codes, where msops subtracts a zero point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.core.settings import integer
from msops.core.spec import FLOATS, dtype_name
from msops.operators.int8_matmul import int8_matmul
from msops.operators.quantize_rows import quantize_rows
from msops.operators.weight_quant_matmul import weight_quant_matmul

from .replacement import Replacement, refuse_given

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description


_FOUR_BITS = getattr(mindspore, "qint4x2", None)  # MindSpore before 2.3 lacks it


def weight_quant_batch_matmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Any = None,
    quant_offset: Any = None,
    bias: Tensor | None = None,
    transpose_x: bool = False,
    transpose_weight: bool = False,
    antiquant_group_size: int = 0,
) -> Tensor:
    """Returns x (code + offset) scale + bias."""
    name = "WeightQuantBatchMatmul"
    refuse_given(name, "quant_scale", quant_scale is not None)
    refuse_given(name, "quant_offset", quant_offset is not None)
    if transpose_x:
        x = ops.swapaxes(x, -1, -2)
    is_packed, weight = weight.dtype == _FOUR_BITS, bytes_of(weight)
    described = describe(x), describe(weight), describe(antiquant_scale)
    plan = _plan(name, *described, is_packed, transpose_weight, antiquant_group_size)
    scale, zero_point = _scales(antiquant_scale, x, plan), None
    if antiquant_offset is not None:
        zero_point = -ops.cast(_scales(antiquant_offset, x, plan), scale.dtype)
    if bias is not None:
        bias = ops.cast(bias.reshape((-1,)), x.dtype if bias.dtype != mindspore.float32 else bias.dtype)
    return weight_quant_matmul(x, weight, scale, zero_point, bias, plan.bits, plan.group, transpose_weight)


class WeightQuantBatchMatmul(Replacement):
    """Calls weight_quant_batch_matmul with the settings that it was made with."""

    def __init__(
        self, transpose_x: bool = False, transpose_weight: bool = False, antiquant_group_size: int = 0
    ) -> None:
        self.transpose_x, self.transpose_weight = transpose_x, transpose_weight
        self.antiquant_group_size = antiquant_group_size

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        antiquant_scale: Tensor,
        antiquant_offset: Tensor | None = None,
        quant_scale: Any = None,
        quant_offset: Any = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        return weight_quant_batch_matmul(
            *(x, weight, antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias),
            *(self.transpose_x, self.transpose_weight, self.antiquant_group_size),
        )


def quant_batch_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Any = None,
    bias: Tensor | None = None,
    pertokenScaleOptional: Tensor | None = None,  # noqa: N803 (MindSpore's name)
    transpose_x1: bool = False,
    transpose_x2: bool = False,
    dtype: mindspore.Type = mindspore.float16,
) -> Tensor:
    """Returns the product of two matrices of int8, plus a bias, times scales."""
    name = "QuantBatchMatmul"
    refuse_given(name, "offset", offset is not None)
    _check_results(name, dtype, describe(x2))
    if transpose_x1:
        x1 = ops.swapaxes(x1, -1, -2)
    scale = decoded_scale(scale).reshape((-1,))
    if pertokenScaleOptional is not None:
        pertokenScaleOptional = ops.cast(pertokenScaleOptional, mindspore.float32).reshape(x1.shape[:-1])  # noqa: N806
    if bias is not None:
        bias = bias.reshape((-1,))
        if bias.dtype != mindspore.int32:
            bias = ops.cast(bias, mindspore.float32)
    return int8_matmul(x1, x2, scale, pertokenScaleOptional, bias, transpose_x2, dtype)


class QuantBatchMatmul(Replacement):
    """Calls quant_batch_matmul with the settings that it was made with."""

    def __init__(
        self, transpose_x1: bool = False, transpose_x2: bool = False, dtype: mindspore.Type = mindspore.float16
    ) -> None:
        self.transpose_x1, self.transpose_x2, self.dtype = transpose_x1, transpose_x2, dtype

    def __call__(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        offset: Any = None,
        bias: Tensor | None = None,
        pertokenScaleOptional: Tensor | None = None,  # noqa: N803
    ) -> Tensor:
        return quant_batch_matmul(
            *(x1, x2, scale, offset, bias, pertokenScaleOptional), self.transpose_x1, self.transpose_x2, self.dtype
        )


class QuantV2(Replacement):
    """Rounds x scale + offset to int8, halves to even. With an offset of int8 it is x / scale + offset.

    MindSpore documents the former. Ascend's other kernel, which MindSpore runs for an offset of int8, divides, and
    golden-stick gives the inverse scale to the former alone.
    """

    def __call__(
        self,
        x: Tensor,
        scale: Tensor,
        offset: Tensor,
        sqrt_mode: bool = False,
        rounding_mode: str = "ROUND",
        dst_type: mindspore.Type = mindspore.int8,
    ) -> Tensor:
        _check_rounding(sqrt_mode, rounding_mode, dst_type)
        x, scale, zero = (ops.cast(each, mindspore.float32) for each in (x, scale, offset))
        codes = ops.round((x / scale if offset.dtype == mindspore.int8 else x * scale) + zero)
        return ops.cast(ops.maximum(ops.minimum(codes, 127.0), -128.0), mindspore.int8)


class DynamicQuantExt(Replacement):
    """Calls quantize_rows."""

    def __call__(self, x: Tensor, smooth_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return quantize_rows(x, smooth_scales)


class _Plan(NamedTuple):
    """Says how the codes of a weight lie, and what to do to their scales."""

    bits: int
    group: int | None
    scales: tuple[int, int]  # the shape of scales
    repeats: tuple[int, int]  # how often a scale is repeated along each axis
    swaps: bool  # whether the axes of scales are swapped at last


@once
def _plan(
    name: str,
    x: Description,
    weight: Description,
    scale: Description,
    is_packed: bool,
    transpose_weight: bool,
    antiquant_group_size: int,
) -> _Plan:
    for argument, (shape, kind) in (("x", x), ("weight", weight), ("antiquant_scale", scale)):
        if shape is None:
            raise TypeError(f"{name}: {argument} must be a Tensor, got {getattr(kind, '__name__', kind)}")
    if weight[1] not in (mindspore.int8, mindspore.uint8):
        raise NotImplementedError(f"{name}: weight must be int8, which may hold two codes of 4 bits, got {weight[1]}")
    require_floats(name, scale)
    if len(weight[0]) != 2:
        raise NotImplementedError(f"{name}: msops has no batched weights, got shape {weight[0]}")
    group = integer(name, "antiquant_group_size", antiquant_group_size)
    terms, given = x[0][-1], scale[0]
    groups = -(-terms // group) if group else 1
    rows, columns = weight[0]
    if transpose_weight:
        outputs, bits = rows, 8 if columns == terms else 4
    else:
        of_scale = given[-1] if len(given) and given[-1] > 1 else columns * (2 if is_packed else 1)
        outputs, bits = of_scale, 8 if columns == of_scale else 4
    if given in ((1,), (1, 1)):
        shape, repeats = (1, 1), (groups, outputs)
    elif len(given) == 2 and given == (outputs, groups) and given != (groups, outputs):
        # Transposed scales stand in rows of outputs already.
        return _Plan(bits, group or None, given, (1, 1), not transpose_weight)
    elif given in ((outputs,), (1, outputs)) and groups == 1:
        shape, repeats = (1, outputs), (1, 1)
    elif given == (groups, outputs):
        shape, repeats = given, (1, 1)
    else:
        wanted = (groups, outputs) if group else (outputs,)
        raise ValueError(f"{name}: antiquant_scale must have shape {wanted}, got {given}")
    return _Plan(bits, group or None, shape, repeats, transpose_weight)


def _scales(scale: Tensor, x: Tensor, plan: _Plan) -> Tensor:
    """Returns scales or offsets as weight_quant_matmul takes them."""
    scale = scale.reshape(plan[2])
    if plan[3] != (1, 1):
        scale = ops.tile(scale, plan[3])
    if plan[4]:
        scale = ops.swapaxes(scale, 0, 1)
    return scale if scale.dtype == mindspore.float32 else ops.cast(scale, x.dtype)


def bytes_of(weight: Tensor) -> Tensor:
    """Returns codes as int8. MindSpore's qint4x2, which no operator takes on GPU or CPU, has two codes in a byte."""
    return weight.view(mindspore.int8) if weight.dtype == _FOUR_BITS else weight


def decoded_scale(scale: Tensor) -> Tensor:
    """Returns scales of float32. Those of int64 and uint64 have the bits of a float32 in their lower half."""
    if scale.dtype not in (mindspore.int64, mindspore.uint64):
        return ops.cast(scale, mindspore.float32)
    bits = ops.bitwise_and(ops.cast(scale, mindspore.int64), Tensor(0xFFFFFFFF, mindspore.int64))
    exponent = ops.bitwise_and(bits // 2**23, Tensor(0xFF, mindspore.int64))
    mantissa = ops.bitwise_and(bits, Tensor(0x7FFFFF, mindspore.int64))
    whole = ops.select(exponent > 0, mantissa + 2**23, mantissa)
    exponent = ops.maximum(exponent, Tensor(1, mindspore.int64)) - 150
    size = ops.pow(Tensor(2.0, mindspore.float64), ops.cast(exponent, mindspore.float64))
    sign = ops.select(bits >= 2**31, ops.full_like(size, -1.0), ops.ones_like(size))
    return ops.cast(sign * ops.cast(whole, mindspore.float64) * size, mindspore.float32)


def require_floats(name: str, scale: Description) -> None:
    if scale[1] not in FLOATS:
        raise NotImplementedError(f"{name}: antiquant_scale must be of floats, got {scale[1]}")


@once
def _check_results(name: str, dtype: mindspore.Type, x2: Description) -> None:
    if dtype not in FLOATS[:2]:
        got = dtype_name(dtype) if isinstance(dtype, mindspore.common.dtype.typing.Number) else dtype
        raise NotImplementedError(f"{name}: msops has results of float16 and float32, got {got}")
    if x2[0] is not None and len(x2[0]) != 2:
        raise NotImplementedError(f"{name}: msops has no batched weights, got x2 of shape {x2[0]}")


@once
def _check_rounding(sqrt_mode: bool, rounding_mode: str, dst_type: mindspore.Type) -> None:
    if sqrt_mode:
        raise NotImplementedError("QuantV2: msops has no sqrt_mode")
    if str(rounding_mode).upper() != "ROUND":
        raise NotImplementedError(f"QuantV2: rounding_mode must be 'ROUND', got {rounding_mode!r}")
    if dst_type != mindspore.int8:
        raise NotImplementedError(f"QuantV2: dst_type must be int8, got {dst_type}")
