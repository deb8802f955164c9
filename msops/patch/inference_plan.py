"""Checks the arguments of MindSpore's attention for inference, and plans how msops' operators compute it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor

from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import spec_of
from msops.core.spec import FLOATS

from .attention_plan import window_of_mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msops.core.inputs import Description
    from msops.core.spec import Spec

    Settings = tuple[int, int, float, int, int, str, int]  # heads, kv_heads, scale, tokens, layout, sparse_mode

_QUERIES = {"BSH": 1, "BNSD": 2, "BSND": 1}  # the axis of the queries, or of the keys, of each layout
_MASKS = (mindspore.bool_, mindspore.int8, mindspore.uint8, mindspore.float16)


class Plan(NamedTuple):
    """Says how flash_attention computes a call."""

    sizes: tuple[int, int, int]  # B, S1, S2
    axis: int  # of the queries in of_query, and of the keys in of_key
    of_query: tuple[int, ...]
    of_key: tuple[int, ...]
    sparse_mode: int
    window: tuple[int, int]
    keys: int | None  # so many keys count; None: all
    of_mask: tuple[int, ...] | None  # the shape of the mask with four axes, or None where it hides nothing by itself
    band: Tensor | None  # True where a query does not see a key
    counts_queries: bool  # whether rows from actual_seq_lengths on are 0
    rows: Tensor | None  # the numbers of the queries, (S1, 1)
    distances: Tensor | None  # j - i of key j and query i, where a band ends with the lengths
    limits: tuple[int, int]  # of that band, as of a window


class PlanOfBlocks(NamedTuple):
    """Says how paged_attention computes a call."""

    of_query: tuple[int, int, int]
    of_key: tuple[int, int, int, int]
    splits: int  # so many heads have blocks of their own
    widths: tuple[int, int]  # the last axes of the mask and of pse_shift


@once
def make_plan(
    name: str, described: tuple[Description | None, ...], has_lengths: tuple[bool, bool], settings_: Settings
) -> Plan:
    _check_settings(name, settings_)
    (query, key), mask, shift = _specs(name, described, settings_), described[3], described[4]
    heads, kv_heads, _, pre_tokens, next_tokens, layout, sparse_mode = settings_
    axis = _QUERIES["".join(layout)]
    batch, queries, keys = query.shape[0], query.shape[axis], key.shape[axis]
    if key.shape[0] != batch:
        raise ValueError(f"{name}: key must have {batch} samples as query has, got shape {key.shape}")
    if queries == 1 and name != "prompt_flash_attention":  # MindSpore ignores the modes of one query
        has_lengths, sparse_mode, pre_tokens, next_tokens = (False, has_lengths[1]), 0, 2**31 - 1, 2**31 - 1
    of_mask = None if mask is None else _shape_of_mask(name, mask, (batch, queries, keys), sparse_mode)
    if mask is None and sparse_mode == 1:
        raise ValueError(f"{name}: attn_mask must be given if sparse_mode is 1")
    tokens = (pre_tokens, next_tokens)
    window, first_keys, band = window_of_mode(name, sparse_mode, (queries, keys), of_mask is not None, *tokens)
    distances, limits, is_open = None, window, window == (-1, -1)
    i, j = np.ogrid[:queries, : keys if first_keys is None else first_keys]
    if has_lengths[1] and sparse_mode in (0, 2) and not is_open:  # a window would end with the lengths
        left, right = tokens if sparse_mode == 0 else (2**31 - 1, 0)
        window, band = (-1, -1), Tensor((j < i - left) | (j > i + right))
    if has_lengths[0] and sparse_mode in (3, 4) and not is_open:
        window, distances = (-1, -1), Tensor((j - i).astype(np.int32))
    if shift is not None:
        _check_shift(name, shift, (batch, heads, queries, keys))
    return Plan(
        (batch, queries, keys), axis, _heads_apart(query, heads), _heads_apart(key, kv_heads or heads), sparse_mode,
        window, first_keys, of_mask, band, has_lengths[0], Tensor(i.astype(np.int32)), distances, limits,
    )  # fmt: skip


@once
def plan_of_blocks(
    name: str,
    described: tuple[Description | None, ...],
    tables: Description,
    block_size: int,
    has_lengths: bool,
    settings_: Settings,
) -> PlanOfBlocks:
    _check_settings(name, settings_)
    (query, key), (mask, shift) = _specs(name, described, settings_, True), described[3:]
    heads, kv_heads = settings_[0], settings_[1] or settings_[0]
    if not has_lengths:
        raise ValueError(f"{name}: the lengths of the keys must be given with block_table")
    batch, width = query.shape[0], _heads_apart(query, heads)[-1]
    table = _spec(name, "block_table", tables)
    if len(table.shape) != 2 or table.shape[0] != batch:
        raise ValueError(f"{name}: block_table must have shape ({batch}, blocks of a text), got {table.shape}")
    shape, splits = key.shape, 1
    rows = shape[1] if len(shape) == 3 else shape[2]
    if shape not in ((shape[0], rows, kv_heads * width), (shape[0], kv_heads, rows, width)):
        raise ValueError(
            f"{name}: key and value must have shape (blocks, block_size, {kv_heads * width}) or (blocks, {kv_heads}, "
            f"block_size, {width}) with block_table, got {shape}"
        )
    if settings.integer(name, "block_size", block_size) not in (0, rows):
        raise ValueError(f"{name}: block_size must be the rows of a block, {rows}, got {block_size}")
    of_key = (shape[0], rows, kv_heads, width)
    if len(shape) == 4:
        of_key, splits = (shape[0] * kv_heads, rows, 1, width), kv_heads
    if mask is not None:
        _shape_of_mask(name, mask, (batch, 1, None), 0)
    if shift is not None:
        _check_shift(name, shift, (batch, heads, 1, 1))
    widths = tuple(0 if each is None else each[0][-1] for each in (mask, shift))
    return PlanOfBlocks((batch, heads, width), of_key, splits, widths)  # type: ignore[arg-type]


@once
def check_one(name: str, query: Description, layout: str) -> None:
    """Requires one query of each sample."""
    settings.one_of(name, "input_layout", layout, tuple(_QUERIES))
    shape, axis = _spec(name, "query", query).shape, _QUERIES["".join(layout)]
    if len(shape) > axis and shape[axis] != 1:
        need = "needs" if name.startswith("incre") else "with block_table needs"
        raise ValueError(f"{name}: query {need} one query of each sample, got shape {shape} of layout {layout}")


@once
def check_absent(name: str, arguments: tuple[str, ...], are_given: tuple[bool, ...]) -> None:
    """Requires that none of these arguments is given."""
    for argument, is_given in zip(arguments, are_given):
        if is_given:
            raise NotImplementedError(f"{name}: {argument} must be None: msops does not have it")


@once
def check_lengths(name: str, argument: str, got: int, wanted: int) -> None:
    """Requires as many elements as wanted, or one."""
    if got not in (1, wanted):
        raise ValueError(f"{name}: {argument} must have {wanted} elements, got {got}")


@once
def known_lengths(name: str, argument: str, lengths: Sequence[int], batch: int, most: int | None) -> Tensor:
    """Returns lengths that are Python's numbers, one for each sample, or one for all."""
    if not all(map(settings.whole, lengths)):
        raise TypeError(f"{name}: {argument} must be a Tensor or ints, got {lengths!r}")
    check_lengths(name, argument, len(lengths), batch)
    if min(lengths) < 0 or (most is not None and max(lengths) > most):
        raise ValueError(f"{name}: {argument} must be from 0 to {'' if most is None else most}, got {lengths}")
    return Tensor(np.broadcast_to(np.array(lengths, np.int32), batch))


def _check_settings(name: str, settings_: Settings) -> None:
    heads, kv_heads, scale, pre_tokens, next_tokens, layout, sparse_mode = settings_
    settings.positive(name, "num_heads", heads)
    if settings.integer(name, "num_key_value_heads", kv_heads) < 0 or heads % (kv_heads or heads):
        raise ValueError(f"{name}: num_key_value_heads must be 0 or divide num_heads = {heads}, got {kv_heads}")
    settings.number(name, "scale_value", scale)
    settings.one_of(name, "input_layout", layout, tuple(_QUERIES))
    if settings.integer(name, "sparse_mode", sparse_mode) not in range(5):
        raise NotImplementedError(f"{name}: sparse_mode must be one of 0, 1, 2, 3, 4, got {sparse_mode}")
    for argument, tokens in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        if settings.integer(name, argument, tokens) < 0:
            raise NotImplementedError(f"{name}: {argument} must be at least 0 here, got {tokens}")


def _spec(name: str, argument: str, description: Description) -> Spec:
    spec = spec_of(description)
    if isinstance(spec, str):
        raise TypeError(f"{name}: {argument} must be a Tensor, got {spec}")
    if None in spec.shape:
        raise ValueError(f"{name}: {argument} must have known sizes, got {spec.shape}")
    return spec


def _specs(
    name: str, described: tuple[Description | None, ...], settings_: Settings, has_blocks: bool = False
) -> tuple[Spec, Spec]:
    """Returns what query and key are, and requires them to have the heads that the settings say."""
    query, key, value = (
        _spec(name, argument, x or (None, None)) for argument, x in zip(("query", "key", "value"), described)
    )
    heads, kv_heads, layout = settings_[0], settings_[1] or settings_[0], settings_[5]
    for argument, spec in (("query", query), ("key", key), ("value", value)):
        if spec.dtype not in FLOATS:
            raise NotImplementedError(f"{name}: {argument} must be float16, float32 or float64, got {spec.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"{name}: value must have the shape of key, {key.shape}, got {value.shape}")
    wanted = (("query", query, heads),) if has_blocks else (("query", query, heads), ("key", key, kv_heads))
    for argument, spec, count in wanted:
        if len(spec.shape) != len(layout):
            raise ValueError(f"{name}: {argument} must have the axes {', '.join(layout)}, got {spec.shape}")
        has_heads = spec.shape[2] % count == 0 if layout == "BSH" else spec.shape[layout.index("N")] == count
        if not has_heads:
            raise ValueError(f"{name}: {argument} must have {count} heads, got shape {spec.shape} of layout {layout}")
    if not has_blocks and _heads_apart(query, heads)[-1] != _heads_apart(key, kv_heads)[-1]:
        raise ValueError(f"{name}: key must have heads as wide as those of query, got {key.shape} and {query.shape}")
    return query, key


def _heads_apart(spec: Spec, heads: int) -> tuple[int, ...]:
    """Returns a shape with an axis of heads."""
    return spec.shape if len(spec.shape) == 4 else (*spec.shape[:2], heads, spec.shape[2] // heads)


def _shape_of_mask(
    name: str, mask: Description, sizes: tuple[int, int, int | None], sparse_mode: int
) -> tuple[int, ...] | None:
    """Returns the shape (B or 1, 1, S1, S2) of a mask, or None for the triangle that the modes 2 to 4 imply."""
    shape, dtype = _spec(name, "attn_mask", mask).shape, mask[1]
    batch, queries, keys = sizes
    if dtype not in _MASKS:
        raise TypeError(f"{name}: attn_mask must be bool, int8, uint8 or float16, got {dtype}")
    if sparse_mode > 1:
        if shape[-2:] != (2048, 2048) or math.prod(shape) != 2048**2:
            raise ValueError(
                f"{name}: attn_mask must have shape (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048), or be None, "
                f"if sparse_mode is {sparse_mode}, got {shape}"
            )
        return None
    full = shape
    if len(shape) == 3:
        full = (shape[0], 1, *shape[1:])
    if len(shape) == 2:
        full = (shape[0], 1, 1, shape[1]) if queries == 1 else (1, 1, *shape)
    wanted = (1, queries, full[-1] if keys is None else keys)
    if len(full) != 4 or full[0] not in (1, batch) or full[1:] != wanted:
        raise ValueError(
            f"{name}: attn_mask must have shape (B, 1, {queries}, {wanted[2]}), with B = {batch} or 1, or lack one or "
            f"two of the first axes, got {shape}"
        )
    return full


def _check_shift(name: str, shift: Description, sizes: tuple[int, int, int, int]) -> None:
    """Requires pse_shift to be (B or 1, N, S1, S2), of floats; it may have more rows and columns."""
    shape, dtype = _spec(name, "pse_shift", shift).shape, shift[1]
    if dtype not in FLOATS:
        raise TypeError(f"{name}: pse_shift must be float16, float32 or float64, got {dtype}")
    batch, heads, queries, keys = sizes
    is_large = len(shape) == 4 and shape[0] in (1, batch) and shape[2] >= queries and shape[3] >= keys
    if not is_large or shape[1] != heads:
        raise ValueError(
            f"{name}: pse_shift must have shape (B, {heads}, S1, S2), with B = {batch} or 1, S1 of {queries} and S2 of "
            f"{keys} at least, got {shape}"
        )
