"""Multiplies groups of rows by matrices of codes, each group by its own, as MindSpore's `GroupedMatmul` does.

Ascend adds its offset to codes, where msops subtracts a zero point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.core.spec import dtype_name
from msops.operators.grouped_matmul import grouped_matmul as multiply

from .quantized import bytes_of, decoded_scale, quant_batch_matmul, require_floats, weight_quant_batch_matmul

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msops.core.inputs import Description

    Tensors = Sequence[Tensor]


def products_with_codes(
    name: str,
    x: Tensors,
    weight: Tensors,
    bias: Tensors | None,
    scales: tuple[Tensors, Tensors | None],
    sizes: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, ...]:
    """Returns x (code + offset) scale + bias. `scales` are the lists of scales and offsets."""
    scale, offset = scales
    results = ()  # type: tuple[Tensor, ...]
    if sizes is not None:
        matrices = _matrices(name, x[0], weight[0], scale[0], None if offset is None else offset[0], transposed)
        return (multiply(x[0], matrices, sizes, None if bias is None else bias[0]),)
    for i in range(len(x)):
        own = (x[i], weight[i], scale[i], None if offset is None else offset[i])
        results += (weight_quant_batch_matmul(*own, None, None, None if bias is None else bias[i], False, transposed),)
    return results


def products_of_int8(
    name: str,
    x: Tensors,
    weight: Tensors,
    bias: Tensors | None,
    scales: tuple[Tensors, Tensors | None],
    sizes: Tensor | None,
    transposed: bool,
    dtype: mindspore.Type | None,
) -> tuple[Tensor, ...]:
    """Returns (x weight + bias) scale, times the scale of each row. Sums are exact: float64 holds them."""
    scale, of_rows = scales
    dtype = mindspore.float16 if dtype is None else dtype
    results = ()  # type: tuple[Tensor, ...]
    for i in range(len(x)):
        _check_int8(name, describe(x[i]), describe(weight[i]), describe(scale[i]), transposed, dtype)
        own = (None if bias is None else bias[i], None if of_rows is None else of_rows[i])
        if sizes is None:
            results += (quant_batch_matmul(x[i], weight[i], scale[i], None, *own, False, transposed, dtype),)
        else:
            if bias is not None:
                _check_bias(name, describe(bias[i]))
            results += (_product_of_groups(x[i], weight[i], scale[i], *own, sizes, transposed, dtype),)
    return results


def _product_of_groups(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    of_rows: Tensor | None,
    sizes: Tensor,
    transposed: bool,
    dtype: mindspore.Type,
) -> Tensor:
    x, weight = ops.cast(x, mindspore.float64), ops.cast(weight, mindspore.float64)
    sums = multiply(x, weight, sizes, None if bias is None else ops.cast(bias, mindspore.float64), transposed)
    scale = ops.cast(decoded_scale(scale), mindspore.float64).expand_dims(1)
    sums = sums * multiply(ops.ones_like(x[:, :1]), scale, sizes)  # the scales of each row's group
    if of_rows is not None:
        sums = sums * ops.cast(of_rows, mindspore.float64).reshape((-1, 1))
    return ops.cast(sums, dtype)


class _Plan(NamedTuple):
    """Says how the codes (E, K, N) of all groups lie, and the shapes in which scales fit them."""

    is_packed: bool
    codes: tuple[int, int, int, int]  # E, G, K / G, N
    scales: tuple[int, int, int, int]  # E, G, 1, N


def _matrices(name: str, x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, transposed: bool) -> Tensor:
    """Returns the matrices of all groups, (E, K, N), in the dtype of x."""
    weight = bytes_of(weight)
    plan = _plan(name, describe(x), describe(weight), describe(scale), transposed)
    codes = weight
    if plan.is_packed:
        pairs = ops.cast(weight, mindspore.int32)
        low = ops.bitwise_xor(ops.bitwise_and(pairs, 15), 8) - 8
        high = ops.bitwise_xor(ops.bitwise_and(ops.bitwise_right_shift(pairs, 4), 15), 8) - 8
        codes = ops.stack((low, high), -1).reshape((*weight.shape[:2], -1))
    if transposed:
        codes = ops.swapaxes(codes, 1, 2)
    dtype = mindspore.float64 if x.dtype == mindspore.float64 else mindspore.float32
    numbers = ops.cast(codes, dtype).reshape(plan.codes)
    if offset is not None:
        numbers = numbers + ops.cast(offset, dtype).reshape(plan.scales)
    numbers = numbers * ops.cast(scale, dtype).reshape(plan.scales)
    experts, groups, terms, columns = plan.codes
    return ops.cast(numbers, x.dtype).reshape((experts, groups * terms, columns))


@once
def _plan(name: str, x: Description, weight: Description, scale: Description, transposed: bool) -> _Plan:
    (x_shape, dtype), (shape, kind), (given, _) = x, weight, scale
    if dtype == mindspore.int8:
        raise NotImplementedError(f"{name}: with antiquant_scale, x must be float16, float32 or float64, got int8")
    if kind != mindspore.int8 or shape is None or len(shape) != 3:
        raise NotImplementedError(
            f"{name}: with antiquant_scale, weight must be int8 of three axes, with one or two codes in a byte, got "
            f"{kind} of shape {shape}"
        )
    require_floats(name, scale)
    terms, columns = x_shape[-1], given[-1]
    wanted = (shape[0], columns, terms) if transposed else (shape[0], terms, columns)
    is_packed = shape == (*wanted[:2], wanted[2] // 2) and wanted[2] % 2 == 0
    groups = given[1] if len(given) == 3 else 1
    if shape != wanted and not is_packed:
        raise ValueError(f"{name}: weight must have shape {wanted}, or half of the last axis for 4 bits, got {shape}")
    if len(given) not in (2, 3) or given[0] != shape[0] or terms % max(1, groups):
        raise ValueError(
            f"{name}: antiquant_scale must have shape ({shape[0]}, N) or ({shape[0]}, G, N), where G divides {terms}, "
            f"got {given}"
        )
    return _Plan(is_packed, (shape[0], groups, terms // max(1, groups), columns), (shape[0], groups, 1, columns))


@once
def _check_int8(
    name: str, x: Description, weight: Description, scale: Description, transposed: bool, dtype: mindspore.Type
) -> None:
    if x[1] != mindspore.int8 or weight[1] != mindspore.int8:
        raise NotImplementedError(f"{name}: with scale, x and weight must be int8, got {x[1]} and {weight[1]}")
    halves = 2 * weight[0][-1], x[0][-1] if transposed else scale[0][-1]
    if halves[0] == halves[1] and halves[1] > 0:
        raise NotImplementedError(f"{name}: msops multiplies int8 by int8, not by codes of 4 bits")
    if dtype not in (mindspore.float16, mindspore.float32):
        raise NotImplementedError(f"{name}: output_dtype must be float16 or float32, got {dtype_name(dtype)}")


@once
def _check_bias(name: str, bias: Description) -> None:
    if bias[1] != mindspore.int32:
        raise NotImplementedError(f"{name}: bias must be int32 with scale, which multiplies it, got {bias[1]}")
