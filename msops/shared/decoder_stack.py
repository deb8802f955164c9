"""Holds the operators of decoder_stack: their signature and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import Spec
from msops.quantization import check_bits, check_group

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "decoder_stack"
_LIBRARY = of_package(_NAME)
MATRICES = ("qkv", "out", "gate_up", "down")
MOST_FEATURES = 512
WITHOUT_CODES = (0, None, False)  # bits, group, and whether there are zero points
_FLOATS = "dtype=common|float32"


@once
def settings_of_codes(
    bits: int, group: int | None, scales: int | None, zero_points: int | None
) -> tuple[int, int | None, bool]:
    """Checks settings and numbers of tensors, where -1 is for what is no tuple, and returns bits, group and whether
    there are zero points, as operators() takes them."""
    check_bits(_NAME, bits)
    check_group(_NAME, group)
    for name, count in (("scales", scales), ("zero_points", zero_points)):
        if count == -1:
            raise TypeError(f"{_NAME}: {name} must be a tuple of tensors, or None")
        if count not in (None, len(MATRICES)):
            raise ValueError(f"{_NAME}: {name} must have one tensor for each of {', '.join(MATRICES)}, got {count}")
    if scales is None and zero_points is not None:
        raise ValueError(f"{_NAME}: scales must be given with zero_points, got None")
    return WITHOUT_CODES if scales is None else (bits, group, zero_points is not None)


def _no_gradient(*_: object) -> NoReturn:
    raise ValueError(
        "decoder_stack: it is for inference and has no gradient; train the layers as operators of their own"
    )


@Operators
def operators(
    heads: int,
    kv_heads: int,
    eps: float,
    interleaved: bool,
    bits: int = 0,
    group: int | None = None,
    has_zero_points: bool = False,
) -> Operator:
    """Returns the operator for matrices of codes, or of numbers if `bits` is 0."""
    heads, kv_heads = settings.positive(_NAME, "heads", heads), settings.positive(_NAME, "kv_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"{_NAME}: kv_heads must divide heads = {heads}, got {kv_heads}")
    qkv, out, gate_up, down = _matrices(bits)
    inputs = [
        f"x(B, T, C), cos(*P, {_FLOATS}), sin(*P, dtype=cos), norm1(L, C, {_FLOATS}), {qkv}, {out}",
        f"norm2(L, C, {_FLOATS}), {gate_up}, {down}, norm(C, {_FLOATS})?, qkv_bias(L, R)?, q_norm(L, D, {_FLOATS})?",
        f"k_norm(L, D, {_FLOATS})?, keys(*Q)?, values(*Q)?, lengths(B, dtype=index)?",
        "block_tables(B, M, dtype=index)?",
    ]
    if bits:
        inputs += _of_codes("scale", "common|float32", bits, group)
    if has_zero_points:
        inputs += _of_codes("zero_point", "qkv|qkv_scale", bits, group)
    return custom_op(
        _LIBRARY.DecoderStackForward,
        f"{', '.join(inputs)} -> y, k, v; work",
        infer=_infer,
        gradient=_no_gradient,
        heads=heads,
        kv_heads=kv_heads,
        eps=settings.number(_NAME, "eps", eps, 0),
        interleaved=int(settings.boolean(_NAME, "interleaved", interleaved)),
        bits=int(bits),
        group=0 if group is None else int(group),
        has_zero_points=int(has_zero_points),
    )


def _matrices(bits: int) -> list[str]:
    """Returns the matrices as a signature has them. Two codes of 4 bits are a byte."""
    kinds = [", dtype=uint8|int8", *[", dtype=qkv"] * 3] if bits else [""] * 4
    shapes = ["R, C", "C, A", "2 * F, C", "C, F"]
    if bits == 4:
        shapes = ["R, (C + 1) // 2", "C, A", "E, (C + 1) // 2", "C, F"]
    return [f"{name}(L, {shape}{kind})" for name, shape, kind in zip(MATRICES, shapes, kinds)]


def _of_codes(what: str, kind: str, bits: int, group: int | None) -> list[str]:
    """Returns the scales or zero points of all matrices as a signature has them."""
    groups = "1" if group is None else f"(C + {group - 1}) // {group}"
    shapes = f"R, {groups}", "C, U", f"{'E' if bits == 4 else '2 * F'}, {groups}", "C, V"
    kinds = [kind, *[f"qkv_{what}"] * 3]
    return [f"{name}_{what}(L, {shape}, dtype={each})" for name, shape, each in zip(MATRICES, shapes, kinds)]


def _infer(
    x: Spec,
    cos: Spec,
    sin: Spec,
    norm1: Spec,
    qkv: Spec,
    out: Spec,
    norm2: Spec,
    gate_up: Spec,
    down: Spec,
    norm: Spec | None,
    qkv_bias: Spec | None,
    q_norm: Spec | None,
    k_norm: Spec | None,
    keys: Spec | None,
    values: Spec | None,
    lengths: Spec | None,
    block_tables: Spec | None,
    *codes: Spec,
    heads: int,
    kv_heads: int,
    bits: int,
    group: int,
    **_: float,
) -> list[Spec]:
    (batch, length), (layers, rows), all_heads = x.shape[:2], qkv.shape[:2], heads + 2 * kv_heads
    size = rows // all_heads
    if rows % all_heads:
        raise ValueError(f"qkv must have a multiple of heads + 2 kv_heads = {all_heads} rows, got {rows}")
    if size % 2 or not 0 < size <= MOST_FEATURES:
        raise ValueError(f"qkv must have an even number of 2 to {MOST_FEATURES} rows for each head, got {size}")
    tables = (length, size // 2), (batch, length, size // 2)
    if cos.shape not in tables:
        raise ValueError(f"cos must have shape (T, D/2) = {tables[0]} or (B, T, D/2) = {tables[1]}, got {cos.shape}")
    if not bits and out.shape[2] != heads * size:
        raise ValueError(f"out must have heads D = {heads * size} columns, got {out.shape[2]}")
    if bits:
        _check_codes(out, gate_up, down, codes, heads * size, bits, group)
    for name, each in (("q_norm", q_norm), ("k_norm", k_norm)):
        if each is not None and each.shape[1] != size:
            raise ValueError(f"{name} must have D = {size} columns, got {each.shape[1]}")
    missing = [name for name, each in (("keys", keys), ("values", values), ("lengths", lengths)) if each is None]
    if len(missing) in (1, 2):
        raise ValueError(f"keys, values and lengths must be given together, {' and '.join(missing)} is missing")
    if block_tables is not None:
        _check_blocks(keys, layers, kv_heads, size)
    elif keys is not None:
        rows_of_cache, texts = keys.shape[:-2], layers * batch
        fits = rows_of_cache[:-1] == (layers, batch)
        if len(rows_of_cache) == 1:
            fits = rows_of_cache[0] % texts == 0 if texts else rows_of_cache[0] == 0
        if not fits or keys.shape[-2:] != (kv_heads, size):
            raise ValueError(
                f"keys must have shape (L, B, S, kv_heads, D) = ({layers}, {batch}, S, {kv_heads}, {size}) or "
                f"(L B S, kv_heads, D), got {keys.shape}"
            )
    new = Spec((layers, batch, length, kv_heads, size), x.dtype)
    return [x, new, new]


def _check_blocks(keys: Spec | None, layers: int, kv_heads: int, size: int) -> None:
    if keys is None:
        raise ValueError("keys must be given with block_tables, got None")
    shape = keys.shape
    fits = len(shape) == 5 and shape[0] == layers
    if len(shape) == 4:
        fits = shape[0] % layers == 0 if layers else shape[0] == 0
    if not fits or shape[-2:] != (kv_heads, size):
        raise ValueError(
            f"keys must have shape (L, P, S, kv_heads, D) = ({layers}, P, S, {kv_heads}, {size}) or "
            f"(L P, S, kv_heads, D) with block_tables, got {shape}"
        )
    if shape[-3] == 0:
        raise ValueError(f"keys must have at least one row in a block, got shape {shape}")


def _check_codes(
    out: Spec, gate_up: Spec, down: Spec, codes: tuple[Spec, ...], of_heads: int, bits: int, group: int
) -> None:
    """Requires what is along columns of `out` and `down`, and rows of both halves of `gate_up`."""
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even number of rows, got {gate_up.shape[1]}")
    names = [f"{name}_{what}" for what in ("scale", "zero_point") for name in MATRICES]
    for i, matrix, columns, words in ((1, out, of_heads, "heads D"), (3, down, gate_up.shape[1] // 2, "F")):
        width, groups = columns if bits == 8 else -(-columns // 2), -(-columns // group) if group else 1
        if matrix.shape[2] != width:
            raise ValueError(
                f"{MATRICES[i]} must have {width} bytes for {words} = {columns} columns, got {matrix.shape[2]}"
            )
        for name, each in list(zip(names, codes))[i::4]:
            if each.shape[2] != groups:
                raise ValueError(f"{name} must have {groups} groups of columns, got {each.shape[2]}")
