"""Codes of few bits for the numbers of matrices. These functions are for the time before a network runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Tensor

from msops.core import settings
from msops.core.spec import FLOATS, dtype_name

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def check_bits(who: str, bits: int) -> int:
    """Requires the size of a code, and returns it."""
    if settings.integer(who, "bits", bits) not in (4, 8):
        raise ValueError(f"{who}: bits must be 4 or 8, got {bits}")
    return int(bits)


def check_group(who: str, group: int | None) -> int | None:
    """Requires the size of a group, or None for one group, and returns it."""
    if group is None:
        return None
    if settings.positive(who, "group", group) >= 2**31:
        raise ValueError(f"{who}: group must be less than 2^31, got {group}")
    return int(group)


def quantize_weight(
    weight: Tensor, bits: int = 4, group: int | None = 128, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Rounds a matrix to codes of 4 or 8 bits, with a scale for each group of neighbours, to nearest.

    .. math::
        \text{scale} = \frac{\max(w, 0) - \min(w, 0)}{2^{\text{bits}} - 1}, \qquad
        \text{zero\_point} = \operatorname{round}\!\left(\frac{-\min(w, 0)}{\text{scale}}\right), \qquad
        \text{code} = \operatorname{round}\!\left(\frac{w}{\text{scale}}\right) + \text{zero\_point}

    where max and min are those of a group of `group` neighbours in a row. With `symmetric` , the scale is
    :math:`\max|w| / (2^{\text{bits} - 1} - 1)` and there is no zero point. All is computed in float32, and halves are
    rounded to even. A group of zeros has the scale 1. Use it before a network runs: it computes with NumPy.

    Args:
        weight (Tensor): Shape (..., M, K); float16, float32 or float64. All numbers must be finite.
        bits (int): The size of a code: 4 or 8. Default: ``4`` .
        group (int): How many neighbours along K share a scale; the last group may have fewer. None is one group.
            Default: ``128`` .
        symmetric (bool): Whether codes are in int8, without zero points, or in uint8 with them. Default: ``False`` .

    Returns:
        tuple of the codes, of shape (..., M, K) or, for 4 bits, (..., M, ceil(K / 2)), as
        :func:`msops.weight_quant_matmul` takes them; the scales, of shape (..., M, ceil(K / group)) in float32; and the
        zero points, of the same shape in uint8, or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong shape or value.

    Examples:
        >>> import mindspore, msops
        >>> codes, scale, zero_point = msops.quantize_weight(mindspore.Tensor([[-1.5, 0.0, 0.5, 6.0]]))
        >>> print([hex(byte) for byte in codes.asnumpy()[0].tolist()], scale, zero_point)
        ['0x30', '0xf4'] [[0.5]] [[3]]
    """
    who = "quantize_weight"
    check_bits(who, bits)
    check_group(who, group)
    settings.boolean(who, "symmetric", symmetric)
    numbers = _matrix(who, "weight", weight, "(..., M, K)")
    if weight.dtype not in FLOATS:
        raise TypeError(f"{who}: weight must be float16, float32 or float64, got {dtype_name(weight.dtype)}")
    numbers = numbers.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{who}: weight must be finite, got {numbers[~np.isfinite(numbers)][0]}")
    grouped = _in_groups(numbers, group)
    low, high = (function(grouped, axis=-1, initial=0) for function in (np.min, np.max))
    most = np.float32(2 ** (bits - symmetric) - 1)
    with np.errstate(over="ignore"):
        span = np.maximum(-low, high) if symmetric else high - low
    if not np.isfinite(span).all():
        raise ValueError(f"{who}: weight must have a range that float32 holds")
    scale = span / most
    scale = np.where(scale > 0, scale, np.float32(1))
    codes = np.rint(grouped / scale[..., None])
    if symmetric:
        codes, zero_point = np.clip(codes, -most, most).astype(np.int8), None
    else:
        zero_point = np.clip(np.rint(-low / scale), 0, most)
        codes = np.clip(codes + zero_point[..., None], 0, most).astype(np.uint8)
    codes = codes.reshape(*numbers.shape[:-1], grouped.shape[-2] * grouped.shape[-1])[..., : numbers.shape[-1]]
    if bits == 4:
        codes = _packed(codes)
    return Tensor(codes), Tensor(scale), None if zero_point is None else Tensor(zero_point.astype(np.uint8))


def dequantize_weight(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bits: int = 8,
    group: int | None = None,
    transpose_weight: bool = True,
    codebook: Tensor | None = None,
    dtype: mindspore.Type = mindspore.float32,
) -> Tensor:
    r"""Returns the matrix that codes stand for, the W of :func:`msops.weight_quant_matmul` , which has the arguments.

    Each number is computed in float32 (in float64 for a `dtype` of float64), and rounded to `dtype` . Use it before a
    network runs: it computes with NumPy.

    Args:
        weight (Tensor): Shape (..., M, K) or, for 4 bits, (..., M, ceil(K / 2)); uint8 or int8. Without
            `transpose_weight` , (..., K, M) or (..., K, ceil(M / 2)).
        scale (Tensor): Shape (..., M, G), or (..., G, M) without `transpose_weight` ; for one group of a matrix also
            (M,).
        zero_point (Tensor): The shape of `scale` . Default: ``None`` , all 0.
        bits (int): The size of a code: 4 or 8. Default: ``8`` .
        group (int): How many neighbours along K share a scale. Default: ``None`` , all: G is 1.
        transpose_weight (bool): Whether the rows of `weight` belong to outputs. Default: ``True`` .
        codebook (Tensor): Shape (2^bits,): the number that each code stands for. It excludes `zero_point` . Default:
            ``None`` .
        dtype (mindspore.dtype): float16, float32 or float64. Default: ``mindspore.float32`` .

    Returns:
        Tensor of shape (..., M, K), or (..., K, M) without `transpose_weight` . Bytes do not tell whether the last
        upper half is a number: where groups do not tell either, a row of 4 bits has an even number of columns.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong shape or value.

    Examples:
        >>> import mindspore, msops
        >>> codes, *others = msops.quantize_weight(mindspore.Tensor([[-1.5, 0.0, 0.6, 6.0]]))
        >>> print(msops.dequantize_weight(codes, *others, bits=4))
        [[-1.5  0.   0.5  6. ]]
    """
    who = "dequantize_weight"
    check_bits(who, bits)
    check_group(who, group)
    settings.boolean(who, "transpose_weight", transpose_weight)
    if dtype not in FLOATS:
        raise TypeError(f"{who}: dtype must be float16, float32 or float64, got {dtype}")
    if zero_point is not None and codebook is not None:
        raise ValueError(f"{who}: zero_point and codebook exclude each other, got both")
    codes = _matrix(who, "weight", weight, "(..., M, K)")
    if codes.dtype not in (np.uint8, np.int8) or (codebook is not None and codes.dtype != np.uint8):
        wanted = "uint8 or int8" if codebook is None else "uint8"
        raise TypeError(f"{who}: weight must be {wanted}, got {codes.dtype}")
    wide = np.float64 if dtype == mindspore.float64 else np.float32
    scales = _scales(who, "scale", scale, group, transpose_weight).astype(wide)
    zeros = None if zero_point is None else _scales(who, "zero_point", zero_point, group, transpose_weight).astype(wide)
    axis = -1 if transpose_weight else -2
    if bits == 4:
        codes = _unpacked(codes)
        columns = scales.shape[-1] * (1 if not transpose_weight else codes.shape[-1] if group is None else group)
        codes = codes[..., :columns]
    if codebook is not None:
        table = codebook.asnumpy() if isinstance(codebook, Tensor) else None
        if table is None or table.shape != (2**bits,):
            got = type(codebook).__name__ if table is None else table.shape
            raise ValueError(f"{who}: codebook must be a Tensor of shape ({2**bits},), got {got}")
        numbers = table.astype(wide)[codes]
    else:
        numbers = codes.astype(wide)
    length = codes.shape[axis]
    groups = 1 if group is None else -(-length // group)
    *leading, rows, columns = codes.shape
    expected = (*leading, rows, groups) if transpose_weight else (*leading, groups, columns)
    for name, each in (("scale", scales), ("zero_point", zeros)):
        if each is not None and each.shape != expected:
            raise ValueError(f"{who}: {name} must have shape {expected}, got {each.shape}")
    place = np.arange(length) // (max(length, 1) if group is None else group)
    if zeros is not None:
        numbers -= zeros.take(place, axis)
    numbers *= scales.take(place, axis)
    return Tensor(numbers.astype(dtype_name(dtype)))


def _matrix(who: str, name: str, tensor: Tensor, shape: str) -> Array:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{who}: {name} must be a Tensor, got {type(tensor).__name__}")
    if len(tensor.shape) < 2:
        raise ValueError(f"{who}: {name} must have shape {shape}, got {tensor.shape}")
    return tensor.asnumpy()


def _scales(who: str, name: str, tensor: Tensor, group: int | None, transpose_weight: bool) -> Array:
    """Returns scales or zero points as matrices. One group of a matrix may be a vector."""
    if isinstance(tensor, Tensor) and len(tensor.shape) == 1 and group is None:
        return tensor.asnumpy().reshape((-1, 1) if transpose_weight else (1, -1))
    return _matrix(who, name, tensor, "(..., M, G)" if transpose_weight else "(..., G, M)")


def _in_groups(numbers: Array, group: int | None) -> Array:
    """Returns (..., groups, group) with zeros at the end of the last group."""
    length = numbers.shape[-1]
    groups = 1 if group is None else -(-length // group)
    group = max(length, 1) if group is None else min(group, max(length, 1))
    padding = [(0, 0)] * (numbers.ndim - 1) + [(0, groups * group - length)]
    return np.pad(numbers, padding).reshape(*numbers.shape[:-1], groups, group)


def _packed(codes: Array) -> Array:
    """Puts two codes of 4 bits into each byte, the first into its lower half."""
    nibbles = codes.view(np.uint8) & 15
    nibbles = np.pad(nibbles, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(codes.dtype)


def _unpacked(codes: Array) -> Array:
    """Returns the two codes of each byte, which are two's complement if the bytes are."""
    halves = np.stack([codes << 4, codes], -1).astype(codes.dtype) >> 4
    return halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
