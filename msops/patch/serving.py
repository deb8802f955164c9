"""Holds what `patch_mindspore` puts in place of MindSpore's operators for caches in blocks: the same arguments and
outputs, msops' kernels.

Ascend's masks are added to logits, and its offsets are added to codes: a zero point is the negative of one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import once
from msops.core.inputs import describe, spec_of
from msops.core.spec import FLOATS, Spec
from msops.operators.paged_attention import paged_attention
from msops.operators.write_cache import write_cache

from .attention_plan import starts_of_lengths
from .replacement import Replacement

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description


class PagedAttention(Replacement):
    """Calls paged_attention. The result has the form of the query: (T, H D), (B, s, H D) or (T, H, D)."""

    def __init__(
        self,
        head_num: int,
        scale_value: float = 1.0,
        kv_head_num: int = 0,
        kv_cache_quant_mode: str = "DEFAULT",
        mask_mode: str = "MASK_DEFAULT",
        mla_v_dim: int = 0,
    ) -> None:
        name = "PagedAttention"
        _check_modes(name, kv_cache_quant_mode, mask_mode)
        self.sizes = (name, int(head_num), int(kv_head_num) or int(head_num), int(mla_v_dim))
        self.scale, self.causal = float(scale_value), mask_mode == "TRAPEZOIDAL"

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor | None = None,
        block_tables: Any = None,
        context_lens: Any = None,
        antiquant_scale: Tensor | None = None,
        antiquant_offset: Tensor | None = None,
        attn_mask: Tensor | None = None,
        q_seq_lens: Tensor | None = None,
        alibi_mask: Tensor | None = None,
    ) -> Tensor:
        starts = None
        if q_seq_lens is not None:
            starts = starts_of_lengths("q_seq_lens", q_seq_lens)
        codes = (antiquant_scale, antiquant_offset)
        tables, masks = (block_tables, context_lens, starts), (attn_mask, alibi_mask)
        return _attend(self.sizes, self.scale, self.causal, (query, key_cache, value_cache), tables, codes, masks)


class PagedAttentionMask(Replacement):
    """Calls paged_attention with a mask (B, H, q, W), which is added."""

    def __init__(
        self, head_num: int, scale_value: float = 1.0, kv_head_num: int = 0, kv_cache_quant_mode: str = "DEFAULT"
    ) -> None:
        name = "PagedAttentionMask"
        _check_modes(name, kv_cache_quant_mode, "MASK_DEFAULT")
        self.sizes, self.scale = (name, int(head_num), int(kv_head_num) or int(head_num), 0), float(scale_value)

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        antiquant_scale: Tensor | None = None,
        antiquant_offset: Tensor | None = None,
        alibi_mask: Tensor | None = None,
    ) -> Tensor:
        codes, tables = (antiquant_scale, antiquant_offset), (block_tables, context_lens, None)
        caches = (query, key_cache, value_cache)
        return _attend(self.sizes, self.scale, False, caches, tables, codes, (None, alibi_mask))


class ReshapeAndCache(Replacement):
    """Writes keys, and values where they are given, into caches by write_cache, and returns the keys."""

    def __call__(
        self,
        key: Tensor,
        value: Tensor | None = None,
        key_cache: Any = None,
        value_cache: Any = None,
        slot_mapping: Any = None,
    ) -> Tensor:
        slots = slot_mapping.reshape(-1)
        write_cache(key_cache, key.reshape(_rows("ReshapeAndCache", describe(key), describe(key_cache))), slots)
        if value is not None:
            rows = _rows("ReshapeAndCache", describe(value), describe(value_cache))
            write_cache(value_cache, value.reshape(rows), slots)
        return key


def _attend(
    sizes: tuple[str, int, int, int],
    scale: float,
    causal: bool,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    tables: tuple[Any, Any, Tensor | None],
    codes: tuple[Tensor | None, Tensor | None],
    masks: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    (query, key_cache, value_cache), (block_tables, lengths, starts), (mask, alibi) = inputs, tables, masks
    rows = _rows_of_query(sizes, describe(query), describe(key_cache))
    values, value_size = value_cache, None
    if sizes[3] > 0:
        values, value_size = None, sizes[3]
    of_tables = describe(block_tables)[0]
    bias = _bias_of_tokens(sizes, "attn_mask", mask, rows, of_tables)
    of_alibi = _bias_of_tokens(sizes, "alibi_mask", alibi, rows, of_tables)
    if bias is None:
        bias = of_alibi
    elif of_alibi is not None:
        bias = bias + of_alibi
    key_scale, value_scale, key_zero, value_zero = _codes_of(sizes, codes, values is not None)
    terms = (causal, scale, None, None, 0.0, bias, None)
    of_codes = (key_scale, value_scale, key_zero, value_zero)
    q = query.reshape(rows)
    out = paged_attention(q, key_cache, values, block_tables, lengths, starts, *terms, *of_codes, value_size)
    return out.reshape(_form_of_result(describe(query), rows, describe(out)))  # type: ignore[union-attr]


def _bias_of_tokens(
    sizes: tuple[str, int, int, int], what: str, mask: Tensor | None, rows: tuple[int, int, int], tables: Any
) -> Tensor | None:
    """Returns what is added to the logits of each token, (T, H or 1, W)."""
    if mask is None:
        return None
    heads, width, copies = _axes_of_mask(sizes[0], what, describe(mask), rows, tables)
    if heads > 0:
        return mask.transpose(0, 2, 1, 3).reshape((rows[0], heads, width))
    bias = mask.reshape((-1, 1, width))
    if copies > 1:
        bias = ops.tile(bias, (copies, 1, 1))
    return bias


def _codes_of(
    sizes: tuple[str, int, int, int], codes: tuple[Tensor | None, Tensor | None], has_values: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns scales and zero points of keys and values."""
    scale, offset = codes
    if scale is None:
        return None, None, None, None
    _check_scale(sizes[0], describe(scale))
    scales, zeros = scale.reshape((2, sizes[2], -1)), None
    if offset is not None:
        zeros = ops.neg(ops.cast(offset, mindspore.float32)).reshape((2, sizes[2], -1))
    key_zero = None if zeros is None else zeros[0]
    if not has_values:
        return scales[0], None, key_zero, None
    return scales[0], scales[1], key_zero, None if zeros is None else zeros[1]


def _spec(name: str, what: str, x: Description) -> Spec:
    """Requires a Tensor, and returns its Spec."""
    spec = spec_of(x)
    if isinstance(spec, str):
        raise TypeError(f"{name}: {what} must be a Tensor, got {spec}")
    return spec


@once
def _check_modes(name: str, kv_cache_quant_mode: str, mask_mode: str) -> None:
    if kv_cache_quant_mode != "DEFAULT":
        raise NotImplementedError(f"{name}: kv_cache_quant_mode must be 'DEFAULT', got {kv_cache_quant_mode!r}")
    if mask_mode not in ("MASK_DEFAULT", "TRAPEZOIDAL"):
        raise NotImplementedError(f"{name}: mask_mode must be 'MASK_DEFAULT' or 'TRAPEZOIDAL', got {mask_mode!r}")


@once
def _check_scale(name: str, scale: Description) -> None:
    dtype = _spec(name, "antiquant_scale", scale).dtype
    if dtype not in FLOATS:
        raise NotImplementedError(f"{name}: antiquant_scale must be of floats, got {dtype}")


@once
def _rows(name: str, x: Description, cache: Description) -> tuple[int, ...]:
    """Returns the shape of the rows of x in a cache (P, S, H, D)."""
    of_x, of_cache = _spec(name, "key or value", x), _spec(name, "key_cache or value_cache", cache)
    if len(of_cache.shape) != 4:
        raise NotImplementedError(f"{name}: caches must have shape (P, S, H, D), got {of_cache.shape}")
    of_row = of_cache.shape[2:]
    if math.prod(of_row) == 0 or of_x.size % math.prod(of_row):
        raise ValueError(f"{name}: key and value must have rows of {of_row} as the caches do, got shape {of_x.shape}")
    return (of_x.size // math.prod(of_row), *of_row)


@once
def _rows_of_query(
    sizes: tuple[str, int, int, int], query: Description, key_cache: Description
) -> tuple[int, int, int]:
    """Returns the shape (T, H, D) of the queries."""
    name, heads, kv_heads, _ = sizes
    of_query, of_cache = _spec(name, "query", query), _spec(name, "key_cache", key_cache)
    if len(of_cache.shape) != 4:
        raise NotImplementedError(f"{name}: caches must have shape (P, S, kv_head_num, D), got {of_cache.shape}")
    shape, width = of_query.shape, of_cache.shape[3]
    if of_cache.shape[2] != kv_heads:
        raise ValueError(f"{name}: key_cache must have kv_head_num = {kv_heads} heads, got shape {of_cache.shape}")
    is_flat = len(shape) in (2, 3) and shape[-1] == heads * width
    if not is_flat and shape[1:] != (heads, width):
        raise ValueError(
            f"{name}: query must have shape (T, {heads * width}), (B, s, {heads * width}) or (T, {heads}, {width}), "
            f"got {shape}"
        )
    return math.prod(shape) // max(1, heads * width), heads, width


@once
def _form_of_result(query: Description, rows: tuple[int, int, int], out: Description) -> tuple[int, ...]:
    """Returns the shape of the result, with the axes of the query."""
    shape, (tokens, heads, values) = spec_of(query).shape, spec_of(out).shape  # type: ignore[union-attr]
    if len(shape) == 3 and shape == rows:
        return tokens, heads, values
    return (*shape[:-1], heads * values)


@once
def _axes_of_mask(
    name: str, what: str, mask: Description, rows: tuple[int, int, int], tables: Any
) -> tuple[int, int, int]:
    """Returns the heads of a mask (B, H, q, W), or 0; W; and how many times its rows are repeated for all tokens."""
    shape, (tokens, heads, _) = _spec(name, what, mask).shape, rows
    if len(shape) == 4 and shape[1] in (1, heads) and shape[0] * shape[2] == tokens:
        return shape[1], shape[3], 1
    of_mask = math.prod(shape[:-1])
    is_of_each = len(shape) == 2 or shape[0] == 1  # each of the sequences, which have one row of tables each
    if len(shape) in (2, 3) and (
        of_mask in (1, tokens) or (is_of_each and tables and of_mask * (tables[0] or 0) == tokens)
    ):
        return 0, shape[-1], tokens // max(1, of_mask)
    raise ValueError(
        f"{name}: {what} must have shape (T, W), (B, q, W), (q, W) or (B, {heads}, q, W) for the {tokens} tokens, got "
        f"{shape}"
    )
