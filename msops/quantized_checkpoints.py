"""Converts quantized weights of other packages' checkpoints to the arrays that weight_quant_matmul takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from msops.core import settings
from msops.shared.gguf import KINDS, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Array = np.ndarray[Any, Any]

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order of nibbles
# The quantiles of the normal distribution that bitsandbytes has for NF4.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def convert_awq(qweight: Array, qzeros: Array, scales: Array) -> dict[str, Any]:
    r"""Converts a weight of AWQ, as AutoAWQ stores it, to the arguments of weight_quant_matmul.

    .. math::
        W_{m, k} = (\text{code}_{m, k} - \text{zero}_{m, k // \text{group}})\,
        \text{scale}_{m, k // \text{group}}

    Args:
        qweight (numpy.ndarray): Shape (K, M / 8), int32: nibble i of number c in a row, from the lowest on, is column
            8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i].
        qzeros (numpy.ndarray): Shape (G, M / 8), int32, likewise.
        scales (numpy.ndarray): Shape (G, M); floating.

    Returns:
        dict, with `weight` (M, ceil(K / 2)) uint8, column 2 i in the lower half of byte i and column 2 i + 1 in the
        upper half; `scale` (M, G) in the dtype of `scales` ; `zero_point` (M, G) uint8; `bits` 4; and `group` , K / G.

    Raises:
        TypeError: If an argument is not an array of such a dtype.
        ValueError: If an array has another shape.

    Examples:
        >>> import msops, numpy as np
        >>> qweight = np.array([[0x76543210], [0x11111111]], np.int32)
        >>> found = msops.convert_awq(qweight, np.zeros((1, 1), np.int32), np.ones((1, 8), np.float16))
        >>> print(found["weight"].ravel() & 15, found["group"])
        [0 4 1 5 2 6 3 7] 2
    """
    name = "convert_awq"
    _check(name, "qweight", qweight, "int32", (None, None))
    deep, columns = qweight.shape[0], 8 * qweight.shape[1]
    _check(name, "scales", scales, "float", (None, columns))
    groups = len(scales)
    _check(name, "qzeros", qzeros, "int32", (groups, qweight.shape[1]))
    codes, zeros = (_in_order(_parts(each, 4), _AWQ_COLUMNS) for each in (qweight, qzeros))
    return _of_groups(codes.T, scales.T, zeros.T, 4, _group(name, deep, groups))


def convert_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    bits: int = 4,
    zeros_minus_one: bool = True,
) -> dict[str, Any]:
    r"""Converts a weight of GPTQ, as AutoGPTQ and GPTQModel store it, to the arguments of weight_quant_matmul.

    .. math::
        W_{m, k} = (\text{code}_{m, k} - \text{zero}_{m, g(k)})\, \text{scale}_{m, g(k)}

    Args:
        qweight (numpy.ndarray): Shape (K bits / 32, M), int32: part i of number r in a column, from the lowest bits on,
            is row 32 / bits r + i.
        qzeros (numpy.ndarray): Shape (G, M bits / 32), int32: part i of number c in a row is column 32 / bits c + i.
        scales (numpy.ndarray): Shape (G, M); floating.
        g_idx (numpy.ndarray): Shape (K,): the group of each row, of whole numbers. Default: ``None`` , K / G
            neighbours each.
        bits (int): 4 or 8. Default: ``4`` .
        zeros_minus_one (bool): Whether 1 is to be added to zeros, modulo 2^bits, as AutoGPTQ's format needs; the format
            "gptq_v2" does not. Default: ``True`` .

    Returns:
        dict, with `weight` (M, ceil(K / 2)) uint8, or (M, K) for 8 bits; `scale` (M, G) in the dtype of `scales` ;
        `zero_point` (M, G) uint8; `bits` ; and `group` . Where the rows of groups are not neighbours ("act-order"), it
        also has `order` (K,) int32: the weight's columns are in this order, and x must be gathered by it along its last
        axis.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has another shape or is out of range, or groups have not as many rows as each other.

    Examples:
        >>> import msops, numpy as np
        >>> qweight, qzeros = np.array([[0x76543210]], np.int32), np.array([[0x7]], np.int32)
        >>> found = msops.convert_gptq(
        ...     np.repeat(qweight, 8, 1), qzeros, np.ones((1, 8), np.float16), np.array([0] * 8, np.int32)
        ... )
        >>> print(found["weight"][0], found["zero_point"][0], found["group"])
        [ 16  50  84 118] [8] 8
    """
    name = "convert_gptq"
    if settings.integer(name, "bits", bits) not in (4, 8):
        raise ValueError(f"{name}: bits must be 4 or 8, got {bits}")
    minus_one, each = settings.boolean(name, "zeros_minus_one", zeros_minus_one), 32 // bits
    _check(name, "qweight", qweight, "int32", (None, None))
    deep, columns = each * qweight.shape[0], qweight.shape[1]
    _check(name, "scales", scales, "float", (None, columns))
    groups = len(scales)
    if columns % each:
        raise ValueError(f"{name}: qweight must have a multiple of {each} columns, got {columns}")
    _check(name, "qzeros", qzeros, "int32", (groups, columns // each))
    codes, zeros = _parts(qweight.T, bits), (_parts(qzeros, bits) + np.uint8(minus_one)) & np.uint8(2**bits - 1)
    if g_idx is None:
        return _of_groups(codes, scales.T, zeros.T, bits, _group(name, deep, groups))
    _check(name, "g_idx", g_idx, "int", (deep,))
    order = np.argsort(g_idx, kind="stable")
    of_each = g_idx[order]
    group = int((of_each == 0).sum()) or deep
    if not np.array_equal(of_each, np.arange(deep) // group) or -(-deep // max(group, 1)) != groups:
        raise ValueError(f"{name}: g_idx must give each of {groups} groups equally many rows, got {_shown(g_idx)}")
    found = _of_groups(codes[:, order], scales.T, zeros.T, bits, group)
    if not np.array_equal(order, np.arange(deep)):
        found["order"] = order.astype(np.int32)
    return found


def convert_gguf(blocks: Array, kind: str) -> dict[str, Any]:
    r"""Converts a weight whose rows are blocks as they lie in a GGUF file to the arguments of weight_quant_matmul.

    This is for kernels of weight_quant_matmul; :func:`msops.gguf_matmul` takes the blocks as they are. Numbers are
    exactly those of :func:`msops.gguf_dequantize` for Q4_0, Q8_0 and Q6_K, and those to float32's rounding for the
    kinds with minima, whose zero points are quotients. Codes of 5 and 6 bits become 8 bits.

    Args:
        blocks (numpy.ndarray): Shape (M, R): R bytes of each row; uint8.
        kind (str): ``"Q4_0"`` , ``"Q4_1"`` , ``"Q8_0"`` , ``"Q4_K"`` , ``"Q5_K"`` or ``"Q6_K"`` .

    Returns:
        dict, with `weight` , uint8 for kinds with minima, else int8: (M, K / 2) of 4 bits, column 2 i in the lower half
        of byte i and column 2 i + 1 in the upper half, or (M, K) of 8 bits; `scale` (M, G) float32; `zero_point`
        (M, G) float32, or None; `bits` ; and `group` , 16 for Q6_K, else 32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has another shape, rows are not whole blocks, or `kind` is another str.

    Examples:
        >>> import msops, numpy as np
        >>> scale = np.array([[0.5]], np.float16).view(np.uint8)
        >>> blocks = np.concatenate([scale, np.arange(32, dtype=np.uint8).reshape(1, 32)], 1)
        >>> found = msops.convert_gguf(blocks, "Q8_0")
        >>> print(found["weight"][0, :4], found["scale"], found["zero_point"], found["bits"], found["group"])
        [0 1 2 3] [[0.5]] None 8 32
    """
    name = "convert_gguf"
    kind_of(name, kind)
    _check(name, "blocks", blocks, "uint8", (None, None))
    size, numbers = KINDS[kind]
    if blocks.shape[1] % size:
        raise ValueError(
            f"{name}: blocks must have rows of a multiple of {size} bytes for {kind}, got {blocks.shape[1]}"
        )
    codes, scale, offset = _GGUF[kind](np.ascontiguousarray(blocks).reshape(-1, size))
    bits = 4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8
    group = 16 if kind == "Q6_K" else 32
    rows, columns = len(blocks), blocks.shape[1] // size * numbers
    codes, scale = codes.reshape(rows, columns), scale.reshape(rows, columns // group)
    if offset is None:
        weight = _packed(codes & 15).view(np.int8) if bits == 4 else codes.view(np.int8)
        return dict(weight=weight, scale=scale, zero_point=None, bits=bits, group=group)
    # A scale of 0 leaves the offset alone, which no zero point gives. Then codes are 0, and the scale is 1.
    offset, is_constant = offset.reshape(scale.shape), scale == 0
    scale = np.where(is_constant, np.float32(1), scale)
    codes = np.where(np.repeat(is_constant, group, 1), np.uint8(0), codes)
    return _of_groups(codes, scale, -offset / scale, bits, group)


def convert_nf4(codes: Array, absmax: Array, shape: Sequence[int], block: int = 64) -> dict[str, Any]:
    r"""Converts a weight of NF4, as bitsandbytes stores it, to the arguments of weight_quant_matmul.

    .. math::
        W_{m, k} = \text{codebook}_{\text{code}_{m, k}}\, \text{absmax}_{(m K + k) // \text{block}}

    Args:
        codes (numpy.ndarray): The bytes of the weight in any shape, uint8; the first of two numbers is the upper half.
        absmax (numpy.ndarray): The largest magnitude of each block, in any shape; floating. Where it is quantized, too
            ("double quantization"), pass what it means: its numbers times their scales, plus the offset.
        shape (tuple[int]): (M, K), the shape of the weight.
        block (int): How many numbers a block has, which may go on in the next row. Default: ``64`` .

    Returns:
        dict, with `weight` (M, ceil(K / 2)) uint8, column 2 i in the lower half of byte i and column 2 i + 1 in the
        upper half; `scale` (M, G) float32; `zero_point` None; `bits` 4; `group` , the greatest common divisor of K and
        `block` ; and `codebook` (16,) float32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range, or there are not as many codes or blocks as numbers need.

    Examples:
        >>> import msops, numpy as np
        >>> found = msops.convert_nf4(np.array([0x7F, 0xF0], np.uint8), np.array([2.0, 3.0], np.float32), (2, 2), 2)
        >>> print(found["codebook"][[7, 15]], found["weight"].ravel(), found["scale"].ravel(), found["group"])
        [0. 1.] [247  15] [2. 3.] 2
    """
    name = "convert_nf4"
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise TypeError(f"{name}: shape must be a tuple of two ints, got {shape!r}")
    rows, deep = (settings.integer(name, "shape", size) for size in shape)
    if min(rows, deep) < 0:
        raise ValueError(f"{name}: shape must have no negative sizes, got {tuple(shape)}")
    count, block = rows * deep, settings.positive(name, "block", block)
    _check(name, "codes", codes, "uint8", None)
    _check(name, "absmax", absmax, "float", None)
    for what, array, wanted in (("codes", codes, -(-count // 2)), ("absmax", absmax, -(-count // block))):
        if array.size != wanted:
            raise ValueError(f"{name}: {what} must have {wanted} elements for {count} numbers, got {array.size}")
    halves = codes.ravel()
    numbers = np.stack([halves >> 4, halves & 15], 1).ravel()[:count].reshape(rows, deep)
    group = math.gcd(deep, block) or 1
    firsts = np.arange(0, count, group).reshape(rows, deep // group)
    scale = absmax.ravel()[firsts // block].astype(np.float32)
    return dict(_of_groups(numbers, scale, None, 4, group), codebook=np.array(_NF4, np.float32))


def _check(name: str, argument: str, array: Array, kind: str, shape: tuple[int | None, ...] | None) -> None:
    """Requires an array of a dtype, "float" or "int", and of a shape, where None is any size."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: {argument} must be a numpy.ndarray, got {type(array).__name__}")
    fits = {"float": array.dtype.kind == "f", "int": array.dtype.kind in "iu"}.get(kind, array.dtype == kind)
    if not fits:
        raise TypeError(f"{name}: {argument} must be {kind}, got {array.dtype}")
    if shape is None:
        return
    if array.ndim != len(shape) or any(want not in (None, got) for got, want in zip(array.shape, shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: {argument} must have shape ({wanted}), got {array.shape}")


def _group(name: str, deep: int, groups: int) -> int:
    if groups == 0 or deep % groups:
        raise ValueError(f"{name}: scales must have a number of groups that divides {deep} rows, got {groups}")
    return deep // groups


def _shown(array: Array) -> str:
    return np.array2string(array, threshold=8).replace("\n", "")


def _parts(words: Array, bits: int) -> Array:
    """Returns the parts of int32 of so many bits, from the lowest on, side by side along the last axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return parts.astype(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * len(shifts))


def _in_order(parts: Array, columns: Sequence[int]) -> Array:
    """Moves part i of each eight to the column that stands at i."""
    eights = parts.reshape(len(parts), parts.shape[1] // 8, 8)
    found = np.empty_like(eights)
    found[..., list(columns)] = eights
    return found.reshape(parts.shape)


def _packed(codes: Array) -> Array:
    """Packs pairs of neighbours into bytes; the first is the lower half."""
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return even[:, ::2] | even[:, 1::2] << 4


def _of_groups(codes: Array, scale: Array, zero_point: Array | None, bits: int, group: int) -> dict[str, Any]:
    return dict(
        weight=_packed(codes) if bits == 4 else np.ascontiguousarray(codes),
        scale=np.ascontiguousarray(scale),
        zero_point=None if zero_point is None else np.ascontiguousarray(zero_point),
        bits=int(bits),
        group=int(group),
    )


# These return, of some blocks, the codes, one a byte, the scales, and the offsets or None. Codes of kinds without
# offsets are two's complement.


def _half(blocks: Array, at: int) -> Array:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _halves(codes: Array) -> Array:
    return np.concatenate([codes & 15, codes >> 4], -1)


def _scales(blocks: Array) -> tuple[Array, Array]:
    """Returns the scales and offsets of the eight groups of Q4_K and Q5_K."""
    low, high, more = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (more & 15) | (low >> 6 << 4)], 1).astype(np.float32)
    minima = np.concatenate([high & 63, (more >> 4) | (high >> 6 << 4)], 1).astype(np.float32)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _q5_k(blocks: Array) -> tuple[Array, Array, Array]:
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | bits << 4
    return codes, *_scales(blocks)


def _q6_k(blocks: Array) -> tuple[Array, Array, None]:
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32) | upper << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes - np.uint8(32), _half(blocks, 208) * scales, None


_GGUF: dict[str, Callable[[Array], tuple[Array, Array, Array | None]]] = {
    "Q4_0": lambda blocks: (_halves(blocks[:, 2:]) - np.uint8(8), _half(blocks, 0), None),
    "Q4_1": lambda blocks: (_halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)),
    "Q8_0": lambda blocks: (blocks[:, 2:].copy(), _half(blocks, 0), None),
    "Q4_K": lambda blocks: (_halves(blocks[:, 16:].reshape(-1, 4, 32)), *_scales(blocks)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
